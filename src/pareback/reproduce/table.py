"""An experiment's outcome beside the paper's numbers: as Markdown, as JSON, and as lines on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from ..messages import counted
from ..report import table
from ..runs.record import Record, date
from .paper import CLASSES, EPOCHS, PRECISION, TEST_IMAGES, TRAIN_IMAGES, WIDTH, Experiment, PaperRow

#: Records by the name of their row, each list in the order of seeds.
Records = Mapping[str, Sequence[Record]]

_HEADER = ["row", "seed", "top-1 %", "paper", "to dense", "sparsity %", "paper", "#Params M", "paper", "minutes"]
_NOT_RUN = "not run yet"

_LEGEND = (
    "top-1: accuracy on the test images after the last epoch and `finish()`, not the best epoch's. to dense: points "
    "above the mean of the dense rows here. sparsity: zeros among the weights of the pruned tensors (the convolutions "
    "of at least 1,000 weights; the classifier stays dense). #Params: non-zero parameters of the whole model, biases "
    "and norms included."
)


def as_text(experiment: Experiment, records: Records) -> str:
    """Return the title and the table as lines for a terminal."""
    header, cells = _columns(experiment, records)
    warned = caution(experiment, records)
    return "\n".join([experiment.title, *([warned] if warned else []), "", table(header, cells, left=1)])


def as_markdown(experiment: Experiment, records: Records) -> str:
    """Return the table, what its columns mean, and how each row was made."""
    warned = caution(experiment, records)
    parts = [f"# {experiment.title}", *([f"**{warned}**"] if warned else []), experiment.about]
    parts += [grid(*_columns(experiment, records)), _LEGEND]
    averages = _averages(experiment, records)
    if averages:
        parts += ["## Over seeds", grid(["row", "seeds", "mean top-1 %", "least", "most", "to dense"], averages)]
    there = [record for _, record in _lines(experiment, records) if record is not None]
    if there:
        parts += ["## How they were made", *made(there)]
    return "\n\n".join(parts) + "\n"


def as_json(experiment: Experiment, records: Records) -> dict[str, Any]:
    """Return the table as numbers; ``measured`` is null where a row has not been run."""
    rows = [
        {
            "name": row.name,
            "label": row.label,
            "seed": None if record is None else record.seed,
            "paper": {"accuracy": row.paper.accuracy, "sparsity": row.paper.sparsity, "millions": row.paper.millions},
            "measured": None if record is None else _measured(record, _dense(records)),
        }
        for row, record in _lines(experiment, records)
    ]
    return {"experiment": experiment.name, "title": experiment.title, "rows": rows}


def _lines(experiment: Experiment, records: Records) -> list[tuple[PaperRow, Record | None]]:
    """Return every row with each of its records, or with None if it has none."""
    nothing: tuple[Record | None, ...] = (None,)
    return [(row, record) for row in experiment.rows for record in records.get(row.name) or nothing]


def _columns(experiment: Experiment, records: Records) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows, without the paper's columns where it reports nothing for any of the rows."""
    body = _cells(experiment, records)
    used = [at for at, name in enumerate(_HEADER) if name != "paper" or any(row[at] != "–" for row in body)]
    return [_HEADER[at] for at in used], [[row[at] for at in used] for row in body]


def _cells(experiment: Experiment, records: Records) -> list[list[str]]:
    dense, body = _dense(records), []
    for row, record in _lines(experiment, records):
        paper = [shown(row.paper.accuracy, 2), shown(row.paper.sparsity, 2), shown(row.paper.millions, 3)]
        if record is None:
            body.append([row.label, "–", _NOT_RUN, paper[0], "–", "–", paper[1], "–", paper[2], "–"])
            continue
        found = _measured(record, dense)
        sparsity = "–" if found["sparsity"] is None else f"{found['sparsity']:.3f}"
        accuracy = [f"{found['accuracy']:.2f}", paper[0], shown(found["to_dense"], 2, sign=True)]
        size = [sparsity, paper[1], f"{found['nonzeros'] / 1e6:.3f}", paper[2]]
        body.append([row.label, str(record.seed), *accuracy, *size, f"{found['seconds']['total'] / 60:.1f}"])
    return body


def _measured(record: Record, dense: float | None) -> dict[str, Any]:
    result, environment = record.result, record.result["environment"]
    return {
        "accuracy": result["accuracy"],
        "to_dense": None if dense is None or _is_dense(record.name) else result["accuracy"] - dense,
        "sparsity": 100.0 * result["sparsity"] if record.is_pruned else None,
        "nonzeros": result["nonzeros"],
        "parameters": result["parameters"],
        "epochs": result["epochs"],
        "seconds": result["seconds"],
        "date": date(record),
        "environment": environment,
    }


def _dense(records: Records) -> float | None:
    found = [record.result["accuracy"] for name in records if _is_dense(name) for record in records[name]]
    return mean(found) if found else None


def _is_dense(name: str) -> bool:
    """Whether a row is an experiment's dense reference.

    >>> _is_dense("dense"), _is_dense("curve-dense"), _is_dense("thin")
    (True, True, False)
    """
    return name.rpartition("-")[2] == "dense"


def _averages(experiment: Experiment, records: Records) -> list[list[str]]:
    """Return the mean of every row with more than one seed."""
    dense, body = _dense(records), []
    for row in experiment.rows:
        found = [record.result["accuracy"] for record in records.get(row.name, ())]
        if len(found) > 1:
            away = None if dense is None or _is_dense(row.name) else mean(found) - dense
            numbers = [f"{mean(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}", shown(away, 2, sign=True)]
            body.append([row.label, str(len(found)), *numbers])
    return body


def made(records: Sequence[Record], note: Callable[[Record], str] | None = None) -> list[str]:
    """Return a table of dates and seconds, and under it each command and machine once, with what ``note`` says."""
    lines = [f"{_machine(record)}{(note or _note)(record)}." for record in records]
    numbers = {line: str(number + 1) for number, line in enumerate(dict.fromkeys(lines))}
    body = [_provenance(record, numbers[line]) for record, line in zip(records, lines, strict=True)]
    header = ["row", "seed", "date", "seconds", "start", "train", "evaluate", "made by"]
    return [grid(header, body), "\n".join(f"{number}. {line}" for line, number in numbers.items())]


def _provenance(record: Record, made_by: str) -> list[str]:
    seconds = record.result["seconds"]
    spent = [f"{seconds[part]:.1f}" for part in ("total", "start", "train", "evaluate")]
    return [record.name, str(record.seed), date(record), *spent, made_by]


def _machine(record: Record) -> str:
    """Return the command, the machine and the software that made a row, in a line."""
    about = record.result["environment"]
    device = about["cpu"] if about["device"] == "cpu" else about["device"]
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    software = f"pareback {about['pareback']}, torch {about['torch']}{cuda}, Python {about['python']}"
    return f"`{about['command']}` on {device} ({about['platform']}), {software}"


def caution(experiment: Experiment, records: Records) -> str:
    """Say under the title where rows are not what it promises; nothing if all are."""
    there = [record for _, record in _lines(experiment, records) if record is not None]
    others = [[*_shortened(record, experiment.epochs), *_other_data(record)] for record in there]
    count = sum(map(bool, others))
    if not count:
        return ""
    which = "No row is" if count == len(there) else f"{count} of {len(there)} rows are not"
    return f"{which} what the title says: {', '.join(dict.fromkeys(text for other in others for text in other))}."


def _shortened(record: Record, epochs: int) -> list[str]:
    recipe, notes = record.result["recipe"], []
    if recipe["train"]["epochs"] != epochs:
        notes.append(f"{recipe['train']['epochs']} epochs instead of {epochs}")
    if recipe["model"]["width"] != WIDTH:
        notes.append(f"width {recipe['model']['width']} instead of {WIDTH}")
    return notes


def _other_data(record: Record) -> list[str]:
    """Say what a row was made from if that is not CIFAR-100, as far as it tells: the first records count no images."""
    images = record.result.get("images", {"train": TRAIN_IMAGES, "test": TEST_IMAGES})
    held = round(record.result["recipe"]["data"].get("val_share", 0.0) * TRAIN_IMAGES)
    wanted = (TRAIN_IMAGES - held, held or TEST_IMAGES, CLASSES)
    found = (images["train"], images["test"], record.result["classes"])
    return [f"{_data(*found)} instead of {_data(*wanted)}"] if found != wanted else []


def _data(train: int, test: int, classes: int) -> str:
    return f"{train:,} + {test:,} images of {counted(classes, 'class', 'classes')}"


def _note(record: Record) -> str:
    """Say where a row is not the paper's experiment, and whether it was interrupted."""
    recipe, notes = record.result["recipe"], _shortened(record, EPOCHS)
    if recipe["train"]["precision"] != PRECISION:
        notes.append(f"{recipe['train']['precision']} instead of {PRECISION}")
    if record.result["resumed"]:
        notes.append("interrupted and resumed, its seconds summed")
    data = "".join(f". Data: {text}" for text in _other_data(record))
    return (f". Note: {', '.join(notes)}" if notes else "") + data


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; numbers stand to the right."""
    left = {"row", "date"}
    rule = ["---" if name in left else "--:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def shown(value: float | None, digits: int, sign: bool = False) -> str:
    """Write a number, or a dash for none.

    >>> shown(0.5, 2, sign=True), shown(None, 2)
    ('+0.50', '–')
    """
    return "–" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"
