"""Writing so that a reader, or the next start, sees the old file or the new one and never a part of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a file under a temporary name, bring it to the disk, and rename it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write text, as :func:`write` does."""
    write(path, lambda file: file.write(text.encode()))


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
