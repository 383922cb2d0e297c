"""``pareback export``: a run or a file of weights in another format."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .arguments import Command, Parser, add_trust_option, output_path


def _options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN_OR_FILE", help="a run's folder or a file of weights")
    parser.add_argument("--format", default="pare", metavar="FORMAT", help="pare, safetensors or onnx (%(default)s)")
    parser.add_argument(
        "--out", type=output_path, metavar="FILE", help="the file to write (beside the source by default)"
    )
    add_trust_option(parser)
    parser.add_argument("--values", metavar="TYPE", help="keep a .pare file's values as float16 or bfloat16")


def _run(options: Namespace) -> None:
    from ..runs.export import export_path

    out = export_path(options.source, options.format, options.out, options.values, options.trust)
    print(f"wrote {out}, {out.stat().st_size:,} bytes")


COMMAND = Command(
    "Write a run or a file of weights as .pare, safetensors or ONNX.",
    _options,
    _run,
    "RUN_OR_FILE [--format pare|safetensors|onnx] [--out FILE] [--values float16|bfloat16] [--trust]",
    "A .pare file is compressed: zeros take next to no room in it.",
    ("pareback export runs/digits-0", "pareback export runs/digits-0 --format onnx --out model.onnx"),
)
