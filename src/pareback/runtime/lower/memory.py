"""Memory of a program: places for activations that are needed at the same time, and arenas that calls share in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

_GRAIN = 16  #: floats in 64 bytes


def aligned(tensor: Tensor) -> Tensor:
    """Return a copy that starts at a multiple of 64 bytes."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if copy.data_ptr() % 64 == 0:  # as PyTorch's allocator has it; sanitizers then see where it ends
        return copy
    size = tensor.element_size()
    room = torch.empty(tensor.numel() + 64 // size, dtype=tensor.dtype)
    skip = -(room.data_ptr() // size) % (64 // size)
    place = room[skip : skip + tensor.numel()].view(tensor.shape)
    return place.copy_(tensor)


class ArenaPlanner:
    """Hands out parts of an arena; what is given back is used again.

    >>> places = ArenaPlanner()
    >>> places.take("a", 100), places.take("b", 16)
    (0, 112)
    >>> places.give_back("a")
    >>> places.take("c", 32), places.most
    (0, 128)
    """

    def __init__(self) -> None:
        self.most = 0
        self._taken: dict[str, tuple[int, int]] = {}

    def take(self, name: str, floats: int) -> int:
        """Return the start of a part of this size: the first gap that is large enough."""
        size = -(-floats // _GRAIN) * _GRAIN
        start = 0
        for begin, length in sorted(self._taken.values()):
            if begin - start >= size:
                break
            start = max(start, begin + length)
        self._taken[name] = (start, size)
        self.most = max(self.most, start + size)
        return start

    def of(self, name: str) -> int:
        """Return where a part starts."""
        return self._taken[name][0]

    def hand_on(self, name: str, to: str) -> int:
        """Let another value have a part, in the place of the one that was there; return where it starts."""
        self._taken[to] = self._taken.pop(name)
        return self._taken[to][0]

    def share(self, name: str, to: str) -> int:
        """Let another value have the same part as well, until both have given it back; return where it starts."""
        self._taken[to] = self._taken[name]
        return self._taken[to][0]

    def give_back(self, name: str) -> None:
        """Let a part be used for something else."""
        del self._taken[name]


class ArenaPool:
    """Arenas of one size; as many as calls are under way at once."""

    def __init__(self, floats: int) -> None:
        self._floats = floats
        self._idle: list[Tensor] = []  # a list's pop and append need no lock

    @contextmanager
    def arenas(self, number: int) -> Iterator[list[int]]:
        """Lend the addresses of several, one for each thread that works on its own."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.arena()) for _ in range(number)]

    def arena(self) -> _LentArena:
        """Lend the address of an arena that nobody else uses."""
        return _LentArena(self._floats, self._idle)


class _LentArena:
    """One that is lent. No generator: a small model's call takes no longer than a few of those."""

    __slots__ = ("_floats", "_idle", "_mine")

    def __init__(self, floats: int, idle: list[Tensor]) -> None:
        self._floats, self._idle = floats, idle

    def __enter__(self) -> int:
        try:
            self._mine = self._idle.pop()
        except IndexError:
            self._mine = aligned(torch.zeros(self._floats, dtype=torch.float32, device="cpu"))
        return self._mine.data_ptr()

    def __exit__(self, *_: object) -> None:
        self._idle.append(self._mine)
