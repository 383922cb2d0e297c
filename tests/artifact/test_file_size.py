"""How large files are: against the entropy of the positions plus raw values, and against a plain file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pruned_examples import convnet, prune, sparse
from safetensors.torch import save_file
from torch import Tensor, nn

from pareback.artifact import save
from pareback.lab.models.wrn import WideResNet


def bound(tensors: dict[str, Tensor]) -> float:
    """Bytes of n·H(density) bits for positions and 32 bits for every non-zero, tensor by tensor."""
    bits = 0.0
    for tensor in tensors.values():
        size, count = tensor.numel(), int(torch.count_nonzero(tensor))
        bits += 32 * count
        if 0 < count < size:
            density = count / size
            bits -= size * (density * math.log2(density) + (1 - density) * math.log2(1 - density))
    return bits / 8


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.9], ids=["uniform", "differing layers"])
@pytest.mark.parametrize("sparsity", [0.85, 0.90, 0.95, 0.98])
def test_near_the_bound_on_a_wide_residual_network(sparsity: float, spread: float, tmp_path: Path) -> None:
    """At most 3 % above it, header and checksums included, where 5 % are allowed."""
    torch.manual_seed(0)
    model = WideResNet(16, 8)
    prune(model, 1 - sparsity, spread)
    save(model, tmp_path / "model.pare")
    assert (tmp_path / "model.pare").stat().st_size <= 1.03 * bound(model.state_dict())


def test_half_precision_halves_the_values(tmp_path: Path) -> None:
    """Two bytes less per non-zero of a pruned tensor."""
    weight = sparse(400, 500, density=0.1)
    save({"weight": weight}, tmp_path / "single.pare")
    save({"weight": weight}, tmp_path / "half.pare", values="float16")
    saved = (tmp_path / "single.pare").stat().st_size - (tmp_path / "half.pare").stat().st_size
    assert abs(saved - 2 * int(torch.count_nonzero(weight))) <= 80  # bytes of the header


def plain_size(tensors: dict[str, Tensor], path: Path) -> int:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return path.stat().st_size


@pytest.mark.parametrize("density", [1.0, 0.999, 0.97, 0.9, 0.6])
def test_never_much_larger_than_a_plain_file(density: float, tmp_path: Path) -> None:
    """Within 1 % for a network of ten thousand weights, dense or with some zeros."""
    tensors = convnet(density).state_dict()
    save(tensors, tmp_path / "model.pare")
    assert (tmp_path / "model.pare").stat().st_size <= 1.01 * plain_size(tensors, tmp_path / "plain")


def test_tiny_models(tmp_path: Path) -> None:
    """Where 1 % is a few bytes the version and the checksums show: 64 bytes, and 8 for every tensor."""
    for model in (nn.Linear(2, 1), nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))), nn.BatchNorm1d(4)):
        tensors = model.state_dict()
        save(tensors, tmp_path / "model.pare")
        limit = 1.01 * plain_size(tensors, tmp_path / "plain") + 64 + 8 * len(tensors)
        assert (tmp_path / "model.pare").stat().st_size <= limit


@pytest.mark.parametrize("size", [1, 10, 60, 100, 300, 1000])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.2, 0.5, 0.9])
def test_a_tensor_is_sparse_only_if_that_is_smaller(size: int, density: float, tmp_path: Path) -> None:
    """Small or nearly full ones stay dense, so that no file grows by being coded."""
    tensors = {"layer.weight": sparse(size, density=density)}
    save(tensors, tmp_path / "model.pare")
    assert (tmp_path / "model.pare").stat().st_size <= plain_size(tensors, tmp_path / "plain") + 72
