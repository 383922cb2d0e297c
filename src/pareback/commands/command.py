"""What a subcommand of ``pareback`` is made of."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from ..lab.arguments import Parser


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does in a line, its options, and the function that does it and returns an exit code."""

    about: str
    options: Callable[[Parser], None]
    run: Callable[[Namespace], int | None]
    usage: str = "[OPTIONS]"
    more: str = ""
