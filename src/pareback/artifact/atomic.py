"""Writing so that a reader sees the old file or the new one and never a part of one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InvalidValue, MissingFile


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; what is written there takes its place unless something is raised."""
    path = Path(os.path.realpath(path))  # a link stays one
    if path.is_dir():
        raise InvalidValue(f"{str(path)!r} is a folder. Give the name of a file.")
    if not path.parent.is_dir():
        raise MissingFile(f"There is no folder {str(path.parent)!r}. Make it first.")
    temporary = path.with_name(f".pareback-{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # the rename; folders cannot be opened on Windows
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
