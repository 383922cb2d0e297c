"""A finished run as tables and plots read it: from its folder, or from the small file that is kept of it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..artifact.intact import check_own_file
from ..artifact.weights import read_weights
from ..errors import InvalidValue, MissingFile
from ..goals import Goal
from ..lab.recipe.goals import METHODS
from ..shrink import EXPONENTS
from .folder import by_name, result_of

#: Odd, so that zero lies in the middle of a bin.
_BINS = 81
#: The share of the weights by magnitude that the bins reach to: a few far ones would squeeze the rest together.
_REACH = 0.999


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's weights in equal bins from ``-reach`` to ``reach``; weights that are zero are left out.

    A shrink that moves the weights it keeps is undone first: what is counted stands beside the threshold that decided.
    ``latents`` counts the latent weights of the last step in the same bins, pruned ones too.
    """

    name: str
    shape: list[int]
    size: int
    nonzeros: int
    reach: float
    counts: list[int]
    sigma: float
    threshold: float | None
    latents: list[int] | None = None

    @property
    def width(self) -> float:
        """The width of a bin."""
        return 2.0 * self.reach / len(self.counts)

    @property
    def edges(self) -> list[float]:
        """The bins' borders, one more than there are bins."""
        return [-self.reach + number * self.width for number in range(len(self.counts) + 1)]

    @property
    def tallest(self) -> float:
        """The most that a bin, or the bell over the bins, reaches."""
        return max(*self.counts, *(self.latents or ()), self.gaussian(0.0) if self.sigma else 0.0, 1.0)

    def gaussian(self, value: float) -> float:
        """Return what a bin around ``value`` would count if all weights, pruned ones included, were Gaussian."""
        height = self.size * self.width / (self.sigma * math.sqrt(2.0 * math.pi))
        return height * math.exp(-0.5 * (value / self.sigma) ** 2)


def histograms_of(result: dict[str, Any], weights: Path) -> tuple[Histogram, ...]:
    """Count every pruned tensor of a run, or those of a dense one that are large enough; none without its weights."""
    if not weights.exists():
        return ()
    tensors = read_weights(weights)
    pruned = any(entry["pruned"] for entry in result["tensors"])
    goal = result["recipe"]["goal"]
    large = [t for t in result["tensors"] if len(t["shape"]) > 1 and t["size"] >= goal["min_size"]]
    chosen = [t for t in result["tensors"] if t["pruned"]] if pruned else large
    exponent = _exponent(goal)
    return tuple(_counted(entry, tensors[entry["name"]].float().flatten(), exponent) for entry in chosen)


def _counted(entry: dict[str, Any], weights: Tensor, exponent: float) -> Histogram:
    threshold = entry["threshold"]
    kept = weights[weights != 0]
    if threshold is not None and exponent != math.inf:
        kept = torch.copysign((kept.abs() ** exponent + threshold**exponent) ** (1.0 / exponent), kept)
    sigma = entry["sigma"] if entry["sigma"] is not None else float(weights.square().mean().sqrt())
    latents = entry.get("latents") or {"reach": _reach(kept, sigma), "counts": None}  # older runs kept none
    reach = latents["reach"]
    return Histogram(
        name=entry["name"],
        shape=list(entry["shape"]),
        size=entry["size"],
        nonzeros=len(kept),
        reach=reach,
        counts=_binned(kept, reach),
        sigma=sigma,
        threshold=threshold,
        latents=latents["counts"],
    )


def counted_latents(latents: Tensor, threshold: float, sigma: float) -> dict[str, Any]:
    """Count latent weights as result.json keeps them, as far out as those that are kept reach.

    >>> found = counted_latents(torch.tensor([-2.0, -0.1, 0.0, 0.1, 3.0]), threshold=1.0, sigma=1.0)
    >>> found["reach"], sum(found["counts"]), found["counts"][40]
    (3.06, 5, 1)
    """
    values = latents.detach().float().flatten()
    reach = _reach(values[values.abs() > threshold], sigma)
    return {"reach": reach, "counts": _binned(values, reach)}


def _binned(values: Tensor, reach: float) -> list[int]:
    return [int(count) for count in torch.histc(values, bins=_BINS, min=-reach, max=reach).tolist()]


def _reach(kept: Tensor, sigma: float) -> float:
    """Return the magnitude up to which to count, at least 3 σ."""
    if not len(kept):
        return max(3.0 * sigma, 1e-6)
    position = max(1, math.ceil(_REACH * len(kept)))
    return max(float(kept.abs().kthvalue(position).values) * 1.02, 3.0 * sigma, 1e-6)


def _exponent(goal: dict[str, Any]) -> float:
    if goal["shrink"]:
        return EXPONENTS[goal["shrink"]]
    if goal["kind"] in METHODS:
        method: Callable[..., Goal] = METHODS[goal["kind"]]
        return EXPONENTS[method(sparsity=0.0).usual_shrink]
    exact = goal["kind"] == "budget" and goal["enforce"] == "exact"
    return EXPONENTS["power" if exact else "hard"]


#: Digits after the point of an epoch's metrics in the small file.
_DIGITS = 6


@dataclass(frozen=True)
class Record:
    """What came of a run: its result.json, the metrics of each epoch, and how its weights are distributed."""

    result: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    histograms: tuple[Histogram, ...]

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.result["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.result["seed"])

    @property
    def is_pruned(self) -> bool:
        """Whether the run pruned anything."""
        return bool(self.result["pruned_weights"])

    @property
    def pruned_tensors(self) -> list[dict[str, Any]]:
        """The entries of the tensors that were pruned, in the network's order."""
        return [tensor for tensor in self.result["tensors"] if tensor["pruned"]]


def read_record(path: Path) -> Record:
    """Read a run's folder or the small file of one."""
    if path.is_dir():
        result = result_of(path)
        return Record(result, _metrics(path / "metrics.jsonl"), histograms_of(result, path / "model.safetensors"))
    if not path.is_file():
        raise MissingFile(f"There is no {str(path)!r}. Give a run's folder or the file that is kept of one.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        metrics, histograms = content.pop("metrics"), content.pop("histograms")
        return Record(content, tuple(metrics), tuple(Histogram(**entry) for entry in histograms))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(
            f"{str(path)!r} is not the record of a run. Remove it, or write it again with pareback reproduce."
        ) from error


def _metrics(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        raise MissingFile(f"There is no {str(path)!r}. Put it back, or train the run anew with --force.")
    check_own_file(path)
    try:
        return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    except ValueError as error:
        raise InvalidValue(f"{str(path)!r} is damaged. Put it back, or train the run anew with --force.") from error


def write_record(record: Record, path: Path) -> None:
    """Write the small file of a run: everything but its weights, and no path of this machine."""
    content = files.plain(
        {
            **_without_paths(record.result),
            "metrics": [_rounded(row) for row in record.metrics],
            "histograms": [asdict(histogram) for histogram in record.histograms],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "{\n" + ",\n".join(f'"{key}": {_lines(value)}' for key, value in content.items()) + "\n}\n")


def command(argv: Sequence[str]) -> str:
    """Return a command line as anybody would type it: absolute paths become the names of their files.

    >>> command(["/venv/bin/pareback", "train", "--data.path", "/data/cifar100.npz"])
    'pareback train --data.path cifar100.npz'
    """
    return shlex.join(["pareback", *(Path(word).name if Path(word).is_absolute() else word for word in argv[1:])])


def date(record: Record) -> str:
    """Return the day on which the run began, in UTC."""
    return datetime.fromisoformat(record.result["environment"]["start"]).astimezone(UTC).date().isoformat()


def _without_paths(result: dict[str, Any]) -> dict[str, Any]:
    environment, recipe = dict(result["environment"]), by_name(result["recipe"])
    if "argv" in environment:
        environment["command"] = command(environment.pop("argv"))
    if recipe["data"]["path"] is not None:
        recipe["data"] = {**recipe["data"], "path": Path(recipe["data"]["path"]).name}
    if recipe["model"]["pretrained"] is not None:
        recipe["model"] = {**recipe["model"], "pretrained": Path(recipe["model"]["pretrained"]).name}
    return {**result, "environment": environment, "recipe": recipe}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, _DIGITS) if isinstance(value, float) else value for key, value in row.items()}


def _lines(value: Any) -> str:
    """Write a list with an entry per line: small, and a reader of differences sees which epoch changed."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {json.dumps(entry, ensure_ascii=False)}" for entry in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
