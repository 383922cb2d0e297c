"""``pareback demo``: two small networks pruned on handwritten digits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .arguments import Command, Parser, output_path


def _options(parser: Parser) -> None:
    parser.add_argument(
        "--out",
        type=output_path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where runs and pictures go (%(default)s)",
    )


def _run(options: Namespace) -> None:
    from ..reproduce.demo import demo

    demo(options.out)


COMMAND = Command(
    "Prune two small networks on handwritten digits, in about a minute.",
    _options,
    _run,
    "[--out DIR]",
    "Tables and pictures of what came of it are in the folder afterwards.",
)
