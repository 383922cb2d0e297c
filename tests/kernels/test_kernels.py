"""Every implementation of the passes gives the numbers of the reference: weights bit for bit, sums to rounding."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import pareback as pb
from pareback import kernels
from pareback.kernels import native, reference

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def _under_test() -> list[tuple[ModuleType, str]]:
    """Return the implementations that run here and the device each runs on."""
    found: list[tuple[ModuleType, str]] = [(native, "cpu")]
    if INTERPRETING or torch.cuda.is_available():
        from pareback.kernels import addresses, fused

        if INTERPRETING:  # larger and fewer blocks, as the interpreter takes its time with each
            addresses.BLOCK, addresses.PROGRAMS = 4096, 8
        found.append((fused, "cuda" if torch.cuda.is_available() else "cpu"))
    return found


IMPLEMENTATIONS = pytest.mark.parametrize(("by", "device"), _under_test(), ids=lambda v: getattr(v, "__name__", v))
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHRINKS = pytest.mark.parametrize("exponent", [math.inf, 1.0, 3.0], ids=["hard", "soft", "power"])
SHAPES = [(1,), (5,), (16,), (17, 3), (1000,), (64, 64), (4097,), (3, 5, 7, 11), (30003,)]


def _weights(dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    made = [torch.randn(shape).to(device, dtype) for shape in SHAPES]
    made.append(torch.randn(8, 16, 3, 3).to(device, dtype).contiguous(memory_format=torch.channels_last))
    return made


def _bounds(number: int, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    thresholds = torch.rand(number) * 1.5
    thresholds[0] = 0.0
    return thresholds.to(device), (thresholds + 0.05).to(device)


def _same(one: Tensor, other: Tensor, by: ModuleType, dtype: torch.dtype) -> bool:
    """Compare bit for bit. Triton's interpreter alone truncates to bfloat16 instead of rounding."""
    if INTERPRETING and by.__name__.endswith("fused") and dtype == torch.bfloat16:
        return torch.allclose(one.float(), other.float(), rtol=2**-7, atol=1e-6)
    return torch.equal(one, other)


def _supports(by: ModuleType, dtype: torch.dtype) -> bool:
    return by.fits([torch.zeros(4, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")], 3.0) or (
        by is native and dtype != torch.float16
    )


def test_native_kernels_were_built() -> None:
    """The tests run with the compiled kernels, not with what replaces them where no compiler is."""
    assert native.available()


@IMPLEMENTATIONS
@TYPES
@SHRINKS
def test_pruned_weights_are_the_same_bits(by: ModuleType, device: str, dtype: torch.dtype, exponent: float) -> None:
    """A weight pruned by any implementation is the one PyTorch's own operators give, so checkpoints can move."""
    if not _supports(by, dtype):
        assert by is native  # float16 goes to the reference on the CPU
        return
    weights = _weights(dtype, device)
    thresholds, _ = _bounds(len(weights), device)
    for mine, theirs in zip(
        by.shrunk(weights, thresholds, exponent), reference.shrunk(weights, thresholds, exponent), strict=True
    ):
        assert _same(mine, theirs, by, dtype)


@IMPLEMENTATIONS
@TYPES
@SHRINKS
@pytest.mark.parametrize("straight_through", [True, False, 0.3])
def test_a_step_is_the_same(
    by: ModuleType, device: str, dtype: torch.dtype, exponent: float, straight_through: float
) -> None:
    """Pruning, an edit, and adopting it leave the same weights, latents, gradients, counts and moments."""
    if not _supports(by, dtype):
        return
    outcomes = []
    for implementation in (by, reference):
        weights = _weights(dtype, device)
        latents = [w.clone() for w in weights]
        thresholds, edges = _bounds(len(weights), device)
        counts = implementation.prune_(weights, latents, thresholds, edges, exponent)
        recount = implementation.count(latents, thresholds, edges, exponent)
        assert all(torch.equal(a, b) for a, b in zip(counts, (thresholds, *recount), strict=True))
        for w in weights:
            w.view(-1)[:1].fill_(7.0) if w.is_contiguous() else w[0, 0].fill_(7.0)
        grads: list[Tensor | None] = [
            torch.randn_like(w, dtype=torch.float32).to(dtype) for w in _weights(dtype, device)
        ]
        torch.manual_seed(3)
        grads = [torch.randn(w.shape).to(w) * 1.0 for w in weights]
        grads[-1] = torch.empty_like(weights[-1]).copy_(grads[-1])  # type: ignore[arg-type]
        grads[3] = None
        moments = implementation.adopt_(weights, latents, grads, thresholds, exponent, straight_through)
        outcomes.append((weights, latents, [g for g in grads if g is not None], counts, moments))
    mine, theirs = outcomes
    for one, other in zip(mine[0] + mine[1] + mine[2], theirs[0] + theirs[1] + theirs[2], strict=True):
        assert _same(one, other, by, dtype)
    if not (INTERPRETING and dtype == torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(mine[3], theirs[3], strict=True))
    for one, other in zip(mine[4], theirs[4], strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-5, atol=1e-4)


@IMPLEMENTATIONS
def test_sums_do_not_depend_on_chance(by: ModuleType, device: str) -> None:
    """Two runs give identical bits, whatever the number of threads or the order of blocks."""
    outcomes = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2):
        torch.set_num_threads(number)
        weights = [torch.linspace(-1, 1, 100_003, device=device).sin(), torch.linspace(0, 3, 70_001, device=device)]
        grads = [w.cos() for w in weights]
        thresholds = torch.tensor([0.5, 0.7], device=device)
        outcomes.append(torch.stack(by.measure(weights, grads, thresholds, 3.0, True)))
    torch.set_num_threads(threads)
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[1], outcomes[2])


@IMPLEMENTATIONS
def test_nan_stays_visible(by: ModuleType, device: str) -> None:
    """A weight that became NaN is not hidden as a pruned one."""
    weights = [torch.tensor([float("nan"), 0.1, 2.0, float("inf")], device=device)]
    for exponent in (math.inf, 1.0, 3.0):
        pruned = by.shrunk(weights, torch.tensor([1.0], device=device), exponent)[0]
        assert pruned[0].isnan()
        assert pruned[1] == 0
        assert pruned[3] == float("inf")


def test_odd_tensors_go_to_the_reference() -> None:
    """Strided views, float64 and mixed layouts are pruned correctly beside tensors that are swept."""
    torch.manual_seed(0)
    base = torch.randn(64, 64)
    weights = [torch.randn(50), base[:, ::2], torch.randn(20, dtype=torch.float64), torch.randn(30).bfloat16()]
    thresholds = torch.tensor([0.5, 0.6, 0.7, 0.8])
    mixed = kernels.shrunk(weights, thresholds, 3.0)
    kept, band = kernels.count(weights, thresholds, thresholds + 0.1, 3.0)
    for i, (weight, pruned) in enumerate(zip(weights, mixed, strict=True)):
        assert torch.equal(pruned, reference.shrunk([weight], thresholds[i : i + 1], 3.0)[0])
        assert int(kept[i]) == int((weight.abs() > thresholds[i]).sum())
        edge = thresholds[i] + 0.1
        near = (weight.double().abs() >= float(2 * thresholds[i] - edge)) & (weight.double().abs() < float(edge))
        assert int(band[i]) == int(near.sum())


@IMPLEMENTATIONS
def test_training_is_the_same(by: ModuleType, device: str) -> None:
    """Twenty steps to an exact budget end with the same non-zeros and nearly the same thresholds as the reference's."""
    outcomes = []
    for name in (by.__name__.rsplit(".", 1)[-1], "reference"):
        with kernels.only(name):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
            x = torch.randn(64, 32).to(device)
            for _ in range(20):
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
            outcomes.append((pruner.r(), pruner.finish().pruned_nonzeros))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-4, atol=1e-4)
    assert outcomes[0][1] == outcomes[1][1] == 819


@pytest.mark.slow
def test_fused_kernels_in_the_interpreter() -> None:
    """The GPU's kernels pass these tests on a machine without one, in Triton's interpreter."""
    if INTERPRETING or torch.cuda.is_available():
        return  # they are among the parameters above
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "fused and not interpreter",
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
