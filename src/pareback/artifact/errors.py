"""The one exception that a file can cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InvalidValue


class BadFile(InvalidValue):
    """A file that is damaged, incomplete, or not of the kind it should be."""


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Name the file in whatever is found wrong with it.

    >>> with blaming(Path("a.pare")):
    ...     raise BadFile("it is empty")
    Traceback (most recent call last):
        ...
    pareback.artifact.errors.BadFile: 'a.pare' cannot be read: it is empty.
    """
    try:
        yield
    except BadFile as error:
        raise BadFile(f"{str(path)!r} cannot be read: {error}.") from error.__cause__
