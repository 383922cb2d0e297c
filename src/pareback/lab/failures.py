"""Which errors are told by their message alone."""

from __future__ import annotations

from ..errors import UserError

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
