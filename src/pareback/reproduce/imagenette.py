"""The paper's Table 3 and Figure 8 on photographs: networks that are trained already, sparsified in 20 epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from .. import files
from ..lab.recipe.schema import START
from ..report import table
from ..runs.record import Record
from .paper import Experiment, PaperRow
from .peers_table import has_run, kept_flops, plot_networks, standard_error, with_error
from .plots import COLOURS, DENSE, MARKERS, THINNED, log_ticks, plot_histograms
from .runner import RowPlan, chosen, records_of, train_rows, trainings_of
from .table import grid, made, shown

#: The epochs of a dense network, and those in which it is sparsified.
LONG, SHORT = 60, 20
_NETWORKS = {"resnet50": "ResNet-50", "alexnet": "AlexNet"}
#: The rates of the 20 epochs, from the rows on held-out images below.
_RATES = {"resnet50": 0.01, "alexnet": 0.01}
_HELD_OUT = {"data.val_share": 0.1}
_BY_START = {"teacher.run": START}

Kept = Mapping[str, Sequence[Record]]


def _dense(network: str) -> PaperRow:
    return PaperRow(
        f"imagenette-{network}-dense", f"dense {_NETWORKS[network]}, {LONG} epochs", of=f"imagenette-{network}"
    )


def _short(network: str, name: str, label: str, changes: Mapping[str, Any], rate: float | None = None) -> PaperRow:
    """A row of 20 epochs that starts from the dense network of the same seed."""
    held = bool(changes.keys() & _HELD_OUT.keys())
    start = f"imagenette-val-{network}-dense" if held else f"imagenette-{network}-dense"
    shape = {"train.epochs": SHORT, "schedule.warmup": 0.0, "optimizer.lr": rate or _RATES[network]}
    row = f"imagenette-val-{network}-{name}" if held else f"imagenette-{network}-{name}"
    return PaperRow(row, label, of=f"imagenette-{network}", changes={**shape, **changes}, start=start)


def _budget(percent: int) -> dict[str, Any]:
    return {"goal.kind": "budget", "goal.sparsity": percent / 100}


def _exact(network: str, percent: int) -> PaperRow:
    return _short(network, f"exact-{percent}", f"exact {percent} %", _budget(percent))


def _sooner(network: str, percent: int) -> PaperRow:
    """The ramp that was best on held-out images: the target is reached in a quarter of the 20 epochs."""
    return _short(
        network, f"sooner-{percent}", f"exact {percent} %, ramp 0.25", {**_budget(percent), "goal.ramp": 0.25}
    )


def _taught(network: str, percent: int) -> PaperRow:
    """The same, learning from the dense network that it starts from as well."""
    return _short(network, f"taught-{percent}", f"exact {percent} %, taught by its start", _budget(percent) | _BY_START)


def _thinned(network: str, percent: int, share: float) -> PaperRow:
    label = f"dense equivalent of {percent} %, {LONG} epochs"
    return PaperRow(
        f"imagenette-{network}-thin-{percent}", label, of=f"imagenette-{network}", changes={"model.thin": share}
    )


_FIXED_GA = {"goal.kind": "fixed", "goal.bound": "gaussian", "goal.sparsity": 0.9}
_SQUARED = {"goal.kind": "budget", "goal.enforce": "squared", "goal.sparsity": 0.9}
_UNCONSTRAINED = {"goal.kind": "unconstrained", "goal.weight": 10.0}

RESNET50 = Experiment(
    "imagenette-resnet50",
    "Figure 8 on photographs: ResNet-50 on Imagenette",
    "A ResNet-50 trained for 60 epochs on ten classes of ImageNet (9,469 training and 3,925 test images, 128×128), "
    "then sparsified in 20 epochs, as the paper does with ImageNet's. Beside it: the dense network trained for those "
    "20 epochs too, and dense networks with fewer channels, trained for 60.",
    (
        _dense("resnet50"),
        _exact("resnet50", 90),
        _exact("resnet50", 95),
        _sooner("resnet50", 90),
        _sooner("resnet50", 95),
        *(_taught("resnet50", percent) for percent in (90, 95, 98)),
        _short("resnet50", "longer", f"dense, {SHORT} epochs more", {}),
        _short("resnet50", "longer-taught", f"dense, {SHORT} epochs more, taught by its start", _BY_START),
        _exact("resnet50", 80),
        _exact("resnet50", 98),
        _short("resnet50", "budget-90", "budget (Eq. 10), 90 %", _SQUARED),
        _short("resnet50", "fixed-ga-90", "fixed-GA, 90 %", _FIXED_GA),
        _short(
            "resnet50",
            "flops-10",
            "exact 10 % of FLOPs",
            {"goal.kind": "budget", "goal.flops": 0.1},
        ),
        _thinned("resnet50", 90, 0.1),
        _thinned("resnet50", 95, 0.05),
    ),
    epochs=LONG,
)

ALEXNET = Experiment(
    "imagenette-alexnet",
    "Table 3 on photographs: AlexNet on Imagenette",
    "An AlexNet trained for 60 epochs on the same images, then sparsified in 20 under the unconstrained loss "
    "(Eq. 7, λ = 10), as the paper's Table 3, and under exact budgets.",
    (
        _dense("alexnet"),
        _short("alexnet", "unconstrained", "unconstrained, λ = 10", _UNCONSTRAINED),
        _short("alexnet", "longer", f"dense, {SHORT} epochs more", {}),
        _exact("alexnet", 95),
        _exact("alexnet", 98),
    ),
    epochs=LONG,
)


def _tried(network: str, name: str, label: str, changes: Mapping[str, Any], rate: float) -> PaperRow:
    return _short(network, name, label, {**_HELD_OUT, **changes}, rate)


def _resnet50(percent: int, name: str, label: str, changes: Mapping[str, Any], rate: float = 0.01) -> PaperRow:
    label = f"ResNet-50, exact {percent} %, {label}"
    return _tried("resnet50", f"{percent}-{name}", label, {**_budget(percent), **changes}, rate)


def _held_out(network: str) -> PaperRow:
    plain = _dense(network)
    return PaperRow(f"imagenette-val-{network}-dense", plain.label, of=plain.of, changes=_HELD_OUT)


CHOICES = Experiment(
    "imagenette-choices",
    "How the rates of the 20 epochs were chosen",
    "On a tenth of the training images, which the dense start has not seen either.",
    (
        _held_out("resnet50"),
        *(_resnet50(90, f"rate-{rate:g}", f"rate {rate:g}", {}, rate) for rate in (0.003, 0.01, 0.03)),
        *(
            _resnet50(percent, f"ramp-{ramp}", f"ramp {ramp}", {"goal.ramp": ramp})
            for percent, ramp in ((90, 0.25), (90, 0.75), (98, 0.5), (98, 0.75))
        ),
        *(
            _resnet50(90, f"thresholds-{rate:g}", f"thresholds at {rate:g} of the rate", {"goal.threshold_lr": rate})
            for rate in (0.1, 1.0)
        ),
        _resnet50(90, "taught", "taught by its start", _BY_START),
        _held_out("alexnet"),
        *(
            _tried("alexnet", f"unconstrained-rate-{rate:g}", f"AlexNet, λ = 10, rate {rate:g}", _UNCONSTRAINED, rate)
            for rate in (0.003, 0.01)
        ),
        _tried(
            "alexnet",
            "unconstrained-thresholds",
            "AlexNet, λ = 10, rate 0.01, thresholds ten times as fast",
            {**_UNCONSTRAINED, "goal.threshold_lr": 0.1},
            0.01,
        ),
    ),
    epochs=LONG,
)

SECTIONS = (RESNET50, ALEXNET, CHOICES)
#: The paper's Figure 1: the trained network's weights against Gaussians, and what became of them.
_HISTOGRAMS = ("imagenette-resnet50-dense", "imagenette-resnet50-exact-90")
#: Those with a picture; the rows of choices are trained only where ``only`` names them.
_DRAWN = (RESNET50, ALEXNET)
IMAGENETTE = Experiment(
    "imagenette", RESNET50.title, RESNET50.about, tuple(row for one in SECTIONS for row in one.rows), epochs=LONG
)


def reproduce_imagenette(plan: RowPlan) -> None:
    """Train the rows that are not there yet, dense ones before those that start from them, and write the tables."""
    wanted = chosen(IMAGENETTE, plan.only) if plan.only else [row for section in _DRAWN for row in section.rows]
    train_rows(trainings_of(wanted, plan), plan, lambda: _write_tables(plan.out))
    for path in collect_imagenette(plan.out):
        print(f"wrote {path}")
    print(f"\n{as_text(_records(plan.out))}")


def collect_imagenette(out: Path) -> list[Path]:
    """Write the tables and the pictures from the records in ``out``/rows, and return their paths."""
    written, records = _write_tables(out), _records(out)
    if any(has_run(section, records) for section in _DRAWN):
        written.append(plot_imagenette(records, out / "imagenette.png"))
    shown_whole = [runs[0] for name in _HISTOGRAMS if (runs := records.get(name))]
    if shown_whole:
        written.append(plot_histograms(shown_whole, out / "imagenette-histograms.png", layers=4))
    return written


def _write_tables(out: Path) -> list[Path]:
    records = _records(out)
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / "imagenette.md", as_markdown(records))
    files.write_json(out / "imagenette.json", as_json(records))
    return [out / "imagenette.md", out / "imagenette.json"]


def _records(out: Path) -> dict[str, list[Record]]:
    return records_of(IMAGENETTE, out)


# -- what came out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparsified:
    """What a row's runs came to; None where something cannot be said."""

    seeds: list[int]
    accuracy: float
    error: float  #: the mean's standard error over seeds; of fewer than three, at least that of the test images
    to_start: float | None  #: points above the dense networks of the same seeds
    to_start_error: float | None  #: the same of these differences
    zeros: float | None
    nonzeros: float
    flops: float | None


def sparsified(section: Experiment, row: PaperRow, records: Kept) -> Sparsified | None:
    """Return what a row came to, or None if it was not run."""
    runs = records.get(row.name, ())
    if not runs:
        return None
    accuracies, images = [float(run.result["accuracy"]) for run in runs], runs[0].result["images"]
    judged = images.get("val") or images["test"]
    start = row.start or next(one.name for one in section.rows if one.of == row.of and not one.start)
    dense = {run.seed: run for run in records.get(start, ()) if row.name != start}
    starts = [(run, dense[run.seed]) for run in runs if run.seed in dense]
    away = [run.result["accuracy"] - one.result["accuracy"] for run, one in starts if _may_be_of(run, one)]
    return Sparsified(
        seeds=[run.seed for run in runs],
        accuracy=mean(accuracies),
        error=_error(accuracies, accuracies, judged),
        to_start=mean(away) if away else None,
        to_start_error=_error(away, accuracies, judged) if away else None,
        zeros=100.0 * mean(run.result["sparsity"] for run in runs) if runs[0].is_pruned else None,
        nonzeros=mean(run.result["nonzeros"] for run in runs),
        flops=kept_flops(runs),
    )


def _may_be_of(run: Record, dense: Record) -> bool:
    """Whether a run started from this network, which may have been trained anew since; older runs do not say."""
    noted = (run.result.get("origins") or {}).get("pretrained")
    weights = dense.result.get("weights")
    return not noted or not weights or noted == weights


def _error(values: Sequence[float], accuracies: Sequence[float], images: int) -> float:
    """Return the standard error of the values' mean; two that happen to agree do not know better than their images."""
    over_seeds = standard_error(values) or 0.0
    if len(values) > 2:
        return over_seeds
    return max(over_seeds, error_of_images(mean(accuracies), images) / sqrt(len(values)))


def error_of_images(accuracy: float, images: int) -> float:
    """Return the standard error, in points, of an accuracy in percent that was counted on so many images.

    >>> error_of_images(90.0, 3925)  # doctest: +ELLIPSIS
    0.4788...
    """
    share = accuracy / 100
    return 100 * sqrt(share * (1 - share) / images)


_HEADER = ["row", "seeds", "top-1 %", "to its start", "zeros %", "#Params M", "FLOPs %"]
_LEGEND = (
    "top-1: on the test images, after the last epoch and `finish()`; ± is the standard error of the mean over seeds; "
    "of one or two seeds it is at least that of the test images. to its start: points above the dense network of the "
    "same seed, with the same kinds of error. zeros: of the pruned tensors' weights. #Params: non-zero parameters of "
    "the whole model. FLOPs: of the dense network of the same shape that remain."
)


def _cells(section: Experiment, records: Kept) -> list[list[str]]:
    body = []
    for row in section.rows:
        found = sparsified(section, row, records)
        if found is None:
            body.append([row.label, "–", "not run yet", *["–"] * 4])
            continue
        numbers = [shown(found.zeros, 3), f"{found.nonzeros / 1e6:.3f}", shown(found.flops, 2)]
        away = with_error(found.to_start, found.to_start_error, sign=True)
        body.append([row.label, str(len(found.seeds)), with_error(found.accuracy, found.error), away, *numbers])
    return body


def as_text(records: Kept) -> str:
    """Return the tables as lines for a terminal."""
    return "\n\n".join(f"{one.title}\n\n{table(_HEADER, _cells(one, records), left=1)}" for one in SECTIONS)


def as_markdown(records: Kept) -> str:
    """Return the tables, what their columns mean, and how each row was made."""
    parts = []
    for section in SECTIONS:
        head = "#" if section is RESNET50 else "##"
        parts += [f"{head} {section.title}", section.about, grid(_HEADER, _cells(section, records))]
        if section is RESNET50:
            parts.append(_LEGEND)
    there = [run for row in IMAGENETTE.rows for run in records.get(row.name, ())]
    if there:
        parts += ["## How they were made", *made(there, lambda record: "")]
    return "\n\n".join(parts) + "\n"


def as_json(records: Kept) -> dict[str, Any]:
    """Return the tables as numbers; ``measured`` is null where a row was not run."""
    return {
        section.name: [
            {
                "name": row.name,
                "label": row.label,
                "measured": None if (found := sparsified(section, row, records)) is None else asdict(found),
            }
            for row in section.rows
        ]
        for section in SECTIONS
    }


def plot_imagenette(records: Kept, path: Path) -> Path:
    """Draw what was lost against parameters that are left, a panel per network that was run, and return ``path``."""
    sections = dict(zip(_NETWORKS.values(), _DRAWN, strict=True))
    # Dense networks of different seeds are up to 1.2 points apart, and not every row has every seed.
    upwards = "top-1: points above the dense start"
    return plot_networks(sections, records, _panel, "non-zero parameters (millions)", path, upwards)


#: How rows are drawn: under which name, and how.
_LOOKS = {
    "exact": ("exact budget", {"color": COLOURS[0], "marker": MARKERS[0]}),
    "taught": ("exact budget, taught by its start", {"color": COLOURS[0], "marker": "*", "linestyle": ":"}),
    "sooner": ("exact budget, ramp 0.25", {"color": COLOURS[5], "marker": MARKERS[5]}),
    "flops": ("exact budget of FLOPs", {"color": COLOURS[2], "marker": MARKERS[2]}),
    "budget": ("budget loss (Eq. 10)", {"color": COLOURS[1], "marker": MARKERS[1]}),
    "fixed": ("fixed-GA", {"color": COLOURS[3], "marker": MARKERS[3]}),
    "unconstrained": ("unconstrained, λ = 10", {"color": COLOURS[4], "marker": MARKERS[4]}),
    "thin": ("dense with fewer channels", {"color": THINNED, "marker": "x"}),
    "longer": (f"dense, {SHORT} epochs more", {"color": DENSE, "marker": "+"}),
}


def _panel(panel: Any, section: Experiment, records: Kept) -> None:
    panel.axhline(0.0, color=DENSE, linestyle="--", label="the dense start")
    for kind, (label, style) in _LOOKS.items():
        rows = [row for row in section.rows if row.name.removeprefix(f"{section.name}-").partition("-")[0] == kind]
        there = [one for row in rows if (one := sparsified(section, row, records)) is not None]
        points = [(one.nonzeros / 1e6, one.to_start, one.to_start_error) for one in there if one.to_start is not None]
        if points:
            panel.errorbar(*zip(*sorted(points), strict=True), label=label, capsize=3, linewidth=1.4, **style)
    panel.set_xscale("log")
    log_ticks(panel.xaxis)
