"""What a run came to: exact counts, bytes, and the plain model on disk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...artifact.weights import write_plain
from ...costs.flops import count_flops
from ...costs.limits import mask_bytes
from ...pruning.pruner import Pruner
from ...report import Report, report_on
from ...runs.record import counted_latents


def finish_and_count(model: nn.Module, pruner: Pruner | None) -> dict[str, Any]:
    """Finish the pruner and return the counts of the plain model that is left, as result.json has them.

    ``bytes`` takes non-zeros at their item size and one bit per weight of pruned tensors, and everything else that the
    model stores as it is: what a ``bytes`` budget counts.
    """
    latents = {} if pruner is None else _latents(pruner)
    report = report_on(model, {}) if pruner is None else _landed(pruner)
    stored = model.state_dict().values()
    dense = sum(value.numel() * value.element_size() for value in stored)
    return {
        "parameters": report.params,
        "nonzeros": report.nonzeros,
        "pruned_weights": report.pruned_params,
        "pruned_nonzeros": report.pruned_nonzeros,
        "sparsity": report.sparsity,
        "bytes": dense - _saved(report),
        "dense_bytes": dense,
        "tensors": _tensors(report, pruner, latents),
    }


def flops(model: nn.Module, tensors: Sequence[dict[str, Any]], shape: tuple[int, ...]) -> dict[str, int | None]:
    """Return the operations for one image of ``shape``, 2 per multiply-add: all of them as ``dense_flops``.

    ``flops`` leaves out those with zeros of pruned ``tensors``, the entries that :func:`finish_and_count` makes: what a
    ``flops`` budget counts. Both are None for a model whose operations cannot be counted.
    """
    try:
        count = count_flops(model, torch.zeros(1, *shape, device=next(model.parameters()).device))
    except Exception:  # whatever it is, the model has been trained
        return {"flops": None, "dense_flops": None}
    spared = Fraction(0)
    for entry in tensors:
        if entry["pruned"]:
            zeros = Fraction(entry["size"] - entry["nonzeros"], entry["size"])
            spared += count.per_parameter.get(entry["name"], Fraction(0)) * zeros
    return {"flops": round(count.total - spared), "dense_flops": round(count.total)}


def _landed(pruner: Pruner) -> Report:
    with warnings.catch_warnings():
        # Steps that fp16's loss scaling skipped are missing from the pruner's count, and planned for by nobody.
        warnings.filterwarnings("ignore", "finish\\(\\) was called after")
        return pruner.finish()


def _saved(report: Report) -> int:
    pruned = [row for row in report.rows if row.pruned]
    zeros = sum((row.params - row.nonzeros) * (row.bytes // row.params) for row in pruned)
    return zeros - math.ceil(mask_bytes(sum(row.params for row in pruned)))


def _latents(pruner: Pruner) -> dict[str, dict[str, Any]]:
    """Return how the latent weights are distributed, which finish() lets go of."""
    spreads, thresholds = pruner.spreads().tolist(), pruner.thresholds().tolist()
    with pruner.latents():
        values = [pruner.model.get_parameter(name) for name in pruner.names]
        return {
            name: counted_latents(value, threshold, spread)
            for name, value, threshold, spread in zip(pruner.names, values, thresholds, spreads, strict=True)
        }


def _tensors(report: Report, pruner: Pruner | None, latents: Mapping[str, Any]) -> list[dict[str, Any]]:
    known: dict[str, tuple[float, float]] = {}
    if pruner is not None:
        spreads, thresholds = pruner.spreads().tolist(), pruner.thresholds().tolist()
        known = dict(zip(pruner.names, zip(spreads, thresholds, strict=True), strict=True))
    return [
        {
            "name": row.name,
            "shape": list(row.shape),
            "size": row.params,
            "nonzeros": row.nonzeros,
            "pruned": row.pruned,
            "sigma": known.get(row.name, (None, None))[0],
            "threshold": known.get(row.name, (None, None))[1],
            **({"latents": latents[row.name]} if row.name in latents else {}),
        }
        for row in report.rows
    ]


def save(model: nn.Module, path: Path, classes: Sequence[str]) -> None:
    """Write the weights as a plain safetensors file, with the names of the classes."""
    write_plain(path, dict(model.state_dict()), classes=classes, alone=True)
