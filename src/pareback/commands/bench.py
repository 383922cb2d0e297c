"""``pareback bench``: what a pruned model gains on this machine, beside the runtimes a user would otherwise pick."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Command, Parser, UsageError, add_trust_option, output_path

if TYPE_CHECKING:
    from ..bench.opening import Given


def add_source_options(parser: Parser) -> None:
    """Add the options that say where a network and its weights come from."""
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run's folder, a recipe, or a file of weights with --recipe")
    add("--recipe", type=Path, metavar="FILE", help="the recipe of a file of weights")
    add("--weights", type=Path, metavar="FILE", help="weights for the recipe's network: .pare, .safetensors or .pt")
    add("--sparsity", type=float, metavar="X", help="without weights: zeros in random ones (the recipe's, or 0.9)")
    add("--data.path", dest="data", metavar="PATH", help="the recipe's images, if they are elsewhere here")
    add("--shape", metavar="C,H,W", help="an example's shape, where the images are not at hand")
    add("--classes", type=int, metavar="N", help="the network's classes, where the images are not at hand")


def _options(parser: Parser) -> None:
    add_source_options(parser)
    add = parser.add_argument
    add("--batch", default="1,16,64", metavar="N,M", help="batch sizes (%(default)s)")
    add("--threads", default="1", metavar="N,M", help="numbers of threads, for every runtime alike (%(default)s)")
    add("--runtimes", metavar="A,B", help="of eager, compile, onnxruntime, openvino, int8, int8-dynamic and engine")
    add(
        *("--seconds",),
        type=float,
        default=30.0,
        metavar="N",
        help="begin no further batch size N seconds after the start (%(default)s; inf for all of them)",
    )
    add_trust_option(parser)
    add("--json", action="store_true", help="print everything as JSON")
    add("--out", type=output_path, metavar="FILE", help="also write everything as JSON here")
    add("--chart", type=output_path, metavar="FILE", help="also draw the ratios as bars, as a PNG here")


def _run(options: Namespace) -> None:
    from .. import files
    from ..bench.chart import draw
    from ..bench.comparison import compare
    from ..bench.opening import open_subject
    from ..bench.showing import as_text

    for option, path in (("--out", options.out), ("--chart", options.chart)):
        if path is not None and path.is_dir():
            raise UsageError(f"{str(path)!r} is a folder. Give the name of a file with {option}.")
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"There is no folder {str(path.parent)!r}. Make it first.")
    batches, threads = numbers("--batch", options.batch), numbers("--threads", options.threads)
    runtimes = None if options.runtimes is None else options.runtimes.split(",")
    found = compare(
        open_subject(options.source, source_of(options)),
        batches,
        threads,
        runtimes,
        seconds=options.seconds,
        progress=lambda line: print(f"measuring {line} ...", file=sys.stderr, flush=True),
    )
    if options.out is not None:
        files.write_json(options.out, found.as_dict())
    if options.chart is not None:
        draw(found, options.chart)
    print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if options.json else as_text(found))


def source_of(options: Namespace) -> Given:
    """Return what the options of :func:`add_source_options` say."""
    from ..bench.opening import Given

    shape = None if options.shape is None else numbers("--shape", options.shape)
    if shape is not None and len(shape) != 3:
        raise UsageError(f"--shape {options.shape!r} is not channels, height and width. Write --shape 3,32,32.")
    return Given(
        options.recipe,
        options.weights,
        options.sparsity,
        options.data,
        None if shape is None else (shape[0], shape[1], shape[2]),
        options.classes,
        options.trust,
    )


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers above 0 that an option lists."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", word) for word in words):
        raise UsageError(f"{option} {text!r} is not a list of whole numbers above 0. Write {option} 1,16.")
    return tuple(dict.fromkeys(map(int, words))) if option != "--shape" else tuple(map(int, words))


COMMAND = Command(
    "Time a pruned model beside dense runtimes, and say what to use.",
    _options,
    _run,
    "RUN|RECIPE.yaml|FILE [--recipe FILE] [--batch N,M] [--threads N,M] [--runtimes A,B] [--json] [--out FILE]"
    " [--chart FILE]",
    "A recipe without --weights is timed with random weights at --sparsity. A file of weights needs --recipe.\n"
    "Runtimes that are not installed are left out and named: pip install 'pareback[bench]' brings them.",
    ("pareback bench runs/digits-0",),
)
