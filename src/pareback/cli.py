"""The command ``pareback``: each subcommand is one entry of COMMANDS, and mistakes are answered in one sentence.

Exit codes: 0 for success, 2 for a command line or recipe that is wrong, 1 for anything that failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._version import __version__
from .commands import bench, curve, page, runs
from .commands.command import Command
from .lab.arguments import Parser, UsageError, add_recipe_options, changes
from .wording import did_you_mean

#: What is wrong with the input; everything else that is raised is a failure.
_WRONG_INPUT = (UsageError, ValueError, TypeError, FileNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("PAREBACK_TRACEBACK") == "1":
        return _dispatched(argv)
    try:
        return _dispatched(argv)
    except SystemExit as leaving:  # --help and --version
        return leaving.code if isinstance(leaving.code, int) else 1
    except _WRONG_INPUT as error:
        _complain(error, everywhere=False)
        return 2
    except KeyboardInterrupt as error:
        print(f"\n{error}" if str(error) else "\nInterrupted.", file=sys.stderr)
        return 128 + int(getattr(error, "number", 2))
    except Exception as error:
        _complain(error, everywhere=True)
        return 1


def _dispatched(argv: list[str]) -> int:
    parser = Parser(
        prog="pareback",
        description="Train any PyTorch model down to a budget of weights, FLOPs or bytes.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12}{command.about}" for name, command in COMMANDS.items())
        + "\n\nEach command explains itself: pareback COMMAND --help.",
        usage="pareback [--help] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"pareback {__version__}")
    if not argv or argv[0].startswith("-"):
        parser.parse(argv)
        raise UsageError(f"There is no command. Write one of: {', '.join(COMMANDS)}.")
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f" Write one of: {', '.join(COMMANDS)}."
        raise UsageError(f"There is no command {name!r}.{hint}")
    command = COMMANDS[name]
    about = f"{command.about}\n\n{command.more}".strip()
    own = Parser(prog=f"pareback {name}", usage=f"pareback {name} {command.usage}", description=about)
    command.options(own)
    return command.run(own.parse(rest)) or 0


def _complain(error: BaseException, everywhere: bool) -> None:
    """Say what is wrong; of several processes with the same input, the first one does."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not everywhere:
        return
    known = isinstance(error, (*_WRONG_INPUT, RuntimeError, OSError, FloatingPointError))
    text = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
    where = f" (process {rank})" if rank != "0" else ""
    print(f"pareback: error{where}: {text}", file=sys.stderr)
    if not known:
        print("Set PAREBACK_TRACEBACK=1 to see where it came from.", file=sys.stderr)


# -- train -----------------------------------------------------------------------------------------------------------


def _train_options(parser: Parser) -> None:
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE.yaml", help="the recipe; digits without one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME-SEED)")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="go on with the run in DIR, --out or the default folder"
    )
    parser.add_argument("--force", action="store_true", help="throw away the run that is in the folder")
    parser.add_argument("--quiet", action="store_true", help="print the last line alone")
    add_recipe_options(parser)


def _train(options: Namespace) -> int:
    from .lab import environment, run_folder
    from .lab.reading import override, read
    from .lab.recipe import Recipe
    from .lab.trainer import train

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
    else:
        recipe = Recipe()
    recipe = override(recipe, given)
    if out is None:
        out = Path("runs") / f"{recipe.name}-{recipe.seed}"
    if resume:
        run_folder.recipe_of(out)  # there has to be a run
    result = train(recipe, out, resume=resume, force=options.force, quiet=options.quiet, began=began)
    if os.environ.get("RANK", "0") == "0":
        print(_summary(result, out))
    return 0


def _summary(result: dict[str, Any], out: Path) -> str:
    kept = f"{result['nonzeros']:,} of {result['parameters']:,} parameters non-zero"
    pruned = f", pruned tensors {100 * result['sparsity']:.3f} % sparse" if result["pruned_weights"] else ""
    seconds = f"{result['seconds']['total']:.1f} s"
    return f"{result['name']}: {result['accuracy']:.2f} % accuracy, {kept}{pruned}, {seconds}. Everything is in {out}."


# -- inspect ---------------------------------------------------------------------------------------------------------


def _inspect_options(parser: Parser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="FILE_OR_RUN", help="a run's folder, a .pare, .safetensors or .pt file"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def _inspect(options: Namespace) -> None:
    from .artifact import describe
    from .lab.inspection import inspect_path

    report = describe(options.path) if options.path.suffix == ".pare" else inspect_path(options.path)
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)


# -- export ----------------------------------------------------------------------------------------------------------


def _export_options(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN_OR_FILE", help="a run's folder or a file of weights")
    parser.add_argument("--format", default="pare", metavar="FORMAT", help="pare, safetensors or onnx (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write (beside the source by default)")
    parser.add_argument("--values", metavar="TYPE", help="keep a .pare file's values as float16 or bfloat16")


def _export(options: Namespace) -> None:
    from .lab.exporting import export_path

    out = export_path(options.source, options.format, options.out, options.values)
    print(f"wrote {out}, {out.stat().st_size:,} bytes")


# -- demo ------------------------------------------------------------------------------------------------------------


def _demo_options(parser: Parser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="where runs and pictures go (%(default)s)"
    )


def _demo(options: Namespace) -> None:
    from .lab.demo import demo

    demo(options.out)


# -- reproduce -------------------------------------------------------------------------------------------------------


def _reproduce_options(parser: Parser) -> None:
    add = parser.add_argument
    add("experiment", metavar="EXPERIMENT", help="table2, ste, exact, one-cycle, taught, trials or curves")
    add("--data.path", dest="data", metavar="FILE", help="the .npz file of CIFAR-100")
    add("--out", type=Path, default=Path("results/paper"), metavar="DIR", help="tables, plots, rows/ (%(default)s)")
    add("--runs", type=Path, default=Path("runs/paper"), metavar="DIR", help="folders with weights (%(default)s)")
    add("--recipes", type=Path, metavar="DIR", help="the rows' recipes (recipes/paper, here or of the checkout)")
    add("--only", metavar="A,B", help="these rows alone, in this order")
    add("--seeds", default="0", metavar="N,M", help="train every row with each of these seeds (%(default)s)")
    add("--epochs", type=int, metavar="N", help="shorten to N epochs, with as many restarts")
    add("--width", type=int, metavar="N", help="shrink the network to this width")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--seconds", type=float, metavar="N", help="begin no row that would not end N seconds after the start")
    add("--collect", action="store_true", help="train nothing: write tables and plots from the rows in --out")
    add("--quiet", action="store_true", help="print a line per row, not per epoch")


def _reproduce(options: Namespace) -> None:
    from .curves.reproducing import CURVES, reproduce_curves
    from .lab import environment
    from .lab.paper import EXPERIMENTS
    from .lab.reproduce import Plan, collect, reproduce

    began = environment.process_start()
    experiments = {**EXPERIMENTS, CURVES.name: CURVES}
    if options.experiment not in experiments:
        hint = did_you_mean(options.experiment, experiments) or f" Write one of: {', '.join(experiments)}."
        raise UsageError(f"There is no experiment {options.experiment!r}.{hint}")
    experiment = experiments[options.experiment]
    if options.collect:
        for path in collect(experiment, options.out):
            print(f"wrote {path}")
        return
    if options.data is None:
        raise UsageError("--data.path is missing. Give the .npz file of CIFAR-100 with it.")
    plan = Plan(
        out=options.out,
        runs=options.runs,
        data=options.data,
        recipes=options.recipes,
        only=tuple(options.only.split(",")) if options.only else (),
        seeds=_whole_numbers("--seeds", options.seeds),
        epochs=options.epochs,
        width=options.width,
        device=options.device,
        seconds=options.seconds,
        quiet=options.quiet,
        began=began,
    )
    if experiment is CURVES:
        reproduce_curves(plan)
    else:
        reproduce(experiment, plan)


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise UsageError(f"{option} {text!r} is not a list of whole numbers. Write {option} 0,1.")
    return tuple(dict.fromkeys(int(word) for word in words))


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a recipe, or the digits without one, into a run folder.",
        _train_options,
        _train,
        "[RECIPE.yaml] [--out DIR] [--resume [DIR]] [--SECTION.FIELD VALUE ...]",
        "Every field of the recipe is an option: pareback train RECIPE.yaml --goal.kind budget --goal.sparsity 0.98.\n"
        "Under torchrun (torchrun --nproc-per-node 2 -m pareback train ...) processes share each batch.",
    ),
    "inspect": Command(
        "Count the non-zeros of a run or a file of weights, per tensor.",
        _inspect_options,
        _inspect,
        "FILE_OR_RUN [--json]",
    ),
    "export": Command(
        "Write a run's model, or a file of weights, as a compressed .pare file, as safetensors or as ONNX.",
        _export_options,
        _export,
        "RUN_OR_FILE [--format pare|safetensors|onnx] [--out FILE] [--values float16|bfloat16]",
    ),
    "demo": Command(
        "Prune two small networks on real handwritten digits in about a minute, and draw what came of it.",
        _demo_options,
        _demo,
        "[--out DIR]",
    ),
    "reproduce": Command(
        "Train the rows of one of the paper's tables or curves and set them beside its numbers.",
        _reproduce_options,
        _reproduce,
        "{table2,ste,exact,one-cycle,taught,trials,curves} --data.path FILE [--only A,B] [--seeds N,M] [--collect] ...",
        "table2: the six rows of Table 2. ste: the ablation of the straight-through estimator. exact: exact budgets\n"
        "of 85 to 99 %. one-cycle: the same without restarts. taught: with the dense network as a teacher.\n"
        "trials: what costs accuracy at 98 %, in 40 epochs. curves: its trade-off curve, with dense equivalents and\n"
        "the exact budget, in 40 epochs.\n"
        "Rows that are there are not trained again, and rows that were cut off go on.",
    ),
    "curve": curve.COMMAND,
    "runs": runs.COMMAND,
    "page": page.COMMAND,
    "bench": bench.COMMAND,
}
