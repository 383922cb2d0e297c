"""Which runs of a store to list, and in which order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import InvalidValue
from ..lab.recipe.reading import Field, entries, nearest
from ..messages import did_you_mean, one_of
from .exactness import off_target
from .store import State, StoredRun

#: What can be asked of a run beside the fields of its recipe.
FIGURES = (
    "accuracy",
    "val_accuracy",
    "test_accuracy",
    "ema_accuracy",
    "test_loss",
    "parameters",
    "nonzeros",
    "pruned_weights",
    "pruned_nonzeros",
    "sparsity",
    "bytes",
    "flops",
    "epochs",
    "steps",
    "seconds",
    "resumed",
    "off",
    "state",
)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Condition:
    """Something like ``goal.kind=budget`` or ``accuracy>95``."""

    key: str
    sign: str
    value: str

    def holds(self, run: StoredRun) -> bool:
        """Whether a run meets it; one of which that is not known does not."""
        if not _is_known(run, self.key):
            return False
        found, asked = figure(run, self.key), _number(self.value)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and asked is not None:
            return _OPERATORS[self.sign](found, asked)
        if self.sign not in ("=", "!="):  # words and nothing have no order
            return False
        same = _text(found) == (self.value.lower() if found is None or isinstance(found, bool) else self.value)
        return same == (self.sign == "=")


def condition(text: str) -> Condition:
    """Read a condition, or say what is wrong with it.

    >>> condition("goal.sparsity>=0.95")
    Condition(key='goal.sparsity', sign='>=', value='0.95')
    >>> condition("goal.knd=budget")
    Traceback (most recent call last):
    pareback.errors.InvalidValue: A run has no 'goal.knd'. Did you mean 'goal.kind'?
    """
    match = re.fullmatch(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", text)
    if match is None:
        raise InvalidValue(f"{text!r} is no condition. Write --where goal.kind=budget or --where 'accuracy>95'.")
    check_key(match[1])
    found = Condition(match[1], match[2], "none" if match[3].lower() == "null" else match[3])  # as recipes write it
    _check_value(found)
    return found


def _check_value(asked: Condition) -> None:
    """Raise InvalidValue for what no run can meet: a number compared with a word, or words put in order."""
    if _number(asked.value) is not None:
        return
    if asked.sign not in ("=", "!="):
        raise InvalidValue(
            f"{asked.key}{asked.sign}{asked.value} compares with {asked.value!r}, which is no number. Write --where "
            "'accuracy>95'."
        )
    if _is_number(asked.key) and asked.value.lower() != "none":
        raise InvalidValue(f"{asked.key} is a number, and {asked.value!r} is none. Write --where 'accuracy>95'.")
    choices = _choices(asked.key)
    if choices and asked.value.lower() != "none":
        one_of(asked.key, asked.value, choices)


def _is_number(key: str) -> bool:
    if key in FIGURES:
        return key != "state"
    kinds = _fields()[key].kinds
    return all(kind in (int, float) for kind in kinds)


def _choices(key: str) -> tuple[str, ...]:
    return get_args(State) if key == "state" else () if key in FIGURES else _fields()[key].choices


def _fields() -> dict[str, Field]:
    return {field.key: field for field in entries()}


def check_key(name: str) -> None:
    """Raise InvalidValue for what no run has."""
    known = [field.key for field in entries()]
    if name not in known and name not in FIGURES:
        hint = nearest(name, known) if "." in name else did_you_mean(name, [*FIGURES, *known])
        raise InvalidValue(f"A run has no {name!r}.{hint}")


def figure(run: StoredRun, name: str) -> Any:
    """Return a field of a run's recipe, or one of FIGURES; None where it is not known."""
    if name == "state":
        return run.state
    if name in FIGURES:
        if run.result is None:
            return None
        if name == "off":
            return off_target(run.result)
        return run.result["seconds"]["total"] if name == "seconds" else run.result.get(name)
    content: Any = run.asked
    for part in name.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def chosen(
    runs: Iterable[StoredRun], state: str | None = None, where: Sequence[Condition] = (), sort: str | None = None
) -> list[StoredRun]:
    """Return the runs in a state that meet every condition, in the order of a figure; those without it come last."""
    if sort is not None:
        check_key(sort)
    found = [r for r in runs if (state is None or r.state == state) and all(each.holds(r) for each in where)]
    return found if sort is None else sorted(found, key=lambda run: _order(figure(run, sort)))


def _is_known(run: StoredRun, name: str) -> bool:
    return name == "state" or (run.result is not None if name in FIGURES else bool(run.asked))


def _order(value: Any) -> tuple[int, float, str]:
    if value is None:
        return 2, 0.0, ""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, _text(value)


def _text(value: Any) -> str:
    """Write a value as a recipe has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
