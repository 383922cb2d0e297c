"""Error messages that say what to write instead."""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import PurePath
from typing import ParamSpec, TypeVar

from .errors import InvalidType, InvalidValue, UserError

#: How much of two words is the same where one is taken for a slip of the other: of "lerning" and "learning" 0.93.
_ALIKE = 0.7

P = ParamSpec("P")
R = TypeVar("R")


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Join names for a message, the first few quoted and the rest counted.

    >>> listed(["a", "b"])
    "'a', 'b'"
    >>> listed("abcdefg", limit=2)
    "'a', 'b' and 5 more"
    """
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def excluding(names: Sequence[str], limit: int = 3) -> str:
    """Return the option that leaves parameters out.

    >>> excluding(["a", "b"]), excluding("abcdefg")
    ("exclude=['a', 'b']", "exclude=['a', 'b', 'c', ...]")
    """
    more = ", ..." if len(names) > limit else ""
    return f"exclude=[{', '.join(repr(name) for name in names[:limit])}{more}]"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a count with its noun, whose plural is given where an s does not make it.

    >>> counted(1, "layer"), counted(1200, "run"), counted(2, "entry", "entries")
    ('1 layer', '1,200 runs', '2 entries')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def figure(value: Fraction | int) -> str:
    """Write a count for a reader.

    >>> figure(Fraction(1234567))
    '1,234,567'
    """
    return f"{math.ceil(value):,}"


def place(path: PurePath) -> str:
    """Return a path for the end of a sentence, quoted where its own full stop would meet the sentence's.

    >>> place(PurePath("runs")), place(PurePath("."))
    ('runs', "'.'")
    """
    return repr(str(path)) if str(path).endswith(".") else str(path)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean …?" for the nearest known word, or nothing.

    >>> did_you_mean("sparsty", ["sparsity", "params"])
    " Did you mean 'sparsity'?"
    """
    near = nearest_word(word, known)
    return f" Did you mean {near!r}?" if near else ""


def nearest_word(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like another one, or nothing if none is: a wrong hint is worse than none.

    Like is what a slip of the fingers makes of it, and what begins or ends with it.

    >>> nearest_word("sparsty", ["sparsity", "params"]), nearest_word("size", ["seed", "batch_size"])
    ('sparsity', 'batch_size')
    >>> nearest_word("loss", ["flops"]), nearest_word("freeze", ["force"])
    ('', '')
    """
    known = list(known)
    parts = [name for name in known if len(word) > 2 and word in (name[: len(word)], *re.split("[_.-]", name))]
    return next(iter([*difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE), *parts]), "")


def one_of(option: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    choices = list(choices)
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise InvalidValue(f"{option}={value!r} is not known. Write one of {listed(choices, 9)}.{hint}")


def suggests_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a misspelt keyword is answered with the right one."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known) or f" It takes {listed(known, 20)}."
                called = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                raise InvalidType(f"{called} has no option {name!r}.{hint}")
        return function(*args, **kwargs)

    return checked


#: How torch and Python say that there is no memory, where the type of the error does not.
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "can't start new thread")


def lacks_memory(error: BaseException) -> bool:
    """Whether an error comes of too little memory, or of a limit on it.

    >>> lacks_memory(MemoryError()), lacks_memory(RuntimeError("[...] DefaultCPUAllocator: can't allocate memory: ..."))
    (True, True)
    >>> lacks_memory(ValueError("out of memory"))
    False
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in _NO_MEMORY)


#: Their messages are sentences for a user. Any other error was not foreseen, and only its type says what it means.
FORESEEN = (UserError, OSError, FloatingPointError)


def told(error: BaseException) -> str:
    """Return an error's message, with its type in front if it was not foreseen.

    >>> told(OSError("The disk is full.")), told(ValueError("math domain error")), told(MemoryError())
    ('The disk is full.', 'ValueError: math domain error', 'MemoryError')
    """
    said, kind = str(error).strip(), type(error).__name__
    if not said:
        return kind
    return said if isinstance(error, FORESEEN) else f"{kind}: {said}"
