"""Paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path with ``~`` read as a home folder. Where nobody has that home it stays, and is then not found.

    >>> expanded("~no-such-user/a.npz").name
    'a.npz'
    """
    return Path(os.path.expanduser(path))  # pathlib's own raises a RuntimeError that says nothing of the path
