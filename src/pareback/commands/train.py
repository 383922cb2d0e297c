"""``pareback train``: a recipe, trained into a run folder."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..messages import place
from .arguments import Command, Parser, UsageError, add_recipe_options, add_trust_option, changes, output_path


def _options(parser: Parser) -> None:
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE.yaml", help="without one, the digits")
    parser.add_argument("--out", type=output_path, metavar="DIR", help="the run's folder (default: runs/NAME-SEED)")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="go on with the run in DIR (default: that of --out)"
    )
    parser.add_argument("--force", action="store_true", help="delete the run that is in the folder and begin anew")
    add_trust_option(parser)
    parser.add_argument("--quiet", action="store_true", help="print only the last line")
    add_recipe_options(parser)


def _run(options: Namespace) -> int:
    from ..lab import environment
    from ..lab.recipe.checks import check_effects
    from ..lab.recipe.reading import override, read
    from ..lab.recipe.schema import Recipe
    from ..lab.trainer import train
    from ..runs import folder as run_folder
    from ..runs.trust import admit

    began = environment.process_start()
    given = changes(options)
    resume, out = options.resume is not None, options.out
    if resume and options.force:
        raise UsageError("--resume goes on with a run and --force throws it away. Write one of them.")
    if options.resume:
        if out is not None and Path(options.resume) != out:
            raise UsageError(f"--resume {options.resume} and --out {out} are two folders. Write one of them.")
        out = Path(options.resume)
    if options.recipe is not None:
        recipe = read(options.recipe)
    elif resume and out is not None:
        recipe = run_folder.recipe_of(out)
        if "model.name" not in given:
            admit(out, recipe.model.name, options.trust)
    else:
        recipe = Recipe()
        given = {"name": _name(given, recipe.name), **given}
    recipe = override(recipe, given)
    # A run that is there goes on as it began: a curve's point may hold more than counts for it.
    check_effects(recipe, given, rest=not resume)
    if out is None:
        out = Path("runs") / f"{recipe.name}-{recipe.seed}"
    if resume:
        run_folder.recipe_of(out)  # there has to be a run
    result = train(
        recipe, out, resume=resume, force=options.force, quiet=options.quiet, began=began, trust=options.trust
    )
    if os.environ.get("RANK", "0") == "0":
        said = _summary(result, out)
        # On a terminal in lines that fit; for a program that reads it, one.
        print(textwrap.fill(said, 80, break_long_words=False, break_on_hyphens=False) if sys.stdout.isatty() else said)
    return 0


def _name(given: Mapping[str, Any], usual: str) -> str:
    """Return what a run without a recipe is called: after its data, which need not be the digits.

    >>> _name({"data.kind": "npz", "data.path": "data/birds.npz"}, "digits"), _name({"seed": 1}, "digits")
    ('birds', 'digits')
    """
    return Path(given.get("data.path") or "").stem or given.get("data.kind") or usual


def _summary(result: dict[str, Any], out: Path) -> str:
    from ..runs.exactness import limits

    kept = f"{result['nonzeros']:,} of {result['parameters']:,} parameters non-zero"
    pruned = f", pruned tensors {100 * result['sparsity']:.3f} % sparse" if result["pruned_weights"] else ""
    seconds = f"{result['seconds']['total']:.1f} s"
    came = f"{result['name']}: {result['accuracy']:.2f} % accuracy{_measured_on(result)}, {kept}{pruned}, {seconds}."
    asked = [
        f"{one.unit[:1].upper()}{one.unit[1:]}: {math.floor(one.allowed):,} allowed, {int(one.got):,} kept"
        for one in limits(result["recipe"]["goal"], result)
    ]
    met = f" {'; '.join(asked)}." if asked else ""
    return f"{came}{met}{_best(result)}{_renewed(result)} Everything is in {place(out)}."


def _measured_on(result: dict[str, Any]) -> str:
    """Say which images an accuracy is of, where some were held out to choose by, and what the test images say."""
    if "best" not in result:  # a set in memory: images that are held out take the test's place
        return " on val" if result["recipe"]["data"].get("val_share") else ""
    test = result["test_accuracy"]
    return " on val" + (" (there is no test)" if test is None else f" ({test:.2f} % on test)")


def _best(result: dict[str, Any]) -> str:
    best = result.get("best")
    if best is None:
        return ""
    test = "" if best["test_accuracy"] is None else f" ({best['test_accuracy']:.2f} % on test)"
    return f" Best on val: epoch {best['epoch']} with {best['val_accuracy']:.2f} %{test}."


def _renewed(result: dict[str, Any]) -> str:
    """Say what estimating batch norms anew did, where it was done."""
    found = result.get("recalibration")
    if not found or found["accuracy_after"] is None:
        return ""
    which = "estimated anew" if found["kept"] else "left as they were: anew, the loss would be higher"
    return f" Batch norms {which} ({found['accuracy_before']:.2f} % before, {found['accuracy_after']:.2f} % after)."


COMMAND = Command(
    "Train a recipe, or the digits without one, into a run folder.",
    _options,
    _run,
    "[RECIPE.yaml] [--SECTION.FIELD VALUE ...] [OPTIONS]",
    "Every field of a recipe is an option, and an option overrides the recipe. Limits can be combined: --goal.params "
    "0.1 --goal.flops 50M. On several GPUs: torchrun --nproc-per-node 2 -m pareback train ...",
    (
        "pareback train --goal.kind budget --goal.sparsity 0.95",
        "pareback train --resume runs/digits-0",
        "pareback train recipes/digits-curve.yaml --train.epochs 5",
    ),
)
