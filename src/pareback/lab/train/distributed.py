"""The processes of one training: alone, or as many as torchrun started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import InvalidUse, InvalidValue, UserError

T = TypeVar("T")

#: Seconds in which a thread that has nothing else to do gets its turn, on a busy machine too.
_MOMENT = 0.2


@dataclass(frozen=True)
class Team:
    """This process's place among those that train together. Alone, every method does nothing."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model so that gradients are averaged over the processes."""
        if self.world == 1:
            return model
        on_gpu = self.device.type == "cuda"
        return DistributedDataParallel(model, device_ids=[self.device] if on_gpu else None)

    def share(self, value: T) -> T:
        """Return the first process's value."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every process's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def add(self, sums: Tensor) -> None:
        """Add up every process's tensor, in place."""
        if self.world > 1:
            dist.all_reduce(sums)

    def lowest(self, value: int) -> int:
        """Return the smallest of every process's numbers."""
        return min(self.gather(value))

    def align(self, model: nn.Module) -> None:
        """Give every process the first one's buffers: each has averaged its own images' statistics."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


@contextmanager
def team(device: str) -> Iterator[Team]:
    """Join the processes that torchrun started, or train alone, on the device that the recipe names."""
    world = _place("WORLD_SIZE", "1")
    if world == 1:
        yield Team(_device(device))
        return
    if device.startswith("cuda:"):
        raise InvalidValue(
            f"train.device={device!r} is one GPU for {world} processes. Write train.device=cuda or auto."
        )
    rank, here = _place("RANK"), _place("LOCAL_RANK", "0")
    chosen = _device(device)
    if chosen.type == "cuda":
        if here >= torch.cuda.device_count():
            raise InvalidUse(
                f"Process {here} of this machine has no GPU: there are {torch.cuda.device_count()}. Start as many "
                "processes as there are GPUs, or write train.device=cpu."
            )
        chosen = torch.device("cuda", here)
        torch.cuda.set_device(chosen)
    joined = not dist.is_initialized()
    if joined:
        _join(chosen)
    try:
        yield Team(chosen, rank, world)
    finally:
        if joined:
            _let_go()
            dist.destroy_process_group()


def _let_go() -> None:
    """Wait for gloo's threads to let go of the tensors that were exchanged last.

    They need Python for that, and outlive the group where a model was wrapped: one that comes too late aborts a process
    whose training is over and written, with torch 2.15 every twelfth time.
    """
    if dist.get_backend() == "gloo":
        time.sleep(_MOMENT)


def _place(name: str, usual: str = "") -> int:
    """Read one of the numbers by which torchrun tells processes from each other."""
    text = os.environ.get(name, usual)
    if not text.isdecimal():
        raise InvalidValue(
            f"{name}={text!r} is no whole number. Start the processes with torchrun, or unset WORLD_SIZE."
        )
    return int(text)


def patience() -> float:
    """Return for how many seconds a process waits for another one; the variable PAREBACK_PATIENCE says it.

    Ten minutes by default: one may read its first images, or compile, much longer than the others.
    """
    text = os.environ.get("PAREBACK_PATIENCE", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e7:
        raise InvalidValue(f"PAREBACK_PATIENCE={text!r} is no number of seconds. Write PAREBACK_PATIENCE=600.")
    return seconds


#: How torch says that another process is gone, or has not answered in time.
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out",
    "timeout",
    "broken pipe",
    "remote process",
)


def lost_another(error: BaseException) -> bool:
    """Whether an error comes of another process of the training that is gone, or does not answer."""
    if not dist.is_available() or isinstance(error, UserError):
        return False
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in said for words in _LOST)
    )


def _join(device: torch.device) -> None:
    allowed = timedelta(seconds=patience())
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=allowed)
        else:
            dist.init_process_group("gloo", timeout=allowed)
    except ValueError as error:  # where to meet is not said, or not possible
        raise InvalidValue(f"The processes cannot meet ({error}). Start them with torchrun.") from error


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidValue(f"train.device={name!r}, but torch sees no GPU. Write train.device=cpu or auto.")
    index = int(name.removeprefix("cuda:")) if name.startswith("cuda:") else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise InvalidValue(f"train.device={name!r}, but torch sees {torch.cuda.device_count()} GPUs, counted from 0.")
    return torch.device("cuda", index)
