"""Edits: what others do to pruned weights between two steps of their optimizer, and how it is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..sharding import versions


class Keeper(Protocol):
    """Where pruned weights are, and how their latent ones follow an edit of survivors alone."""

    def keep_values(self, members: Sequence[int], thresholds: Tensor) -> Tensor | None: ...


class Edits:
    """Remembers the tensors of each optimizer (``part`` is its number) as they were left, by their version counters.

    An assignment to ``.data`` leaves no trace there. So that decay or clip loops written that way are found, too, all
    tensors are looked at in a few steps, ever more rarely, and in every step once there was something in two of them
    in a row. What is done in some steps only is not found.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._parts: Sequence[Sequence[int]] = []
        self._left: dict[int, list[int]] = {}  # per optimizer: the versions of its tensors as they were left
        self._before: set[int] = set()  # what was written to before that, or may have been
        self._suspected: set[int] = set()  # the optimizers whose weights are edited without a trace, by the last look
        self._unseen = False  # whether that is certain
        self._answer: _Answer | None = None
        self.divide(parts)

    def divide(self, parts: Sequence[Sequence[int]]) -> None:
        """Take over how tensors are divided among optimizers."""
        self._before.update(self.all())
        self._parts = parts
        self._tensors = [[self._parameters[i] for i in members] for members in parts]
        self._steps = [0] * len(parts)
        self.look()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_left": {}, "_before": {*self.all()}, "_answer": None}  # a copy has tensors of its own

    def look(self) -> None:
        """Take note of the versions of all weights. Edits of before stay to be looked at."""
        self._left = {part: self._versions(part) for part in range(len(self._parts))}

    def suspect_all(self) -> None:
        """Look at all weights before the next step: those that were loaded may have been edited before they were saved.

        Weights that are what this pruner would have written are left alone by that.
        """
        self._before = {i for members in self._parts for i in members}
        self.look()

    def note(self, part: int) -> None:
        """Remember one optimizer's weights as they are: what others do to them from now on is an edit."""
        if self._before:
            self._before.difference_update(self._parts[part])
        self._left[part] = self._versions(part)

    def note_all(self) -> None:
        """Remember all weights as they are."""
        for part in range(len(self._parts)):
            self.note(part)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the weights for other reasons than a step. Edits of before stay to be looked at."""
        self._before.update(self.all())
        try:
            yield
        finally:
            self.look()

    def all(self) -> list[int]:
        """Return the numbers of all tensors that others have written to in place."""
        return sorted({i for part in range(len(self._parts)) for i in self.of(part)})

    def of(self, part: int) -> list[int]:
        """Return those of one optimizer."""
        members, left, now = self._parts[part], self._left.get(part), self._versions(part)
        found = {*self._before.intersection(members)} if self._before else set()
        if left is not None and left != now:
            found.update(i for i, before, after in zip(members, left, now, strict=True) if before != after)
        return sorted(found)

    def _versions(self, part: int) -> list[int]:
        return versions(self._tensors[part])

    def keep(self, part: int, keeper: Keeper, thresholds: Tensor) -> None:
        """Let survivors that were edited shrink to what they were given; what else was done is adopted as it is."""
        members = self._parts[part] if self._unseen else self.of(part)
        if members:
            keeper.keep_values(members, thresholds)

    def keep_before_step(self, part: int, keeper: Keeper, thresholds: Tensor, may_look: bool) -> None:
        """Do so before a step, and find out now and then whether there are edits that leave no trace."""
        self._steps[part] += 1
        steps = self._steps[part]
        if self._answer is not None and not torch.cuda.is_current_stream_capturing():  # asking would break a capture
            self._hear()
        due = part in self._suspected or (steps > 1 and steps & (steps - 1) == 0)
        if not due or self._unseen or self.of(part) or not (may_look or _may_ask(thresholds)):
            self.keep(part, keeper, thresholds)
            return
        kept = keeper.keep_values(self._parts[part], thresholds)
        if kept is not None:
            self._answer = _Answer(part, kept)
            if not kept.is_cuda:
                self._hear()

    def _hear(self) -> None:
        assert self._answer is not None
        part, found = self._answer.part, self._answer.get()
        again = part in self._suspected
        self._answer = None
        self._suspected.discard(part)
        if found:
            self._suspected.add(part)
        if found and again and not self._unseen:
            self._unseen = True
            warnings.warn(
                "Pruned weights are changed between steps through .data, which leaves no trace. They are looked "
                "through in every step from now on, which takes time. Change them in place under torch.no_grad() "
                "instead, as in weight.mul_(0.999).",
                stacklevel=2,
            )


def _may_ask(tensor: Tensor) -> bool:
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


class _Answer:
    """One truth value on its way from a device, asked for in one step and read in the next.

    Reading it may wait for the end of that step, a dozen times in a training. Read whenever it happens to be there, it
    would come earlier in one process than in the other, and copies of a model drift apart.
    """

    def __init__(self, part: int, value: Tensor) -> None:
        self.part, self._value = part, value  #: of which optimizer
        self._event = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> bool:
        """Return it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)
