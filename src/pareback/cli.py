"""The command ``pareback``: each subcommand is one entry of COMMANDS, and mistakes are answered in one sentence.

Exit codes: 0 for success, 2 for a command line, a recipe or a file that is wrong, 1 for anything that failed, 130 after
Ctrl-C, 141 where nobody reads the output any more.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

from . import _early_interrupt
from ._version import __version__
from .commands import bench, compile, curve, demo, evaluate, export, inspection, page, reproduce, runs, train
from .commands.arguments import Command, Parser, UsageError
from .errors import InvalidType, InvalidValue, LittleMemory, UserError
from .lab.train.interrupts import PIPE
from .messages import FORESEEN, did_you_mean, lacks_memory, told

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "evaluate": evaluate.COMMAND,
    "inspect": inspection.COMMAND,
    "export": export.COMMAND,
    "demo": demo.COMMAND,
    "reproduce": reproduce.COMMAND,
    "curve": curve.COMMAND,
    "runs": runs.COMMAND,
    "page": page.COMMAND,
    "bench": bench.COMMAND,
    "compile": compile.COMMAND,
}

#: What people want to do, with lines that work one after another when they are pasted into an empty folder; the last
#: needs the file that it names.
USES: dict[str, tuple[str, ...]] = {
    "See it work, in about a minute": ("pareback demo",),
    "Train a network and prune it on the way": ("pareback train --goal.kind budget --goal.sparsity 0.95",),
    "Prune a network that you have, as a run or a file of weights": (
        "pareback train --name smaller --model.pretrained runs/digits-0 \\\n"
        "        --goal.kind budget --goal.sparsity 0.98",
    ),
    "Compare budgets": ("pareback curve --budgets 0.3,0.1",),
    "Look at runs": ("pareback runs", "pareback page", "pareback evaluate runs/digits-0"),
    "Deploy one": ("pareback export runs/digits-0", "pareback compile runs/digits-0", "pareback bench runs/digits-0"),
    "Repeat the paper": ("pareback reproduce table2 --data.path cifar100.npz",),
}

#: What people write for a command of another name.
_MEANT = {
    "prune": " Networks are pruned as they train: pareback train --goal.kind budget --goal.sparsity 0.95.",
    "finetune": " Begin with weights that you have: pareback train --model.pretrained FILE.",
    "resume": " Write pareback train --resume DIR.",
    "plot": " Write pareback page.",
    "report": " Write pareback page.",
    "list": " Write pareback runs.",
    "ls": " Write pareback runs.",
    "convert": " Write pareback export.",
    "save": " Write pareback export.",
    "sweep": " Write pareback curve.",
}

#: What is wrong with the input; everything else that is raised is a failure, a ValueError from deep inside included.
_WRONG_INPUT = (UsageError, InvalidValue, InvalidType, FileNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("PAREBACK_TRACEBACK") == "1":
        return _dispatched(argv)
    try:
        _early_interrupt.release()
        code = _dispatched(argv)
        print(end="", flush=True)  # here, where a reader who is gone is no failure
        return code
    except SystemExit as leaving:  # --help and --version
        return leaving.code if isinstance(leaving.code, int) else 1
    except BrokenPipeError:
        _drop_unheard_output()
        return 128 + PIPE  # what a shell says of a command that the closed pipe's signal ended
    except _WRONG_INPUT as error:
        _complain(error, everywhere=False)
        return 2
    except KeyboardInterrupt as error:
        _drop_unheard_output()
        print(f"\n{error}" if str(error) else "\nInterrupted.", file=sys.stderr)
        return 128 + int(getattr(error, "number", 2))
    except Exception as error:
        if lacks_memory(error) and not isinstance(error, UserError):
            error = LittleMemory("There is not enough memory for this. Free some, or raise the limit (ulimit -v).")
        _complain(error, everywhere=True)
        return 1


def _drop_unheard_output() -> None:
    """Throw away what is left for a reader who is gone, as after ``| head -1``: the interpreter would complain."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _dispatched(argv: list[str]) -> int:
    parser = Parser(
        prog="pareback",
        description=f"Train any PyTorch model down to a budget of weights, FLOPs or bytes.\n\n{_overview()}",
        usage="pareback COMMAND [OPTIONS] [--help] [--version]",
    )
    parser.add_argument("--version", action="version", version=f"pareback {__version__}", help="show the version")
    if not argv or argv[0].startswith("-"):
        parser.parse(argv)
        raise UsageError(f"There is no command. Write one of: {', '.join(COMMANDS)}. See pareback --help.")
    if argv[0] == "help":  # as in other programs
        return _dispatched([*argv[1:2], "--help"])
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        hint = _MEANT.get(name) or did_you_mean(name, COMMANDS) or f" Write one of: {', '.join(COMMANDS)}."
        raise UsageError(f"There is no command {name!r}.{hint}")
    command = COMMANDS[name]
    own = Parser(prog=f"pareback {name}", usage=f"pareback {name} {command.usage}", description=command.described)
    command.options(own)
    return command.run(own.parse(rest)) or 0


def _overview() -> str:
    """Return what people want to do and how, then every command."""
    wants = [f"  {want}:\n" + "\n".join(f"    {line}" for line in lines) for want, lines in USES.items()]
    known = [
        textwrap.fill(f"  {name:<11}{command.about}", 80, subsequent_indent=" " * 13)
        for name, command in COMMANDS.items()
    ]
    return "\n\n".join(
        (
            "what do you want to do?\n" + "\n".join(wants),
            "commands:\n" + "\n".join(known),
            "Each command explains itself: pareback COMMAND --help.",
        )
    )


def _complain(error: BaseException, everywhere: bool) -> None:
    """Say what is wrong; of several processes with the same input, the first one does."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not everywhere:
        return
    where = f" (process {rank})" if rank != "0" else ""
    print(f"pareback: error{where}: {told(error)}", file=sys.stderr)
    if not isinstance(error, FORESEEN):
        print("Set PAREBACK_TRACEBACK=1 to see where it came from.", file=sys.stderr)
