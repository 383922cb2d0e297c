"""``pareback evaluate``: a run's network on images, class by class."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

from .arguments import Command, Parser, UsageError, add_trust_option, output_path


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder")
    add("--data.path", dest="path", metavar="PATH", help="other images of the same classes: a folder or an .npz file")
    add("--data.workers", dest="workers", type=int, metavar="N", help="processes that read a folder's images")
    add(
        "--data.corrupt",
        dest="corrupt",
        choices=("stop", "skip", "later"),
        metavar="WORD",
        help="what becomes of images that cannot be read: stop, skip or later (as the run was trained)",
    )
    add("--train.device", dest="device", metavar="TEXT", help="auto, cpu, cuda or cuda:N (as the run was trained)")
    add(
        "--model",
        choices=("last", "best", "ema"),
        default="last",
        metavar="MODEL",
        help="last, best (of the best epoch on val) or ema (%(default)s)",
    )
    add("--out", type=output_path, metavar="FILE", help="the picture, a PNG (default: confusion.png in RUN)")
    add_trust_option(parser)
    add("--json", action="store_true", help="print everything as JSON")


def _run(options: Namespace) -> None:
    from ..lab.evaluation import evaluate_run, said, shown
    from ..page.confusion import plot_confusion
    from ..runs.folder import is_own_file

    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--data.workers {options.workers} must be at least 0. Write --data.workers 4.")
    if options.out is not None and not options.out.parent.is_dir():
        raise UsageError(f"There is no folder {str(options.out.parent)!r}. Make it first.")
    if options.out is not None and is_own_file(options.out.resolve()):
        raise UsageError(f"{str(options.out)!r} belongs to the run in that folder. Give another file with --out.")
    found = evaluate_run(
        options.run,
        path=options.path,
        which=options.model,
        workers=options.workers,
        device=options.device,
        corrupt=options.corrupt,
        trust=options.trust,
    )
    picture = plot_confusion(found, options.out or options.run / _name(options.model, options.path))
    if options.json:
        print(json.dumps({**found.as_dict(), "picture": str(picture)}, indent=1))
        return
    print(shown(found))
    print("\n".join(said(found)))
    print(f"wrote {picture}")


def _name(model: str, path: str | None) -> str:
    """Return what a picture is called, so that those of other images or models do not replace each other.

    >>> _name("last", None), _name("best", "data/my birds/")
    ('confusion.png', 'confusion-best-my-birds.png')
    """
    images = re.sub(r"[^\w.=+-]+", "-", Path(path).name).strip("-.") if path else ""
    parts = ["confusion", *([model] if model != "last" else []), *([images] if images else [])]
    return f"{'-'.join(parts)}.png"


COMMAND = Command(
    "Measure a run's network on its test images or on others: accuracy, each class, a confusion matrix.",
    _options,
    _run,
    "RUN [--data.path PATH] [--model last|best|ema] [--out FILE.png] [--json] [--trust]",
    "Other images are a folder with one folder per class, or with val/ or test/ of that kind; or an .npz file.\n"
    "A run that was interrupted is measured by its last checkpoint, and the output says so.",
    ("pareback evaluate runs/digits-0",),
)
