"""What commands are made of: a parser, and the recipe as options with the help from its dataclasses."""

from __future__ import annotations

import argparse
import re
import shlex
import typing
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import InvalidValue
from ..lab.recipe.reading import Field, entries, is_text, nearest, nearest_key, sections
from ..messages import did_you_mean


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does in a line, its options, and the function that does it and returns an exit code."""

    about: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace], int | None]
    usage: str = "[OPTIONS]"
    more: str = ""


T = TypeVar("T")

_PREFIX = "recipe:"


class UsageError(InvalidValue):
    """A command line that cannot be understood."""


def output_path(text: str) -> Path:
    """Read the path of something to write; an empty one, as an unset variable gives it, would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    if not is_text(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return Path(text)


def add_trust_option(parser: Parser) -> None:
    """Add the word by which a user lets code be imported that a run of somebody else names."""
    parser.add_argument(
        "--trust", action="store_true", help="import the code that a run names as its network, whoever made the run"
    )


class Parser(argparse.ArgumentParser):
    """Answers mistakes with one sentence and the nearest right word instead of the whole usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError` instead of printing usage and leaving."""
        raise UsageError(f"{message[:1].upper()}{message[1:].rstrip('.')}. See {self.prog} --help.")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``argv``; an unknown option is answered with the nearest known one."""
        found, left = self.parse_known_args(self._with_values(argv))
        options = [word for word in left if word.startswith("-")]
        if options:
            raise UsageError(f"There is no option {options[0].split('=')[0]!r}.{self._nearest(options[0])}")
        self._refuse_assignments([str(getattr(found, "recipe", None) or ""), *left])
        if left:
            raise UsageError(f"{left[0]!r} is one argument too many. See {self.prog} --help.")
        return found

    def _with_values(self, argv: Sequence[str]) -> list[str]:
        """Join an option to a value that begins with one dash, as in ``--sort -accuracy``: no option does."""
        joined: list[str] = []
        taking = {name for action in self._actions if action.nargs is None for name in action.option_strings}
        for word in argv:
            if joined and joined[-1] in taking and re.fullmatch("-[A-Za-z][A-Za-z0-9_.]+", word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def _refuse_assignments(self, words: Sequence[str]) -> None:
        """Answer ``train.epochs=3``, as messages write a field, with the option, where fields are options."""
        if not any(action.dest.startswith(_PREFIX) for action in self._actions):
            return
        written = {word: as_option(word) for word in words}
        assigned = {word: option for word, option in written.items() if option and not Path(word).is_file()}
        if not assigned:
            return
        options = " ".join(assigned.values())
        sure = all(option.startswith(f"--{word.partition('=')[0]} ") for word, option in assigned.items())
        instead = f"Write {options}." if sure else f"Did you mean {options}?"
        raise UsageError(f"{next(iter(assigned))!r} is not an option. {instead}")

    def _nearest(self, option: str) -> str:
        names = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        word = option.split("=")[0].lstrip("-")
        alone = [name for name in names if "." not in name]
        hint = "" if any(name.endswith(f".{word}") for name in names) else did_you_mean(word, alone)
        return (hint or nearest(word, names)).replace("'", "'--", 1) or f" See {self.prog} --help."


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wide enough for dotted names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_recipe_options(parser: Parser) -> None:
    """Let a command take every field of a recipe, as in ``--goal.sparsity 0.98``."""
    groups = {
        name: parser.add_argument_group(f"recipe: {name}" if name else "recipe", about)
        for name, about in sections().items()
    }
    for field in entries():
        group = groups[field.key.rpartition(".")[0]]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type is bool else {}
        group.add_argument(
            f"--{field.key}",
            dest=_PREFIX + field.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(field),
            help=f"{field.about} (default: {_shown(field.default)})".replace("%", "%%"),
            **switch,
        )


def as_option(word: str) -> str:
    """Return the option for a field that is written as ``key=value``; nothing for any other word.

    >>> as_option("train.epochs=3"), as_option("epoch=3"), as_option("runs/lr=0.1.yaml")
    ('--train.epochs 3', '--train.epochs 3', '')
    """
    key, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", key) or value.endswith((".yaml", ".yml")):
        return ""
    known = [field.key for field in entries()]
    near = key if key in known else nearest_key(key, known)
    return f"--{near} {shlex.quote(value)}" if near else ""


def changes(options: argparse.Namespace) -> dict[str, str]:
    """Return the fields that were given, by dotted name."""
    return {key.removeprefix(_PREFIX): value for key, value in vars(options).items() if key.startswith(_PREFIX)}


def _metavar(field: Field) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    words = {bool: "true|false", int: "N", float: "X", float | None: "X", str: "TEXT", str | None: "TEXT"}
    names = any(typing.get_origin(kind) is tuple for kind in field.kinds)
    return words.get(field.type, "A,B" if names else "AMOUNT")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def seeds(text: str) -> tuple[int, ...]:
    """Read how many seeds, or which.

    >>> seeds("3"), seeds("0,5"), seeds("5,")
    ((0, 1, 2), (0, 5), (5,))
    """
    found = listed_values("--seeds", text, int, "3, for 0,1,2, or 0,5")
    if "," not in text:
        found = tuple(range(found[0])) if found else ()
    if not found or min(found) < 0:
        raise UsageError(f"--seeds {text} is none. Write how many, such as 3, or which, such as 0,5.")
    return found


def listed_values(option: str, text: str, read: Callable[[str], T], example: str) -> tuple[T, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return tuple(dict.fromkeys(map(read, words)))
    except ValueError:
        raise UsageError(f"{option} {text!r} cannot be read. Write {option} {example}.") from None
