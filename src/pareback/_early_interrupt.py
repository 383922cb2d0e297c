"""The command before torch is imported: Ctrl-C is a word, too little memory a sentence, and --help does not wait.

The package imports this first, because whatever starts the command imports the package before anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import PurePath
from types import FrameType, TracebackType

_WITH_VALUE = ("-X", "-W")
#: What the linker and the system say where a library does not fit into memory.
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "cannot enlarge memory")


def guard() -> None:
    """Let Ctrl-C end the process quietly until :func:`release`, if the process is the command."""
    if not is_command(sys.orig_argv) or os.environ.get("PAREBACK_TRACEBACK") == "1":
        return
    if threading.current_thread() is not threading.main_thread():
        return
    sys.excepthook = _told
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def release() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if sys.excepthook is _told:
        sys.excepthook = sys.__excepthook__
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_for_help(argv: Sequence[str]) -> bool:
    """Whether the command was only asked to explain itself, for which torch need not be imported.

    >>> is_for_help(["python", "/venv/bin/pareback", "train", "--help"]), is_for_help(["python", "-m", "pareback"])
    (True, False)
    """
    return is_command(argv) and not {"--help", "-h", "--version"}.isdisjoint(argv)


def is_command(argv: Sequence[str]) -> bool:
    """Whether the interpreter was started for the command, and not for a program that imports the package.

    >>> is_command(["python", "-m", "pareback", "train"]), is_command(["python", "/venv/bin/pareback", "runs"])
    (True, True)
    >>> is_command(["python", "train.py", "-m", "pareback"]), is_command(["python", "-c", "import pareback"])
    (False, False)
    """
    words = iter(argv[1:])
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word == "-m":
            return next(words, "") == "pareback"
        elif word == "-c" or not word.startswith("-"):
            return word != "-c" and PurePath(word).name in ("pareback", "pareback.exe")
    return False


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in a sentence that torch cannot be loaded for want of memory; the linker's words are no help."""
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_ROOM):
        sentence = "There is not enough memory to load PyTorch. Free some, or raise the limit (ulimit -v)."
        print(f"pareback: error: {sentence}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing has been opened yet. An exception might be caught and lost by one of the packages under way.
    os.write(2, b"\nInterrupted.\n")
    os._exit(128 + number)


guard()
