"""One process at a time in a folder."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from ..errors import InvalidUse

try:
    import fcntl
except ModuleNotFoundError:  # Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

#: Seconds to wait for a lock whose process is gone: those that read images for a killed one share its lock until they
#: notice.
_PATIENCE = 20.0


class FolderLock:
    """A lock on a folder, made if need be. It is the system's, so that a killed process leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ".lock"
        self._handle: int | None = None

    def take(self) -> None:
        """Lock the folder, or raise InvalidUse if a process that lives has."""
        until = time.monotonic() + _PATIENCE
        while self._handle is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # another process has just given the folder up
                continue
            try:
                locked = self._locks(handle, until)
            except BaseException:
                os.close(handle)
                raise
            if locked:
                self._handle = handle
            else:
                os.close(handle)

    def hold(self) -> None:
        """Make sure that the lock is still this process's: somebody may have deleted its file.

        Where nobody has come since, it is taken again; otherwise InvalidUse is raised, before two write at once.
        """
        if self._handle is None or self._is_in_place(self._handle):
            return
        self.release()
        try:
            self.take()
        except InvalidUse as error:
            raise InvalidUse(
                f"The lock of {str(self.file.parent)!r} was deleted, and another process trains there now. This one "
                "stopped, and leaves the run to the other."
            ) from error

    def release(self) -> None:
        """Let others in; without a lock, do nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _is_in_place(self, handle: int) -> bool:
        """Whether an open file is the one in the folder."""
        try:
            return os.path.samestat(os.fstat(handle), self.file.stat())
        except FileNotFoundError:
            return False

    def _warn(self, error: OSError) -> None:
        """Say that nobody is kept out: refusing would leave the users of such a file system without any run."""
        print(
            f"The file system of {str(self.file.parent)!r} has no locks ({error.strerror}): a second process in that "
            "folder would not be noticed. Start no other run there.",
            file=sys.stderr,
        )

    def _locks(self, handle: int, until: float) -> bool:
        """Try to lock an open file; whether it is locked and still the one in the folder."""
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                self._warn(error)
                return True
            holder = os.read(handle, 20).decode(errors="replace")
            if holder.isdecimal() and not _lives(int(holder)) and time.monotonic() < until:
                time.sleep(0.1)
                return False
            raise InvalidUse(
                f"Another process ({holder or 'just started'}) is training in {str(self.file.parent)!r}. Wait for it, "
                "or give another --out."
            ) from None
        if not self._is_in_place(handle):
            return False  # it was removed between opening and locking
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        return True


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
