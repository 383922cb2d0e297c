"""Writing a run's files: nobody else writes into its folder, so that a killed run leaves one temporary file at most."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from .. import files
from ..errors import DiskFullError
from ..files import noticing_full_disk, plain

__all__ = ["DiskFullError", "noticing_full_disk", "plain", "write", "write_json", "write_text"]


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a file, as :func:`pareback.files.write` does."""
    files.write(path, fill, alone=True)


def write_text(path: Path, text: str) -> None:
    """Write text, as :func:`write` does; what UTF-8 cannot hold is escaped as JSON does it."""
    write(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, content: Any) -> None:
    """Write JSON, as :func:`write` does; numbers that are not finite become null."""
    write_text(path, json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n")
