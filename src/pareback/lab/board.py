"""Metrics in TensorBoard's format, where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .optional import optional


class Board:
    """Writes each epoch's numbers to ``path``, or nowhere if that is None."""

    def __init__(self, path: Path | None, epochs: int = 0) -> None:
        self._writer: Any = None
        if path is not None:
            optional("tensorboard")
            # What a run that was killed wrote after its checkpoint comes again.
            self._writer = optional("torch.utils.tensorboard").SummaryWriter(str(path), purge_step=epochs + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Write one epoch's metrics."""
        if self._writer is not None:
            for name, value in row.items():
                if name != "epoch" and value is not None:
                    self._writer.add_scalar(name, value, row["epoch"])

    def close(self) -> None:
        """Bring everything to the disk."""
        if self._writer is not None:
            self._writer.close()
