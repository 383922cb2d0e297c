"""What commands are made of: a parser, and the recipe as options with the help from its dataclasses."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import textwrap
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
    examples: tuple[str, ...] = ()
    """Lines that work when they are pasted, the commonest first."""

    @property
    def described(self) -> str:
        """What stands above the options: what the command does, how it is written, and what else to know."""
        lines = "\n".join(f"  {line}" for line in self.examples)
        return "\n\n".join(filter(None, (self.about, lines, self.more)))


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
        "--trust", action="store_true", help="allow importing the Python code that a run names as its network"
    )


class Parser(argparse.ArgumentParser):
    """Answers mistakes with one sentence and the nearest right word instead of the whole usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, "add_help": False, **kwargs})
        if self.usage is not None:
            self.usage = _wrapped_usage(self.usage)
        self._positionals.title, self._optionals.title = "arguments", "options"
        self.add_argument("-h", "--help", action="help", help="show this and leave")

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError` instead of printing usage and leaving."""
        message = re.sub("^the following arguments are required: (.*)", r"\1 is missing", message)
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


#: The widest line of a help text: terminals have 80 columns, and longer lines are hard to read in wider ones.
_WIDTH = 80


class _Help(argparse.HelpFormatter):
    """Wide enough for dotted names, and narrow enough for every terminal; indented lines stay as they are."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=30, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_filled(block, width, indent) for block in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # fixed-GA is one word


def _filled(block: str, width: int, indent: str) -> str:
    if block.startswith("  ") or "\n  " in block:
        return textwrap.indent(block, indent)
    words = " ".join(block.split())
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _wrapped_usage(usage: str) -> str:
    """Return a usage in lines that fit, what is in brackets unbroken.

    >>> print(_wrapped_usage("pareback x FILE [--one A] [--resume [DIR]] [--another-one VALUE] [--a-third-one VALUE]"))
    pareback x FILE [--one A] [--resume [DIR]] [--another-one VALUE]
                      [--a-third-one VALUE]
    """
    words = re.findall(r"\[(?:[^\[\]]|\[[^\]]*\])*\]|\S+", usage)
    lines = [words[0]]
    for word in words[1:]:
        if len("usage: ") + len(lines[-1]) + 1 + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * 11 + word)
    return "\n".join([lines[0], *(" " * 7 + line for line in lines[1:])])


#: The sections of a recipe in the order in which people want them, and in them the fields that come first.
_SECTIONS = ("", "goal", "data", "model", "train")
_FIRST = ("train.epochs", "train.device", "train.precision")


def add_recipe_options(parser: Parser) -> None:
    """Let a command take every field of a recipe, as in ``--goal.sparsity 0.98``; the commonest come first."""
    found = sections()
    groups = {
        name: parser.add_argument_group(name or "the run", found[name])
        for name in sorted(found, key=lambda name: _place(name, _SECTIONS))
    }
    for field in sorted(entries(), key=lambda field: _place(field.key, _FIRST)):
        group = groups[field.key.rpartition(".")[0]]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type is bool else {}
        group.add_argument(
            f"--{field.key}",
            dest=_PREFIX + field.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(field),
            help=_said(field).replace("%", "%%"),
            **switch,
        )


def _place(name: str, first: Sequence[str]) -> int:
    """Return a name's place in an order that names those at its beginning; the sorting keeps the others as they are."""
    return first.index(name) if name in first else len(first)


def _said(field: Field) -> str:
    """Return a field's help: the words that it takes, where they are too many to stand beside it, and its default."""
    words = "" if _fit(field) else f"One of {', '.join(field.choices)}. "
    default = "" if field.default is None else f" (default: {_shown(field.default)})"
    return f"{words}{field.about}{default}"


def _fit(field: Field) -> bool:
    return len(",".join(field.choices)) < 40


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
        return "{" + ",".join(field.choices) + "}" if _fit(field) else "WORD"
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
