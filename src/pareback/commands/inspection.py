"""``pareback inspect``: exact non-zeros of weights on disk."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from .arguments import Command, Parser


def _options(parser: Parser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="FILE_OR_RUN", help="a run's folder, a .pare, .safetensors or .pt file"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def _run(options: Namespace) -> None:
    from ..artifact import describe
    from ..artifact.weights import holds_pare
    from ..runs.counts import inspect_path

    report = describe(options.path) if holds_pare(options.path) else inspect_path(options.path)
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)


COMMAND = Command(
    "Count the non-zeros of a run or a file of weights, per tensor.",
    _options,
    _run,
    "FILE_OR_RUN [--json]",
    examples=("pareback inspect runs/digits-0",),
)
