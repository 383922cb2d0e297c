"""Files: one way to write them, so that a reader, or the next start, sees the old file or the new one and no part of
one; and paths as a user writes them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import DiskFullError, FileSizeError, InvalidValue, MissingFile, NotPermitted, UserError

#: Fewer free bytes than this explain a failure that does not say its reason.
_SCARCE = 1 << 20

#: How an error says that there is no room, and that writing is not allowed.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def replacing(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; what is written there takes its place unless something is raised.

    It is brought to the disk before it is renamed, and the rename after it. A link stays one, and what it points to is
    replaced. Several may do so at once, as each has a temporary name of its own, and the last one's file stays. Who is
    ``alone`` writes to the file's name and ".tmp": however often it is killed meanwhile, no more than that is left.
    """
    given, path = path, Path(os.path.realpath(path))
    temporary = path.parent / (f"{path.name}.tmp" if alone else f".pareback-{uuid.uuid4().hex[:12]}.tmp")
    with noticing_full_disk(given), _noticing_no_permission(given, path, path.parent, temporary):
        if path.is_dir():
            raise InvalidValue(f"{str(path)!r} is a folder. Give the name of a file.")
        if not path.parent.is_dir():
            raise MissingFile(f"There is no folder {str(path.parent)!r}. Make it first.")
        try:
            yield temporary
            _sync(temporary, os.O_RDWR)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


@contextmanager
def noticing_full_disk(path: Path) -> Iterator[None]:
    """Raise :class:`DiskFullError` where writing to ``path`` fails for want of room."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = None if isinstance(error, UserError) else _code_of_full_disk(error, path)
        if code is None:
            raise
        if code == errno.EFBIG:
            raise FileSizeError(f"{str(path)!r} could not be written: files may not become so large here.") from error
        raise DiskFullError(f"The disk is full: {str(path)!r} could not be written.") from error


def write(path: Path, fill: Callable[[IO[bytes]], object], *, alone: bool = False) -> None:
    """Let ``fill`` write a file, as :func:`replacing` does."""
    with replacing(path, alone=alone) as temporary, open(temporary, "wb") as file:
        fill(file)


def write_text(path: Path, text: str, *, alone: bool = False) -> None:
    """Write text, as :func:`write` does; what UTF-8 cannot hold is escaped as JSON does it."""
    write(path, lambda file: file.write(text.encode(errors="backslashreplace")), alone=alone)


def write_json(path: Path, content: Any, *, alone: bool = False) -> None:
    """Write JSON, as :func:`write` does; numbers that are not finite become null."""
    write_text(path, json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n", alone=alone)


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


def digest(path: Path, size: int = 16) -> str:
    """Return the hash of a file's content, BLAKE2b of so many bytes, in hexadecimal digits."""
    content = hashlib.blake2b(digest_size=size)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()


def expanded(path: str | Path) -> Path:
    """Return a path with ``~`` read as a home folder. Where nobody has that home it stays, and is then not found.

    >>> expanded("~no-such-user/a.npz").name
    'a.npz'
    """
    return Path(os.path.expanduser(path))  # pathlib's own raises a RuntimeError that says nothing of the path


@contextmanager
def _noticing_no_permission(path: Path, *written: Path) -> Iterator[None]:
    """Raise :class:`NotPermitted` where ``path`` cannot be written because one of the files ``written`` for it cannot.

    An error about any other file stays: a model that is exported may read some meanwhile.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FORBIDDEN or str(error.filename) not in map(str, written):
            raise
        raise NotPermitted(f"There is no permission to write {str(path)!r}. Give another place.") from error


def _code_of_full_disk(error: BaseException, path: Path) -> int | None:
    """Return how an error, or what it came of, says a want of room; torch.save does not always say what it came of."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    scarce = isinstance(error, RuntimeError) and shutil.disk_usage(path.absolute().parent).free < _SCARCE
    return errno.ENOSPC if scarce else None


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    """Bring a rename to the disk, where folders can be opened (not on Windows) and the system has that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
