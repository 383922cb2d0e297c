"""Arithmetic that is compiled on GPUs: the same numbers, and no harm where it cannot be compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from pareback.fusing import Fusing


def test_off_a_gpu_the_function_runs_as_it_is() -> None:
    """Nothing is compiled where launches cost nothing."""
    calls = []
    fusing = Fusing(lambda x: calls.append(x) or x + 1)
    assert fusing(False, 1) == 2
    assert fusing(False, 2) == 3
    assert calls == [1, 2]


def test_compiled_it_gives_the_same_numbers() -> None:
    """The first call compiles, the following ones use what was compiled, in place changes included."""
    state = torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        state.add_(x.sin() * 0.5)
        return state * 2.0

    fusing, x = Fusing(step), torch.arange(4.0)
    first, second = fusing(True, x).clone(), fusing(True, x).clone()
    torch.testing.assert_close(first, x.sin())
    torch.testing.assert_close(second, 2.0 * x.sin())
    assert fusing._compiled is not fusing._plain


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """A compiler that refuses makes a step slower, not wrong."""

    def reads(x: Tensor) -> float:
        torch._dynamo.graph_break()
        return float(x.sum())

    fusing = Fusing(reads)
    assert fusing(True, torch.ones(3)) == 3.0
    assert fusing._compiled is reads
    assert fusing(True, torch.ones(2)) == 2.0
