"""Checkpoints: copied off the device at once, written in the background, renamed into place when complete."""

from __future__ import annotations

import _thread
import os
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .. import files
from ..artifact.weights import pruned_weights
from ..errors import DiskFullError, InvalidUse, LittleMemory
from ..messages import lacks_memory

#: 1: every weight of the model. 2: not those that follow from latent weights and thresholds.
VERSION = 2
#: Seconds in which a thread has begun, on the busiest machine.
_PATIENCE = 60.0


class Checkpoints:
    """Writes a run's checkpoints to one path, each over the one before.

    A write goes on while the training does and is complete before the next one begins, or when :meth:`close` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffers: dict[str, Tensor] = {}
        self._writer: _Writer | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Begin to write a state as it is now; the training may change its tensors afterwards."""
        self.wait()
        copied = self._copied({"version": VERSION, **state}, "")
        done = None
        if self._buffers:  # something came from a GPU, and is still under way
            done = torch.cuda.Event()
            done.record()
        self._writer = _Writer(lambda: self._write(copied, done))

    def wait(self) -> None:
        """Return when nothing is being written; raise what went wrong meanwhile."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.wait()
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, DiskFullError) or lacks_memory(error):  # which have a sentence of their own
                raise error
            raise InvalidUse(f"The checkpoint {str(self.path)!r} could not be written: {error}.") from error

    def _write(self, state: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            files.write(self.path, lambda file: self._fill(file, state), alone=True)
        except Exception as error:
            self._error = error

    def _fill(self, file: IO[bytes], state: dict[str, Any]) -> None:
        torch.save(state, file)
        keep_previous(self.path)  # not before: until the new one is written both generations are needed

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


class _Writer:
    """A thread that does one thing. Where memory is too scarce for it to begin, waiting for it says so.

    Python's own Thread.start() would wait for ever for a thread that died before its first line.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._begun, self._done = work, threading.Event(), threading.Event()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._begun.set()
            self._work()
        finally:
            self._done.set()

    def wait(self) -> None:
        """Return when it is done."""
        if not self._begun.wait(_PATIENCE):
            raise LittleMemory("There was not enough memory to begin to write a checkpoint.")
        self._done.wait()


def previous_of(path: Path) -> Path:
    """Return where the checkpoint before the last one is kept.

    >>> previous_of(Path("checkpoint.pt")).name
    'checkpoint.previous.pt'
    """
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keep the checkpoint that is there under its other name, too, before a new one takes its place."""
    previous = previous_of(path)
    if not path.exists():
        return
    fresh = previous.with_name(f"{previous.name}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        os.link(path, fresh)  # the same file, for no time and no room
    except OSError:  # a file system without such links
        shutil.copyfile(path, fresh)
    os.replace(fresh, previous)  # at once: whoever is killed here leaves one under either name


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; where it is damaged, the one before it, and say so."""
    try:
        return _read(path)
    except DamagedCheckpoint as error:
        previous = previous_of(path)
        if not previous.exists():
            raise
        state = _read(previous)
        if os.environ.get("RANK", "0") == "0":
            print(f"{error} Going on from {str(previous)!r}, the one before it.", file=sys.stderr)
        return state


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights in a checkpoint that was read, by name; those that it leaves out follow from latent ones."""
    parts = state["parts"]
    derived = parts.get("derived") or {"names": {}}  # none where a release before this one saved everything
    return {**(pruned_weights(derived, parts["pruner"]) if derived["names"] else {}), **parts["model"]}


class DamagedCheckpoint(InvalidUse):
    """A checkpoint that is not what was written."""


def _read(path: Path) -> dict[str, Any]:
    try:
        damaged = _damaged_part(path)
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except Exception as error:
        raise DamagedCheckpoint(
            f"The checkpoint {str(path)!r} cannot be read. Delete it to let --resume begin anew."
        ) from error
    if damaged is not None:
        raise DamagedCheckpoint(
            f"The checkpoint {str(path)!r} is damaged: {damaged} is not what was written. Delete it to let --resume "
            "begin anew."
        )
    if not isinstance(state, dict) or state.get("version") not in (1, VERSION):
        raise InvalidUse(f"{str(path)!r} is not a checkpoint of this release. Begin anew with --force.")
    lost = _not_finite(state)
    if lost:
        raise DamagedCheckpoint(
            f"The checkpoint {str(path)!r} is damaged: {lost!r} holds NaN or infinity, which is never saved. Delete it "
            "to let --resume begin anew."
        )
    return state


def _not_finite(state: dict[str, Any]) -> str:
    """Name the first weight that is not finite; nothing if all are. Memory may go bad before a checksum is made."""
    parts = state.get("parts") or {}
    weights = {**parts.get("model", {}), **(parts.get("pruner") or {}).get("latents", {})}
    floats = {name: value for name, value in weights.items() if value.is_floating_point()}
    return next((name for name, value in floats.items() if not value.isfinite().all()), "")


def _damaged_part(path: Path) -> str | None:
    """Return the first part of a file whose checksum is wrong. torch writes them and does not look at them."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()
