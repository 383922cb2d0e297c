"""Every peer in one harness, as data: which rows there are, which of them are worth more seeds, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from ..lab.recipe.goals import NAMES
from ..lab.recipe.schema import SELF
from ..runs.record import Record
from .paper import ONE_CYCLE, Experiment, PaperRow

#: The recipe that all rows are changes of: WRN-16-8 on CIFAR-100, one cosine cycle of 40 epochs.
BASE = "curve"
#: Ours first, then the peers, in words of goal.kind; exact is pareback.Budget.
METHODS = ("exact", "feather", "gmp", "rigl", "acdc", "st3", "oneshot")
LABELS = {"exact": "exact budget", **NAMES}
PERCENTS = (98, 99, 95)
#: Of how many methods three seeds are compared.
BEST, SEEDS = 3, (0, 1, 2)
#: How many go on to 120 epochs.
LONG = 2
_VIT_METHODS = ("exact", "feather", "gmp", "rigl")

_DENSE: Mapping[str, Any] = {"goal.exclude": None, "goal.threshold_lr": None}
_VIT: Mapping[str, Any] = {
    "model.name": "vit-tiny",
    "optimizer.kind": "adamw",
    "optimizer.lr": 0.001,
    "optimizer.weight_decay": 0.05,
    "schedule.warmup": 5.0,
    "train.label_smoothing": 0.1,
    "train.channels_last": False,
    "goal.threshold_lr": None,
}
_VIT_PRUNED = {**_VIT, "goal.exclude": ("head.*", "position")}
_LONG: Mapping[str, Any] = {"train.epochs": 120, "schedule.every": 120}
_VAL: Mapping[str, Any] = {"data.val_share": 0.1}
_HAM: Mapping[str, Any] = {"optimizer.kind": "ham"}


def _goal(method: str, percent: int) -> dict[str, Any]:
    return {"goal.kind": "budget" if method == "exact" else method, "goal.sparsity": percent / 100}


def _row(name: str, label: str, *changes: Mapping[str, Any]) -> PaperRow:
    merged = {key: value for change in changes for key, value in change.items()}
    return PaperRow(f"peers-{name}", label, of=BASE, changes=merged)


def _dense(name: str, label: str, *changes: Mapping[str, Any]) -> PaperRow:
    return _row(f"{name}dense", label, _DENSE, *changes)


def _pruned(prefix: str, method: str, percent: int, *changes: Mapping[str, Any]) -> PaperRow:
    return _row(f"{prefix}{method}-{percent}", f"{LABELS[method]}, {percent} %", _goal(method, percent), *changes)


PEERS = Experiment(
    "peers",
    "Pruning methods in one harness: WRN-16-8 on CIFAR-100, 40 epochs",
    "The exact budget of this library and its peers under the same network, data, epochs, optimizer and schedule: one "
    "cosine cycle of 40 epochs; the convolutions are pruned. Each has the settings of its paper. Nothing was tuned on "
    "the test images, and batch norms are re-estimated for no row. ST-3 is without its rescaling of weights.",
    (_dense("", "dense WRN-16-8"), *(_pruned("", m, p) for p in PERCENTS for m in METHODS)),
    plots=False,
    epochs=40,
)


def _long(method: str) -> PaperRow:
    """A row of 120 epochs; the exact budget's is trained already, for ``reproduce one-cycle``."""
    row = _pruned("long-", method, 98, _LONG)
    if method != "exact":
        return row
    twin = next(one for one in ONE_CYCLE.rows if one.name == "one-cycle-98")
    return PaperRow(twin.name, row.label, of=twin.of, changes={**_goal("exact", 98), **twin.changes})


PEERS_LONG = Experiment(
    "peers-long",
    "120 epochs in one cycle",
    f"The best {LONG} of the table above at 98 %, and the dense network, three times as long.",
    (ONE_CYCLE.rows[0], *map(_long, METHODS)),
    plots=False,
    epochs=120,
)
PEERS_VIT = Experiment(
    "peers-vit",
    "ViT-Tiny with patches of 4×4, AdamW, 40 epochs",
    "Label smoothing 0.1, learning rate 0.001 after five epochs of warm-up, weight decay 0.05. All linear layers and "
    "the patch embedding are pruned, the classifier and the positions are not.",
    (
        _dense("vit-", "dense ViT-Tiny", _VIT),
        *(_pruned("vit-", m, p, _VIT_PRUNED) for p in (90, 95) for m in _VIT_METHODS),
    ),
    plots=False,
    epochs=40,
)
_LATE: Mapping[str, Any] = {"goal.ramp": 0.75}
_HALF: Mapping[str, Any] = {"goal.straight_through": 0.5}
_MUTUAL: Mapping[str, Any] = {"goal.ramp": 0.5, "train.mutual": True}
_SELF: Mapping[str, Any] = {"teacher.run": SELF, "teacher.weight": 0.5}


def _tried(name: str, label: str, percent: int, *changes: Mapping[str, Any]) -> PaperRow:
    return _row(f"val-{name}", f"exact, {percent} %, {label}", _goal("exact", percent), *changes, _VAL)


def _tried_vit(name: str, label: str, percent: int, changes: Mapping[str, Any]) -> PaperRow:
    label = f"ViT, exact, {percent} %, {label}"
    return _row(f"val-vit-{name}", label, _VIT_PRUNED, _goal("exact", percent), changes, _VAL)


PEERS_ABLATION = Experiment(
    "peers-ablation",
    "What could become the default, on a tenth of the training images that was held out",
    "The exact budget at 98 and 99 % (ViT-Tiny: 95 %) with the target growing over half or three quarters of the "
    "training, with half the gradient for pruned weights, as Feather has it above 95 %, and with HAM's multiplicative "
    "step after each of SGD's (α = 20), which the dense network is given as well. Mutual: as in DCIL, each batch also "
    "goes through the network with its dense weights and batch norms of their own; the two passes learn from each "
    "other's answers, and pruned weights take the dense pass's gradient. Taught by itself: the average of the "
    "network's weights so far answers as well (`teacher.run=self`), and counts for half of the loss at the end. `exact "
    "ahead` is here by how much the present default is ahead: ramp 0.5, the whole gradient, one pass, no teacher, and "
    "plain SGD for the dense network. `to dense` compares with a dense network trained in the same way. More rows, "
    "from when thresholds followed the spread of their tensor, lie [apart](earlier/peers/peers.md).",
    (
        _tried("ramp-0.5", "ramp 0.5", 98, {"goal.ramp": 0.5}),
        _tried("ramp-0.75", "ramp 0.75", 98, _LATE),
        _tried("ham", "ramp 0.5, HAM", 98, {"goal.ramp": 0.5}, _HAM),
        _tried("mutual", "ramp 0.5, mutual", 98, _MUTUAL),
        _tried("self", "ramp 0.5, taught by itself", 98, {"goal.ramp": 0.5}, _SELF),
        _tried("99-ramp-0.5", "ramp 0.5", 99, {"goal.ramp": 0.5}),
        _tried("99-half-0.75", "ramp 0.75, half the gradient", 99, _LATE, _HALF),
        _tried("99-self", "ramp 0.5, taught by itself", 99, {"goal.ramp": 0.5}, _SELF),
        _row("val-99-feather", "Feather-Global, 99 %", _goal("feather", 99), _VAL),
        _dense("val-", "dense WRN-16-8", _VAL),
        _dense("val-ham-", "dense, HAM", _VAL, _HAM),
        _dense("val-self-", "dense, taught by itself", _VAL, _SELF),
        _tried_vit("ramp-0.5", "ramp 0.5", 95, {"goal.ramp": 0.5}),
        _tried_vit("ramp-0.75", "ramp 0.75", 95, _LATE),
        _tried_vit("self", "ramp 0.5, taught by itself", 95, {"goal.ramp": 0.5, **_SELF}),
    ),
    plots=False,
    epochs=40,
)
SECTIONS = (PEERS, PEERS_LONG, PEERS_VIT, PEERS_ABLATION)

#: A row and one of its seeds.
Wanted = tuple[PaperRow, int]
Kept = Mapping[str, Sequence[Record]]


def method_of(row: PaperRow) -> str:
    """Return the method of a row of the first three tables.

    >>> method_of(PEERS.rows[0]), method_of(PEERS.rows[1]), method_of(PEERS_LONG.rows[2])
    ('dense', 'exact', 'feather')
    """
    kind = str(row.changes.get("goal.kind", "dense"))
    return "exact" if kind == "budget" else kind


def stages(records: Kept) -> list[tuple[str, list[Wanted]]]:
    """Return what to train, the most telling first; what depends on an earlier stage is empty until that is there.

    ``records`` are those of the first table's rows.
    """
    seeded = [_of(percent, method) for percent in PERCENTS for method in best_of(records, percent)[:BEST]]
    return [
        ("grid", [(row, 0) for row in PEERS.rows]),
        ("seeds", [(row, seed) for seed in SEEDS[1:] for row in (PEERS.rows[0], *seeded) if seeded]),
        ("120 epochs", [(row, 0) for row in long_rows(records) if best_of(records, 98)]),
        ("ViT", [(row, 0) for row in PEERS_VIT.rows]),
        ("ablation", [(row, seed) for seed in SEEDS for row in PEERS_ABLATION.rows]),
    ]


def best_of(records: Kept, percent: int) -> list[str]:
    """Return the methods by their first seed's accuracy, the best first; none unless all are there.

    Ours is moved up to where it is still trained with more seeds: the comparison is with it.
    """
    found = {method: records.get(_of(percent, method).name, ()) for method in METHODS}
    first = {method: [r.result["accuracy"] for r in runs if r.seed == 0] for method, runs in found.items()}
    if not all(first.values()):
        return []
    order = sorted(METHODS, key=lambda method: -mean(first[method]))
    if order.index("exact") >= LONG:
        order.remove("exact")
        order.insert(LONG - 1, "exact")
    return order


def long_rows(records: Kept) -> list[PaperRow]:
    """Return the rows of 120 epochs: dense, the methods that were best at 98 %, and what was trained all the same.

    >>> [row.name for row in long_rows({})]
    ['one-cycle-dense']
    """
    best = ["dense", *best_of(records, 98)[:LONG]]
    return [row for row in PEERS_LONG.rows if method_of(row) in best or records.get(row.name)]


def _of(percent: int, method: str) -> PaperRow:
    return next(row for row in PEERS.rows if row.name == f"peers-{method}-{percent}")
