"""Checkpoints: copied off the device at once, written in the background, renamed into place when complete."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidUse
from . import files

VERSION = 1


class Checkpoints:
    """Writes a run's checkpoints to one path, each over the one before.

    A write goes on while the training does and is complete before the next one begins, or when :meth:`close` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffers: dict[str, Tensor] = {}
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Begin to write a state as it is now; the training may change its tensors afterwards."""
        self.wait()
        copied = self._copied({"version": VERSION, **state}, "")
        done = None
        if self._buffers:  # something came from a GPU, and is still under way
            done = torch.cuda.Event()
            done.record()
        self._writer = threading.Thread(target=self._write, args=(copied, done), name="checkpoint", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong meanwhile."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, files.DiskFullError):
                raise error
            raise InvalidUse(f"The checkpoint {str(self.path)!r} could not be written: {error}.") from error

    def _write(self, state: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            files.write(self.path, lambda file: torch.save(state, file))
        except Exception as error:
            self._error = error

    def _copied(self, value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            return self._copied_tensor(value.detach(), place)
        if isinstance(value, dict):
            return {key: self._copied(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copied(item, f"{place}/{i}") for i, item in enumerate(value))
        return value

    def _copied_tensor(self, value: Tensor, place: str) -> Tensor:
        if value.device.type == "cpu":
            return value.clone()
        # Page-locked memory, kept for the next time: the copy runs at the bus's speed and the host need not wait.
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != value.shape or buffer.stride() != value.stride():
            buffer = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, pin_memory=True)
            self._buffers[place] = buffer
        return buffer.copy_(value, non_blocking=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidUse(
            f"The checkpoint {str(path)!r} cannot be read. Delete it to let --resume begin anew."
        ) from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise InvalidUse(f"{str(path)!r} is not a checkpoint of this release. Begin anew with --force.")
    return state
