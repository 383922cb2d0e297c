"""Engines are compiled and called as the model is, and what does not fit is answered in a sentence."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pareback as pb

pytestmark = pytest.mark.usefixtures("without_gradients")


class Both(nn.Module):
    """An image and a table: not interchangeable, as one is subtracted from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 2, 3), nn.Linear(4, 2)

    def forward(self, img: Tensor, tab: Tensor, scale: Tensor | None = None) -> Tensor:
        found: Tensor = self.conv(img).mean((2, 3)) - 3.0 * self.linear(tab)
        return found if scale is None else found * scale


class ByName(Both):
    """What can only be given by name, in another order than it is declared."""

    def forward(self, img: Tensor, *, scale: Tensor, tab: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(img, tab, scale)


class AnyName(Both):
    def forward(self, *, img: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(img, **others)


def _inputs(batch: int) -> dict[str, Tensor]:
    return {"img": torch.randn(batch, 1, 5, 5), "tab": torch.randn(batch, 4), "scale": torch.randn(batch, 1)}


def test_a_dict_is_keyword_arguments() -> None:
    """In whatever order they are, at compilation and in calls."""
    model = Both().eval()
    two = {name: x for name, x in _inputs(1).items() if name != "scale"}
    for example in (two, dict(reversed(two.items())), tuple(two.values()), list(two.values()), (*two.values(), None)):
        engine = pb.compile(model, example, threads=1)
        given = _inputs(3)
        a, b = given["img"], given["tab"]
        wanted = model(a, b)
        for found in (
            engine(a, b),
            engine(a, tab=b),
            engine(tab=b, img=a),
            engine(a, b, None),
            engine(a, b, scale=None),
        ):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [Both, ByName, AnyName])
def test_inputs_that_have_names_only(kind: type[Both]) -> None:
    model = kind().eval()
    engine = pb.compile(model, _inputs(2), threads=1)
    for batch in (1, 5):
        given = _inputs(batch)
        wanted = Both.forward(model, **given)
        torch.testing.assert_close(engine(**given), wanted)
        torch.testing.assert_close(engine(**dict(reversed(given.items()))), wanted)


def test_calls_that_do_not_fit() -> None:
    two = {name: x for name, x in _inputs(2).items() if name != "scale"}
    engine = pb.compile(Both(), two, threads=1)
    a, b, c = _inputs(2).values()
    with pytest.raises(TypeError, match="compiled for 2 inputs, 1 was given"):
        engine(a)
    with pytest.raises(TypeError, match="compiled for 2 inputs, 3 were given"):
        engine(a, b, c)
    with pytest.raises(TypeError, match="called like the model's forward.*missing a required argument: 'tab'"):
        engine(a, table=b)
    with pytest.raises(TypeError, match="must be a torch.float32 tensor"):
        engine(a, tab=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="3 inputs, 'scale' and 'tab' by name, 3 were given"):
        pb.compile(ByName(), _inputs(2), threads=1)(a, b, c)


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (None, "must be a tensor, a tuple of tensors or a dict of tensors by name, not None"),
        (7, "a dict of tensors by name, not int"),
        ((1, 64), r"example_inputs\[0\] is 1 and no tensor"),
        ((), "missing a required argument: 'img'"),
        ({"image": torch.ones(1)}, "do not fit Both.forward.*'img'"),
        ((torch.ones(2, 1, 5, 5), np.ones((2, 4))), r"example_inputs\[1\] is a ndarray and no tensor"),
        ((torch.ones(2, 1, 5, 5), torch.tensor(1.0)), r"has shape \(\): it needs a batch of at least one"),
        ((torch.ones(0, 1, 5, 5), torch.ones(0, 4)), r"has shape \(0, 1, 5, 5\): it needs a batch"),
        ((torch.ones(2, 1, 5, 5), torch.ones(3, 4)), "first sizes are 2, 3: it must be the same batch"),
    ],
)
def test_examples_that_do_not_fit(example: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        pb.compile(Both(), example)


@pytest.mark.parametrize("threads", [0, -3, True, False, "2", 1.5])
def test_threads_are_checked(threads: Any) -> None:
    wanted = ValueError if type(threads) is int else TypeError
    with pytest.raises(wanted, match=f"threads={threads!r} is not a whole number of at least 1"):
        pb.compile(nn.Linear(4, 2), torch.ones(1, 4), threads=threads)


def test_threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP allows a list, for regions within regions."""
    model, x = nn.Linear(4, 2), torch.ones(1, 4)
    assert pb.compile(model, x, threads=np.int64(1)).report().threads == 1  # type: ignore[arg-type]
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert pb.compile(model, x).report().threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert pb.compile(model, x).report().threads == torch.get_num_threads()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_warned_of(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(3, 4, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=f"float32 only: PyTorch runs everything.*{name}.*model.float()"):
        engine = pb.compile(model, x, threads=1)
    torch.testing.assert_close(engine(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pb.compile(model.float(), x.float(), threads=1)


class Odd(nn.Module):
    """Does something that is not the same for every batch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.what == "choice":
            return y if x.sum() > 0 else -y
        if self.what == "size":
            return y.reshape(2, -1)
        if self.what == "numpy":
            return y + torch.from_numpy(x.numpy())
        raise KeyError("a mistake")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("choice", "Odd cannot be captured: what it computes next depends on its data"),
        ("size", "Odd cannot be captured: it works for the example's batch size alone.*The batch must be free"),
        ("numpy", "Odd cannot be captured: torch.export says '.*numpy"),
        ("mistake", "Odd itself does not run on the example inputs: 'a mistake'"),
    ],
)
def test_models_that_cannot_be_captured(what: str, sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence, with PyTorch's own words behind it, and nothing printed."""
    with pytest.raises(ValueError, match=sentence) as raised:
        pb.compile(Odd(what), torch.randn(2, 4), threads=1)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")


def test_an_engine_stays_in_its_process() -> None:
    engine = pb.compile(nn.Linear(4, 2), torch.ones(1, 4), threads=1)
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="pb.load_engine(.*) where it is to run"):
            copied(engine)


def test_messages_use_the_models_own_names() -> None:
    """Not those of the exported graph, which calls ``input`` ``input_1`` and the second of ``*xs`` ``xs_1``."""

    class Reserved(nn.Module):
        def forward(self, input: Tensor, *, lambda_: Tensor) -> Tensor:
            return input + lambda_

    class Many(nn.Module):
        def forward(self, first: Tensor, *xs: Tensor) -> Tensor:
            return first + xs[0] + xs[1]

    right, wrong = torch.randn(2, 4), torch.randn(2, 5)
    engine = pb.compile(Reserved(), {"input": right, "lambda_": right}, threads=1)
    with pytest.raises(ValueError, match=r"^input has shape \(2, 5\)"):
        engine(wrong, lambda_=right)
    with pytest.raises(TypeError, match="^lambda_ must be a torch.float32 tensor"):
        engine(right, lambda_=right.double())
    with pytest.raises(ValueError, match=r"^xs\[1\] has shape \(2, 5\)"):
        pb.compile(Many(), (right, right, right), threads=1)(right, right, wrong)
    with pytest.raises(ValueError, match=r"^input has shape \(2, 5\)"):
        pb.compile(nn.Sequential(nn.Linear(4, 4)), right, threads=1)(wrong)
