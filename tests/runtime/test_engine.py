"""Compiled models give the model's results: against float64, for any batch, several threads and older processors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_toys import Small, error, kinds, pruned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime.native import bindings


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 33, 47])
def test_a_residual_network(size: int) -> None:
    """Pooling, strides, shortcuts, batch norms before and after convolutions, at even and odd sizes."""
    model = pruned(Small())
    engine = compiled(model, torch.randn(1, 3, size, size), threads=1)
    assert kinds(engine) == ["images"]
    assert engine.report().layers == 8
    for batch in (1, 2, 5, 16, 33):
        x = torch.randn(batch, 3, size, size)
        assert error(engine.run_sparse(x), model, x) < 1e-6
        assert error(engine(x), model, x) < 1e-6


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([0.05, 0.5, 1.0]),
)
def test_any_convolution(
    inputs: int,
    outputs: int,
    size: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    batch: int,
    density: float,
) -> None:
    """Kernels of 1 to 7, strides, paddings and dilations, on images of any size, many smaller than the lanes."""
    if min(size) + 2 * padding < dilation * (kernel - 1) + 1 or padding >= kernel:
        return
    torch.manual_seed(0)
    model = pruned(nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation), nn.ReLU()), density)
    x = torch.randn(batch, inputs, *size)
    engine = compiled(model, x, threads=1)
    with torch.no_grad():
        truth = model.double()(x.double())
    assert torch.allclose(engine.run_sparse(x).double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "taken"),
    [
        (3, 1, "same", True),
        (5, 2, "same", True),
        (1, 1, "same", True),
        (2, 2, "same", True),
        (3, 1, "valid", True),
        (4, 1, "same", False),  # one edge more after than before
        ((3, 5), 1, "same", False),
        ((3, 5), (2, 1), "same", False),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding_in_words(kernel: int, dilation: int, padding: str, taken: bool) -> None:
    """Where a word means the same number at every edge, the layer is the engine's; otherwise PyTorch runs it."""
    model = pruned(nn.Sequential(nn.Conv2d(4, 16, kernel, dilation=dilation, padding=padding), nn.ReLU()), 0.3)
    x = torch.randn(3, 4, 17, 14)
    engine = compiled(model, x, threads=1)
    assert engine.report().layers == int(taken)
    assert error(engine.run_sparse(x) if taken else engine(x), model, x) < 1e-6


@pytest.mark.parametrize("groups", [2, 8])
def test_groups(groups: int) -> None:
    """Grouped and depthwise convolutions are lists of non-zeros like any other."""
    model = pruned(nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, groups=groups)), 0.6)
    x = torch.randn(3, 8, 12, 12)
    assert error(compiled(model, x, threads=1).run_sparse(x), model, x) < 1e-6


def test_gelu_is_exact() -> None:
    """From the far left, where it vanishes, to the far right, against float64."""
    model = nn.Sequential(nn.Linear(1, 1), nn.GELU())
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    x = torch.linspace(-12, 12, 4001)[:, None]
    found = compiled(model.eval(), x, threads=1).run_sparse(x)
    truth = F.gelu(x.double())
    assert float((found - truth).abs().max()) < 1e-6


def test_changes_in_place_are_seen() -> None:
    """relu_ changes what is read after it under the old name."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            z = F.relu_(y)
            return y + z

    model = pruned(InPlace())
    x = torch.randn(2, 3, 8, 8)
    engine = compiled(model, x, threads=1)
    assert error(engine.run_sparse(x), model, x) < 1e-6


def test_results_keep_their_structure() -> None:
    """A dictionary of two results comes back as one."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = F.relu(self.conv(x))
            return {"map": y, "class": self.fc(y.mean((2, 3)))}

    model = pruned(Two())
    x = torch.randn(3, 3, 9, 9)
    found = compiled(model, x, threads=1).run_sparse(x)
    with torch.no_grad():
        wanted = model(x)
    assert found.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key])


def test_a_dense_model_is_not_slowed_down() -> None:
    """Where the engine does not gain, PyTorch's operators run, and the report says at which batch."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    x = torch.randn(64, 512)
    engine = compiled(model, x, threads=1)
    engine.prefers_dense[64] = True
    assert "at batch 64" in str(engine.report())
    torch.testing.assert_close(engine(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_several_threads_may_call() -> None:
    """Calls that overlap do not disturb each other, with one thread each and with two."""
    model = pruned(Small())
    for threads in (1, 2):
        engine = compiled(model, torch.randn(1, 3, 24, 24), threads=threads)
        inputs = [torch.randn(1 + i % 3, 3, 24, 24) for i in range(6)]
        with torch.no_grad():
            wanted = [model(x) for x in inputs]
        wrong: list[int] = []

        def work(i: int, engine=engine, inputs=inputs, wanted=wanted, wrong=wrong) -> None:  # type: ignore[no-untyped-def]
            for _ in range(20):
                if not torch.allclose(engine.run_sparse(inputs[i]), wanted[i], atol=1e-5):
                    wrong.append(i)

        callers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert wrong == []


def test_wrong_input_is_answered_in_a_sentence() -> None:
    """Type, number and shape."""
    engine = compiled(pruned(nn.Sequential(nn.Conv2d(3, 4, 3))), torch.randn(1, 3, 8, 8), threads=1)
    with pytest.raises(TypeError, match="must be a torch.float32 tensor on the CPU"):
        engine(torch.randn(1, 3, 8, 8).double())
    with pytest.raises(TypeError, match="compiled for 1 input, 2 were given"):
        engine(torch.randn(1, 3, 8, 8), torch.randn(1))
    with pytest.raises(ValueError, match=r"has shape \(1, 3, 9, 8\); the engine was compiled for \(1, 3, 8, 8\)"):
        engine(torch.randn(1, 3, 9, 8))


def test_without_the_library_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package works without a compiler; this part of it cannot."""
    monkeypatch.setattr(bindings, "available", lambda: False)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler was found"):
        compiled(nn.Linear(2, 2), torch.randn(1, 2))


def test_choices_are_remembered(tmp_path: Path) -> None:
    """The second compilation reads what the first one measured; a damaged file is measured again."""
    model = pruned(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)))
    x = torch.randn(1, 8, 8, 8)
    compiled(model, x, threads=1)
    (file,) = (tmp_path / "cache").iterdir()
    written = file.read_text()
    compiled(model, x, threads=1)
    assert file.read_text() == written
    file.write_text("{")
    engine = compiled(model, x, threads=1)
    assert error(engine.run_sparse(x), model, x) < 1e-6
