"""``pareback inspect``: exact non-zeros of weights on disk."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from .arguments import Command, Parser


def _options(parser: Parser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="FILE_OR_RUN", help="a run's folder, a .pare, .pbe, .safetensors or .pt file"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def _run(options: Namespace) -> None:
    from ..artifact import describe
    from ..artifact.weights import holds_engine, holds_pare
    from ..runs.counts import inspect_path
    from ..runtime.saved.describe import describe_engine

    report: Any
    if holds_engine(options.path):
        report = describe_engine(options.path)
    else:
        report = describe(options.path) if holds_pare(options.path) else inspect_path(options.path)
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)


COMMAND = Command(
    "Count the non-zeros of a run or a file of weights, per tensor; say what a compiled engine was tuned for.",
    _options,
    _run,
    "FILE_OR_RUN [--json]",
    examples=("pareback inspect runs/digits-0",),
)
