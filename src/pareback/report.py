"""Exact counts of a model: per tensor and in total, beside what a Gaussian would predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .costs.flops import FlopCount, count_flops
from .costs.selection import plain_names
from .messages import counted, figure, suggests_options
from .sharding import local

if TYPE_CHECKING:
    from .pruning.pruner import Pruner


@dataclass(frozen=True)
class Row:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    params: int
    nonzeros: int
    pruned: bool
    predicted: float | None  #: sparsity a zero-mean Gaussian of the latents' spread would have at the threshold
    flops: Fraction | None
    bytes: int

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return 1.0 - self.nonzeros / self.params if self.params else 0.0

    @property
    def nonzero_flops(self) -> Fraction | None:
        """The operations left when products with zeros are skipped; unpruned tensors count whole."""
        if self.flops is None or not self.pruned:
            return self.flops
        return self.flops * self.nonzeros / self.params


@dataclass(frozen=True)
class Report:
    """Counts of a model. Prints as a table; :meth:`as_dict` is for machines.

    ``pruned`` tensors are those of the pruner it was asked with, or else the tensors of two or more dimensions that
    hold zeros. ``kept`` counts as budgets do: the non-zeros of pruned tensors and every weight of the others.
    """

    rows: tuple[Row, ...]
    total_flops: Fraction | None = None
    found_out: bool = False  #: whether pruned tensors were told by their zeros, no pruner having been asked

    def _pruned(self) -> list[Row]:
        return [row for row in self.rows if row.pruned]

    @property
    def params(self) -> int:
        """All parameters of the model, zeros included."""
        return sum(row.params for row in self.rows)

    @property
    def nonzeros(self) -> int:
        """Parameters of the whole model that are not zero."""
        return sum(row.nonzeros for row in self.rows)

    @property
    def kept(self) -> int:
        """What a ``params`` budget counts."""
        return sum(row.nonzeros if row.pruned else row.params for row in self.rows)

    @property
    def pruned_params(self) -> int:
        """Weights of the pruned tensors, zeros included."""
        return sum(row.params for row in self._pruned())

    @property
    def pruned_nonzeros(self) -> int:
        """Non-zeros of the pruned tensors."""
        return sum(row.nonzeros for row in self._pruned())

    @property
    def sparsity(self) -> float:
        """Zeros over weights, pruned tensors only: what a ``sparsity`` budget speaks of."""
        return 1.0 - self.pruned_nonzeros / self.pruned_params if self.pruned_params else 0.0

    @property
    def model_sparsity(self) -> float:
        """Zeros over parameters of the whole model."""
        return 1.0 - self.nonzeros / self.params if self.params else 0.0

    @property
    def predicted_sparsity(self) -> float | None:
        """The sparsity of the pruned tensors if their weights were Gaussian; known while a pruner is asked."""
        rows = self._pruned()
        if not rows or any(row.predicted is None for row in rows):
            return None
        return sum((row.predicted or 0.0) * row.params for row in rows) / self.pruned_params

    @property
    def nonzero_flops(self) -> Fraction | None:
        """FLOPs per example left when products with zeros are skipped: what a ``flops`` budget counts."""
        if self.total_flops is None:
            return None
        saved = sum(((row.flops or 0) - (row.nonzero_flops or 0) for row in self.rows), Fraction(0))
        return self.total_flops - saved

    def as_dict(self) -> dict[str, Any]:
        """Return totals and rows as plain numbers and strings, ready for JSON."""
        totals = [
            "params",
            "nonzeros",
            "kept",
            "sparsity",
            "model_sparsity",
            "predicted_sparsity",
            "pruned_params",
            "pruned_nonzeros",
        ]
        return {
            **{name: getattr(self, name) for name in totals},
            "flops": _plain(self.total_flops),
            "nonzero_flops": _plain(self.nonzero_flops),
            "tensors": [
                {
                    **asdict(row),
                    "shape": list(row.shape),
                    "sparsity": row.sparsity,
                    "flops": _plain(row.flops),
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        with_flops, with_prediction = (
            self.total_flops is not None,
            any(r.predicted is not None for r in self.rows),
        )
        header = ["tensor", "shape", "params", "non-zero", "sparsity"]
        header += ["Gaussian"] * with_prediction + ["FLOPs", "left"] * with_flops
        body = []
        for row in self.rows:
            cells = [row.name, "×".join(map(str, row.shape)), figure(row.params), figure(row.nonzeros)]
            cells.append(percent(row.sparsity) if row.pruned else "–")
            cells += [percent(row.predicted) if row.predicted is not None else "–"] * with_prediction
            cells += [figure(row.flops or 0), figure(row.nonzero_flops or 0)] if with_flops else []
            body.append(cells)
        return "\n".join([table(header, body, left=2), *self._summary()])

    def __repr__(self) -> str:
        return f"Report({self.nonzeros:,} of {self.params:,} parameters non-zero)"

    def _summary(self) -> list[str]:
        lines = [
            f"whole model:    {self.nonzeros:,} of all {self.params:,} parameters non-zero "
            f"({percent(self.model_sparsity)} sparse)"
        ]
        rows = self._pruned()
        if rows:
            predicted = self.predicted_sparsity
            note = "" if predicted is None else f"; a Gaussian would give {percent(predicted)}"
            kept = f"{self.pruned_nonzeros:,} of {self.pruned_params:,} weights non-zero"
            if self.found_out:
                # Nobody said what was pruned; a dense matrix beside these may well have been meant to be.
                matrices = sum(len(row.shape) > 1 for row in self.rows)
                which = f"in {len(rows)} of {counted(matrices, 'matrix', 'matrices')}, the tensors that hold zeros"
                lines.append(f"partly zero:    {kept} {which} ({percent(self.sparsity)} sparse)")
            else:
                lines.append(f"pruned tensors: {kept} ({percent(self.sparsity)} sparse{note})")
        if self.total_flops is not None and self.nonzero_flops is not None:
            left, total = self.nonzero_flops, self.total_flops
            lines.append(
                f"FLOPs:          {figure(left)} of {figure(total)} per example left ({percent(float(left / total))})"
                if total
                else "FLOPs:          none counted"
            )
        return lines


@suggests_options
def inspect(model: nn.Module, pruner: Pruner | None = None, example_inputs: Any = None) -> Report:
    """Count a model's parameters and non-zeros, and its FLOPs when ``example_inputs`` are given.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    >>> _ = model[0].weight.data.zero_()
    >>> report = inspect(model)
    >>> report.params, report.sparsity
    (13, 1.0)
    """
    flops = None if example_inputs is None else count_flops(model, example_inputs)
    return report_on(model, None if pruner is None else pruner.known(), flops)


@dataclass(frozen=True)
class Known:
    """What is known of a pruned tensor beside its weights."""

    nonzeros: int | None = None  #: given where the parameter itself does not hold the pruned weights
    predicted: float | None = None


def report_on(model: nn.Module, pruned: Mapping[int, Known] | None, flops: FlopCount | None = None) -> Report:
    """Report on a model whose ``pruned`` parameters are given by id, or are to be found out."""
    spent = {} if flops is None else {id(p): flops.per_parameter[n] for n, p in model.named_parameters()}
    rows = []
    for name, parameter in plain_names(model).items():
        known = (pruned or {}).get(id(parameter), Known())
        nonzeros = _nonzeros(parameter) if known.nonzeros is None else known.nonzeros
        rows.append(
            Row(
                name=name.replace("parametrizations.", "").removesuffix(".original"),
                shape=tuple(parameter.shape),
                params=parameter.numel(),
                nonzeros=nonzeros,
                pruned=_looks_pruned(parameter, nonzeros) if pruned is None else id(parameter) in pruned,
                predicted=known.predicted,
                flops=spent.get(id(parameter)),
                bytes=parameter.numel() * parameter.element_size(),
            )
        )
    return Report(tuple(rows), None if flops is None else flops.total, found_out=pruned is None)


def _nonzeros(parameter: Tensor) -> int:
    whole = parameter.detach()
    whole = whole.full_tensor() if local(whole) is not whole else whole  # type: ignore[attr-defined]
    return int(torch.count_nonzero(whole))


def _looks_pruned(parameter: Tensor, nonzeros: int) -> bool:
    return parameter.ndim >= 2 and parameter.is_floating_point() and nonzeros < parameter.numel()


def _plain(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)


def percent(value: float) -> str:
    """Write a fraction as a percentage with enough digits to tell budgets apart.

    >>> percent(0.95)
    '95.000 %'
    """
    return f"{100 * value:.3f} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Lay out a table; the first ``left`` columns are aligned left, the others right.

    >>> print(table(["a", "b"], [["x", "10"]], left=1))
    a   b
    -  --
    x  10
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in [header, rule, *rows])
