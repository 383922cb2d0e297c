"""Exact non-zeros of weights on disk: a run folder, or a file of weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..artifact.intact import check_intact
from ..artifact.weights import read_weights
from ..errors import InvalidValue, MissingFile
from ..report import Report, Row
from .folder import result_of

#: Entries of a state dict that are statistics or counters, not parameters.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def inspect_path(path: Path) -> Report:
    """Count what a run folder or a file of weights holds, as :func:`pareback.inspect` counts a model."""
    if path.is_dir():
        return _of_run(path)
    return _report(read_weights(path), None)


def _of_run(path: Path) -> Report:
    model, checkpoint = path / "model.safetensors", path / "checkpoint.pt"
    if model.exists():
        weights = read_weights(model)
        return _report(weights, _pruned(path, weights) if (path / "result.json").exists() else None)
    check_intact(path, names=(model.name,))  # a finished run is not its last checkpoint
    if checkpoint.exists():
        return _report(read_weights(checkpoint), None)
    raise MissingFile(f"{str(path)!r} holds no model.safetensors and no checkpoint.pt. Give a run's folder.")


def _pruned(path: Path, weights: dict[str, Tensor]) -> dict[str, bool]:
    """Return whether each tensor of a run was pruned, in the order of its layers."""
    pruned = {tensor["name"]: bool(tensor["pruned"]) for tensor in result_of(path)["tensors"]}
    if not pruned.keys() <= weights.keys():
        raise InvalidValue(
            f"model.safetensors and result.json of {str(path)!r} are of two runs. Put the right ones back."
        )
    return pruned


def _report(weights: dict[str, Tensor], pruned: dict[str, bool] | None) -> Report:
    rows = []
    for name in weights if pruned is None else pruned:  # a run remembers the order of its layers, a file may not
        if pruned is None and name.endswith(_BUFFERS):
            continue
        tensor = weights[name]
        nonzeros = int(torch.count_nonzero(tensor))
        looks_pruned = tensor.ndim >= 2 and tensor.is_floating_point() and nonzeros < tensor.numel()
        rows.append(
            Row(
                name=name,
                shape=tuple(tensor.shape),
                params=tensor.numel(),
                nonzeros=nonzeros,
                pruned=looks_pruned if pruned is None else pruned[name],
                predicted=None,
                flops=None,
                bytes=tensor.numel() * tensor.element_size(),
            )
        )
    return Report(tuple(rows))
