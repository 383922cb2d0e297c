"""Points from elsewhere to set beside the runs: the paper's Table 2, or what a small YAML or JSON file lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..costs.amounts import amount
from ..errors import InvalidValue, MissingFile
from ..lab.optional import optional
from ..lab.recipe.yaml_text import UNREADABLE
from ..messages import did_you_mean
from ..reproduce.paper import TABLE2
from .runs import QUANTITIES

#: Lists that need no file.
BUILT_IN = ("table2",)
_FIELDS = ("label", "error", "accuracy", *QUANTITIES, "series", "task")
_EXAMPLE = "Write entries such as {label: theirs, error: 21.5, nonzeros: 1.6M}"
_OPTIONS = {"nonzeros": "params", "flops": "flops", "bytes": "bytes"}


@dataclass(frozen=True)
class Reference:
    """A point that was not measured here."""

    label: str
    error: float
    counts: dict[str, float] = field(default_factory=dict)
    series: str = "reference"
    task: str = "*"
    """Pattern of the tasks it belongs to."""

    def fits(self, task: str) -> bool:
        """Whether the point is to be drawn with a task's runs."""
        return fnmatchcase(task, self.task)


def references(source: str) -> list[Reference]:
    """Return the points of a list by its name (``table2``) or of a YAML or JSON file."""
    if source in BUILT_IN:
        return _table2()
    path = Path(source)
    if not path.is_file():
        hint = did_you_mean(source, BUILT_IN)
        raise MissingFile(f"There is no file {source!r}.{hint} Give a YAML or JSON file, or table2.")
    yaml = optional("yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, RecursionError, *UNREADABLE) as error:
        raise InvalidValue(f"{source!r} is neither YAML nor JSON. {_EXAMPLE}.") from error
    if not isinstance(content, list):
        raise InvalidValue(f"{source!r} is not a list of points. {_EXAMPLE}.")
    return [_reference(entry, f"Point {number} of {source!r}") for number, entry in enumerate(content, 1)]


def _table2() -> list[Reference]:
    return [
        Reference(
            label=row.label,
            error=round(100.0 - row.paper.accuracy, 2),
            counts={"nonzeros": row.paper.millions * 1e6},
            series="paper, Table 2",
            task="WRN-16-8 on *100*",
        )
        for row in TABLE2.rows
        if row.paper.accuracy is not None and row.paper.millions is not None
    ]


def _reference(entry: Any, where: str) -> Reference:
    if not isinstance(entry, Mapping):
        raise InvalidValue(f"{where} is not a mapping. {_EXAMPLE}.")
    for key in entry:
        if key not in _FIELDS:
            raise InvalidValue(f"{where} has an unknown field {key!r}.{did_you_mean(str(key), _FIELDS)} {_EXAMPLE}.")
    if ("error" in entry) == ("accuracy" in entry):
        raise InvalidValue(f"{where} needs an error or an accuracy, one of them, in percent. {_EXAMPLE}.")
    counts = {name: _count(entry[name], name, where) for name in QUANTITIES if entry.get(name) is not None}
    if not counts:
        raise InvalidValue(f"{where} has none of {', '.join(QUANTITIES)}. {_EXAMPLE}.")
    error = _percent(entry["error"], where) if "error" in entry else 100.0 - _percent(entry["accuracy"], where)
    words = {name: str(entry[name]) for name in ("series", "task") if entry.get(name) is not None}
    return Reference(str(entry.get("label") or "reference"), error, counts, **words)


def _percent(value: Any, where: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0.0 <= value <= 100.0:
        raise InvalidValue(f"{where} has {value!r} for its error or accuracy. Write a percentage such as 21.5.")
    return float(value)


def _count(value: Any, name: str, where: str) -> float:
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # YAML takes 1.6e6 for text
    if isinstance(value, float) and 1 < value < math.inf:
        value = round(value)
    try:
        found = amount(_OPTIONS[name], value)
    except (ValueError, TypeError):
        found = None
    if found is None or found.relative:
        raise InvalidValue(f"{where} has {value!r} for {name}. Write a count such as 1600000 or 1.6M.")
    return float(found.value)
