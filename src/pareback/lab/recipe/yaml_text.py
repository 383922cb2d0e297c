"""YAML as recipes are written in it: each key once, plain values alone, and mistakes named with their line."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidValue
from ..optional import optional

#: What YAML's reader raises for a value that looks like a date, a number or what its tag says, and is none.
UNREADABLE = (ValueError, KeyError, AttributeError)


def parsed(text: str, where: str) -> Any:
    """Return what a YAML text holds, or raise InvalidValue with what is wrong in ``where``, and at which line.

    >>> parsed("goal: {kind: budget}", "a.yaml")
    {'goal': {'kind': 'budget'}}
    >>> parsed("seed: 1\\nseed: 2", "a.yaml")
    Traceback (most recent call last):
    pareback.errors.InvalidValue: a.yaml has the key 'seed' twice, at lines 1 and 2. Keep one of them.
    """
    yaml = optional("yaml")
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_once(node, where)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise InvalidValue(_explained(error, text, where)) from error
    except RecursionError as error:
        raise InvalidValue(f"{where} is nested too deeply. Write 'key: value' lines.") from error
    except UNREADABLE as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"{where} has a value that cannot be read ({error}). Write it in quotes.") from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_once(root: Any, where: str) -> None:
    """Refuse a key that stands twice in one mapping; YAML's reader would take the last."""
    left, met = [(root, "")], set()
    while left:
        node, prefix = left.pop()
        if node is None or id(node) in met:  # an alias may lead back to where it stands
            continue
        met.add(id(node))
        lines: dict[str, int] = {}
        for entry in node.value if node.id in ("mapping", "sequence") else ():
            if node.id == "sequence":
                left.append((entry, prefix))
                continue
            key, value = entry
            name = f"{prefix}{key.value}" if key.id == "scalar" else ""
            line = key.start_mark.line + 1
            if name and name in lines:
                raise InvalidValue(
                    f"{where} has the key {name!r} twice, at lines {lines[name]} and {line}. Keep one of them."
                )
            lines[name] = line
            left.append((value, f"{name}."))


def _explained(error: Any, text: str, where: str) -> str:
    mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", ""))
    at = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
    if "constructor for the tag" in problem:
        tag = problem.split("'")[1]
        return f"{where} has the tag {tag!r}{at}, and a recipe holds plain values alone. Remove it."
    if mark is not None and ("'\\t'" in problem or "\t" in _indent(text, mark.line)):
        return f"{where} is not YAML{at}. There is a tab: indent with spaces."
    return f"{where} is not YAML{at}. Write 'key: value' lines."


def _indent(text: str, number: int) -> str:
    line = next(iter(text.splitlines()[number : number + 1]), "")
    return line[: len(line) - len(line.lstrip())]
