"""Recipes from YAML and from dotted overrides, and back: one walk over the dataclasses for all of them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...errors import InvalidType, InvalidValue, MissingFile
from ...messages import did_you_mean, listed, nearest_word
from ..optional import optional
from .schema import Recipe
from .yaml_text import parsed


@dataclass(frozen=True)
class Field:
    """One entry of a recipe, such as ``goal.sparsity``."""

    key: str
    type: Any
    default: Any
    about: str

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:
        """The words that may be written, where only some may."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else _choices(self.type)

    @functools.cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have."""
        return tuple(member for member in _members(self.type) if member is not type(None))

    @functools.cached_property
    def optional(self) -> bool:
        """Whether nothing may be written."""
        return type(None) in _members(self.type)


@functools.cache  # reading what stands under the fields takes milliseconds, and one command asks ten times
def entries() -> tuple[Field, ...]:
    """Return every field of a recipe under its dotted name.

    >>> [field.key for field in entries()][:3]
    ['name', 'seed', 'data.kind']
    """
    return tuple(_fields_of(Recipe))


def _fields_of(kind: type, prefix: str = "") -> Iterator[Field]:
    hints, said, blank = typing.get_type_hints(kind), _sayings(kind), kind()
    for field in fields(kind):
        key, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            yield from _fields_of(typing.cast(type, hint), key + ".")
        else:
            yield Field(key, hint, getattr(blank, field.name), said.get(field.name, ""))


def sections() -> dict[str, str]:
    """Return what each section of a recipe is, by its name; the top is the section ``""``."""
    hints = typing.get_type_hints(Recipe)
    found = {name: inspect.getdoc(kind) or "" for name, kind in hints.items() if is_dataclass(kind)}
    return {"": "The experiment.", **found}


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with fields changed by their dotted names; values may be text, as a command line gives them.

    >>> override(Recipe(), {"goal.kind": "budget", "goal.sparsity": "0.98"}).goal.sparsity
    0.98
    >>> override(Recipe(), {"goal.sparsty": 0.98})
    Traceback (most recent call last):
    pareback.errors.InvalidValue: A recipe has no 'goal.sparsty'. Did you mean 'goal.sparsity'?
    """
    known = {field.key: field for field in entries()}
    for key, value in changes.items():
        if key not in known:
            raise InvalidValue(f"A recipe has no {key!r}.{nearest(key, known)}")
        recipe = _with(recipe, key.split("."), value_of(known[key], value))
    return recipe


def from_dict(content: Any, where: str = "The recipe") -> Recipe:
    """Return the recipe that nested mappings describe; what they leave out keeps its default."""
    return override(Recipe(), dict(_flat(content, where, "", sections())))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return nested mappings and lists, as YAML and JSON have them."""
    return typing.cast("dict[str, Any]", _listed(asdict(recipe)))


def read(path: Path) -> Recipe:
    """Read a recipe from a YAML file."""
    if not path.is_file():
        raise MissingFile(_no_recipe(path))
    if path.suffix in _WEIGHTS:
        raise InvalidValue(
            f"{str(path)!r} holds weights, and a recipe is a YAML file. To begin with the weights, write "
            f"--model.pretrained {shlex.quote(str(path))}."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{str(path)!r} is not YAML. Write 'key: value' lines.") from error
    content = parsed(text, repr(str(path)))
    try:
        return from_dict({} if content is None else content, f"{str(path)!r}")
    except (InvalidValue, InvalidType) as error:
        raise type(error)(f"{path}: {error}") from error


#: How the names of files end that people give for the recipe of what is in them.
_WEIGHTS = (".pare", ".pbe", ".pt", ".pth", ".safetensors")


def _no_recipe(path: Path) -> str:
    """Say what to write where there is no recipe; of a run's folder, what it can be used for."""
    place = shlex.quote(str(path))
    if (path / "recipe.yaml").is_file():
        again = shlex.quote(str(path / "recipe.yaml"))
        return (
            f"{str(path)!r} is the folder of a run. To go on with it, write --resume {place}; to begin another run of "
            f"its recipe, {again}; to begin with its weights, --model.pretrained {place}."
        )
    if path.is_dir():
        return f"{str(path)!r} is a folder. Give the path of a YAML file."
    return f"There is no recipe {str(path)!r}. Give the path of a YAML file."


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML, every field written out.

    >>> print(to_yaml(Recipe(name="mine")).splitlines()[0])
    name: mine
    """
    return str(optional("yaml").safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """Return " Did you mean …?" for the nearest dotted name, or nothing.

    >>> nearest("sparsity", ["goal.sparsity", "train.ema"])
    " Did you mean 'goal.sparsity'?"
    """
    near = nearest_key(key, known)
    return f" Did you mean {near!r}?" if near else ""


def nearest_key(key: str, known: typing.Iterable[str]) -> str:
    """Return the nearest dotted name: by its last word alone, or as a whole; nothing if none is like it."""
    known = list(known)
    section, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    everywhere = {name.rpartition(".")[2]: name for name in reversed(known)}
    for words in (siblings, everywhere):
        near = nearest_word(last, words)
        if near:
            return words[near]
    return nearest_word(key, known)


def at(recipe: Any, key: str) -> Any:
    """Return the value of a field by its dotted name.

    >>> at(Recipe(seed=3), "seed"), at(Recipe(), "data.kind")
    (3, 'digits')
    """
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def value_of(field: Field, value: Any) -> Any:
    """Return a value in its field's type, or raise an error that names the field and says what it takes.

    >>> value_of(next(f for f in entries() if f.key == "optimizer.lr"), "5e-4")
    0.0005
    """
    if value is None or (isinstance(value, str) and value.lower() in ("null", "none")):
        if field.optional:
            return None
        raise InvalidType(f"{field.key} cannot be left empty. {_wanted(field)}")
    if field.choices:
        if value not in field.choices:
            hint = did_you_mean(value, field.choices) if isinstance(value, str) else ""
            raise InvalidValue(f"{field.key}={value!r} is not known. {_wanted(field)}{hint}")
        return value
    for member in _members(field.type):
        try:
            return _READERS[member](value)
        except (ValueError, TypeError, KeyError):
            continue
    raise InvalidType(f"{field.key}={value!r} has the wrong type. {_wanted(field)}{_as_share(value)}")


def _as_share(value: Any) -> str:
    """Say how a percentage is written.

    >>> _as_share("95%"), _as_share("many")
    (' For 95% write 0.95.', '')
    """
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value) if isinstance(value, str) else None
    return f" For {value} write {float(percent[1]) / 100:g}." if percent else ""


def _read_bool(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    return value if isinstance(value, bool) else words[value.lower() if isinstance(value, str) else "?"]


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    return float(value)


def _read_str(value: Any) -> str:
    if not isinstance(value, str) or not is_text(value):
        raise TypeError
    return value


def is_text(value: str) -> bool:
    """Whether files and their names can hold it; the bytes of an argument that are no UTF-8 become surrogates.

    >>> is_text("übung"), is_text("a\\0b"), is_text("\\udcff")
    (True, False, False)
    """
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value)


def _read_numbers(value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        value = value.strip().removeprefix("[").removesuffix("]").split(",")
    return tuple(_read_float(number) for number in ([value] if isinstance(value, (int, float)) else value))


def _read_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        found = _in_brackets(value.strip())
        value = [word.strip() for word in value.split(",") if word.strip()] if found is None else found
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise TypeError
    return tuple(value)


def _in_brackets(text: str) -> list[Any] | None:
    """Return the words of a list as JSON and YAML write it; None for other text, such as patterns with brackets.

    >>> _in_brackets('["conv1.*", "bn1.*"]'), _in_brackets("[conv1.*,bn1.*]"), _in_brackets("[ab].*,x[cd]")
    (['conv1.*', 'bn1.*'], ['conv1.*', 'bn1.*'], None)
    """
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return list(json.loads(text))
    except ValueError:  # words without quotes, as YAML may have them, or which a shell took away
        inner = text[1:-1]
        return None if "[" in inner or "]" in inner else [word.strip().strip("'\"") for word in inner.split(",")]


_READERS: dict[Any, Any] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    tuple[str, ...]: _read_names,
    tuple[float, ...]: _read_numbers,
}
_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[str, ...]: "names, with commas",
    tuple[float, ...]: "numbers, with commas",
}


def _wanted(field: Field) -> str:
    if field.choices:
        return f"Write one of {listed(field.choices, 9)}."
    words = [_WANTED[m] for m in _members(field.type) if m is not type(None)]
    return f"Write {' or '.join(words)}."


def _members(hint: Any) -> list[Any]:
    """Return a union's types, the strictest reading first: a count before a fraction, a number before text."""
    if not (typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType)):
        return [hint]
    order = [bool, int, float, str]
    return sorted(typing.get_args(hint), key=lambda m: order.index(m) if m in order else len(order))


def _choices(hint: Any) -> tuple[str, ...]:
    return next((typing.get_args(m) for m in _members(hint) if typing.get_origin(m) is Literal), ())


def _flat(content: Any, where: str, prefix: str, known: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(content, Mapping):
        raise InvalidType(f"{where} holds {type(content).__name__}, not keys and values. Write 'key: value' lines.")
    for key, value in content.items():
        if not prefix and key in known:
            yield from _flat({} if value is None else value, f"Section {key!r}", f"{key}.", known)
        elif isinstance(value, Mapping):
            hint = did_you_mean(str(key), known) if not prefix else ""
            raise InvalidValue(f"A recipe has no section {prefix + str(key)!r}.{hint}")
        else:
            yield f"{prefix}{key}", value


def _with(part: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return replace(part, **{head: _with(getattr(part, head), rest, value) if rest else value})


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _sayings(kind: type) -> dict[str, str]:
    """Return the text written under each attribute of a class."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(kind)).body[0]).body
    found = {}
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[typing.cast(ast.Name, above.target).id] = " ".join(str(below.value.value).split())
    return found
