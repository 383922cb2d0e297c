"""Values of other batch sizes than the example's: images that are one for all, several per example, a batch of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pareback as pb
from pareback.artifact.export import to_onnx

pytestmark = pytest.mark.usefixtures("one_thread")


def pruned(model: nn.Module) -> nn.Module:
    pb.prune_(model.eval(), pb.Budget(sparsity=0.9))
    return model


def conv() -> nn.Conv2d:
    return nn.Conv2d(8, 16, 3, padding=1)


def check(model: nn.Module, *inputs: Tensor) -> None:
    """Compare the stages with the model itself, several times: what is out of bounds need not show at once."""
    engine = pb.compile(model, inputs, threads=1)
    with torch.no_grad():
        for _ in range(3):
            for got in (engine(*inputs), engine.run_sparse(*inputs)):
                wanted = model(*inputs)
                pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
                assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


# -- images of other batches in one model ----------------------------------------------------------------------------


class PositionMap(nn.Module):
    """A learned map, embedded by a convolution and added to every image."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()
        self.position = nn.Parameter(torch.randn(1, 8, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        sum_: Tensor = self.b(self.position) + self.a(x)
        return sum_


class Prototypes(nn.Module):
    """Images compared with five that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()
        self.prototypes = nn.Parameter(torch.randn(5, 8, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        likeness: Tensor = self.a(x).mean((2, 3)) @ self.b(self.prototypes).mean((2, 3)).T
        return likeness


class Clips(nn.Module):
    """Clips of three frames and a still picture each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, clip: Tensor, still: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(clip.flatten(0, 1)), self.b(still)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("model", [PositionMap, Prototypes])
def test_images_that_are_the_same_for_all(model: type[nn.Module], batch: int) -> None:
    """They were put into one stage with the batch, which read and wrote past their end: 1e30, or a crash."""
    torch.manual_seed(0)
    check(pruned(model()), torch.randn(batch, 8, 12, 12))


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_several_images_per_example_beside_one(batch: int) -> None:
    torch.manual_seed(0)
    check(pruned(Clips()), torch.randn(batch, 3, 8, 12, 12), torch.randn(batch, 8, 12, 12))


def test_such_an_engine_can_be_saved(tmp_path: Path) -> None:
    """Its file is refused if a stage holds images of several batches; none does now."""
    torch.manual_seed(0)
    model, x = pruned(PositionMap()), torch.randn(3, 8, 12, 12)
    pb.compile(model, x, threads=1).save(tmp_path / "model.pbe")
    with torch.no_grad():
        assert torch.allclose(pb.load_engine(tmp_path / "model.pbe")(x), model(x), atol=1e-5)


# -- a batch of one --------------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Takes the mean of the batch off, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y if x.shape[0] == 1 else y - y.mean(0, keepdim=True)


class Squeezed(Centred):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y.squeeze()


class NoSingle(Centred):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] > 1
        y: Tensor = self.a(x)
        return y


@pytest.mark.parametrize("model", [Centred, NoSingle])
def test_what_is_otherwise_for_one_example_is_refused_or_mentioned(model: type[nn.Module], tmp_path: Path) -> None:
    """torch.export decides the choice for larger batches, and one example was answered like those, without a word."""
    torch.manual_seed(0)
    net = pruned(model())
    says = f"{model.__name__} computes something else for a batch of one than for larger ones"
    if model is not NoSingle:  # which does not run on it at all
        with pytest.raises(pb.UserError, match=says):
            pb.compile(net, torch.randn(1, 64), threads=1)
        with pytest.raises(pb.UserError, match=says):
            to_onnx(net, tmp_path / "one.onnx", torch.randn(1, 64))
        assert not (tmp_path / "one.onnx").exists()
    x = torch.randn(4, 64)
    with pytest.warns(UserWarning, match="A batch of one will be answered as larger ones are"):
        engine = pb.compile(net, x, threads=1)
    with torch.no_grad():
        assert torch.allclose(engine(x), net(x), atol=1e-5)
    with pytest.warns(UserWarning, match=says):
        to_onnx(net, tmp_path / "four.onnx", x)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_dimension_that_goes_with_one_example_goes(batch: int) -> None:
    """squeeze() looks at the batch when it is called, and so it does in the engine."""
    net = pruned(Squeezed())
    engine = pb.compile(net, torch.randn(batch, 64), threads=1)
    for examples in (1, 3):
        x = torch.randn(examples, 64)
        assert engine(x).shape == net(x).shape
        assert torch.allclose(engine(x), net(x), atol=1e-5)


def test_noise_is_not_taken_for_such_a_choice() -> None:
    """What is drawn at random differs from call to call; and to look does not draw from the user's numbers."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) + torch.randn(x.shape[0], 32)
            return y

    net = pruned(Noisy())
    assert pb.compile(net, torch.randn(1, 64), threads=1)(torch.randn(1, 64)).shape == (1, 32)


# -- state -----------------------------------------------------------------------------------------------------------


class Running(nn.Module):
    """Keeps a mean of what it has seen, in evaluation too."""

    def __init__(self, through: Any = None) -> None:
        super().__init__()
        self.a = nn.Linear(64, 32)
        self.register_buffer("seen", torch.zeros(2))
        self._through = through or (lambda buffer: buffer)

    def forward(self, x: Tensor) -> Tensor:
        self._through(self.seen).add_(1)
        y: Tensor = self.a(x) / self.get_buffer("seen")[0]
        return y


@pytest.mark.parametrize("through", [None, lambda buffer: buffer[:1], lambda buffer: buffer.view(1, 2).squeeze(0)])
def test_a_forward_that_changes_a_buffer_is_refused(through: Any) -> None:
    """Trials counted as calls, so that answers depended on the machine. The model is left as it was."""
    net = pruned(Running(through))
    with pytest.raises(pb.UserError, match="cannot be captured: its forward changes 'seen'"):
        pb.compile(net, torch.randn(2, 64), threads=1)
    assert net.get_buffer("seen").tolist() == [0.0, 0.0]


def test_what_is_changed_on_the_way_is_no_state() -> None:
    class OnTheWay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 32)
            self.register_buffer("scale", torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x).add_(1).mul_(self.scale)
            return y + self.get_buffer("scale").clone().add_(1)

    torch.manual_seed(0)
    check(pruned(OnTheWay()), torch.randn(3, 64))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_model_is_refused_in_a_sentence() -> None:
    net = pruned(nn.Sequential(nn.Linear(64, 32)))
    traced = torch.jit.trace(net, torch.randn(1, 64))  # type: ignore[no-untyped-call]
    with pytest.raises(
        pb.UserError, match="does not say which inputs it takes. Give the model that it was traced from"
    ):
        pb.compile(traced, torch.randn(1, 64))
