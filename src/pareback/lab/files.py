"""Writing so that a reader, or the next start, sees the old file or the new one and never a part of one."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import UserError

#: Fewer free bytes than this explain a failure that does not say its reason.
_SCARCE = 1 << 20


class DiskFullError(UserError, OSError):
    """A file for which there was no room. Its message names the file."""


@contextmanager
def noticing_full_disk(path: Path) -> Iterator[None]:
    """Raise :class:`DiskFullError` where writing to ``path`` fails for want of room."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, DiskFullError) or not _is_of_full_disk(error, path.parent):
            raise
        raise DiskFullError(f"The disk is full: {str(path)!r} could not be written.") from error


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a file under a temporary name, bring it to the disk, and rename it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with noticing_full_disk(path):
            with open(temporary, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write text, as :func:`write` does; what UTF-8 cannot hold is escaped as JSON does it."""
    write(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, content: Any) -> None:
    """Write JSON, as :func:`write` does; numbers that are not finite become null."""
    write_text(path, json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """Return what JSON can hold: null for numbers that are not finite.

    >>> plain({"loss": float("nan"), "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3]}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_of_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether an error, or what it came of, is a want of room; torch.save does not always say what it came of."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < _SCARCE


def _sync_folder(path: Path) -> None:
    """Bring a rename to the disk, where folders can be opened (not on Windows)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
