"""Edits: what others do to pruned weights between two steps, how it is noticed and what is made of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..kernels import shrunk
from ..sharding import is_sharded, versions, versions_of_shards
from ..shrink import compute_dtype, unshrink

#: Of edited weights, or of all zeros, so many may have been zeros where nothing but survivors was meant.
_FILLED = 0.1
#: Weights are other ones altogether if more than this share of those that were or are not zero has changed.
_REPLACED = 0.5
#: A move of weights is at most this share of their own size: more gives them other values. Zeros are filled by a move
#: where what they got is at most this share of how far it is from the latent weights behind them.
_MOVE = 0.25
#: So many weights are looked at together on a CPU, whose caches hold them, and elsewhere: small tensors at once, as
#: calling operators takes its time, and large ones in pieces, as a dozen copies of them might not fit into memory.
_TOGETHER, _ELSEWHERE = 2**18, 2**22
#: Edits that leave no trace are looked for once in so many steps at least, and are no accident after so many finds.
_RARELY, _CERTAIN = 512, 3


class Keeper(Protocol):
    """Where pruned weights are, and how their latent ones follow an edit of survivors alone, or a move of all."""

    def keep_values(self, members: Sequence[int], thresholds: Tensor) -> Tensor | None: ...


class Edits:
    """Remembers the tensors of each optimizer (``part`` is its number) as they were left, by their version counters.

    An assignment to ``.data`` leaves no trace there. So that decay or clip loops written that way are found, too, all
    tensors are looked at in a few steps, ever more rarely, and in every step once there was something in two steps in a
    row, or in three altogether. Up to then what is done so is adopted.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Sequence[Sequence[int]]) -> None:
        self._parameters = parameters
        self._parts: Sequence[Sequence[int]] = []
        self._left: dict[int, list[int]] = {}  # per optimizer: the versions of its tensors as they were left
        self._before: set[int] = set()  # what was written to before that, or may have been
        self._suspected: set[int] = set()  # the optimizers whose weights are edited without a trace, by the last look
        self._found = 0  # how many looks found such edits
        self._unseen = False  # whether that is certain
        self._answer: _Answer | None = None
        self.divide(parts)

    def divide(self, parts: Sequence[Sequence[int]]) -> None:
        """Take over how tensors are divided among optimizers."""
        self._before.update(self.all())
        self._parts = parts
        self._tensors = [[self._parameters[i] for i in members] for members in parts]
        self._sharded = [any(map(is_sharded, tensors)) for tensors in self._tensors]
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
        return versions_of_shards(self._tensors[part]) if self._sharded[part] else versions(self._tensors[part])

    def keep(self, part: int, keeper: Keeper, thresholds: Tensor) -> None:
        """Let survivors that were edited or moved shrink to what they were given; what is behind zeros moves, too.

        What else was done is adopted as it is.
        """
        self._keep(part, self.of(part), keeper, thresholds)

    def _keep(self, part: int, traced: Sequence[int], keeper: Keeper, thresholds: Tensor) -> None:
        members = self._parts[part] if self._unseen else traced
        if members:
            keeper.keep_values(members, thresholds)

    def keep_before_step(self, part: int, keeper: Keeper, thresholds: Tensor, may_look: bool) -> None:
        """Do so before a step, and find out now and then whether there are edits that leave no trace."""
        self._steps[part] += 1
        steps = self._steps[part]
        if self._answer is not None and not torch.cuda.is_current_stream_capturing():  # asking would break a capture
            self._hear()
        due = part in self._suspected or (steps > 1 and (steps & (steps - 1) == 0 or steps % _RARELY == 0))
        traced = self.of(part)
        self._keep(part, traced, keeper, thresholds)
        if not due or self._unseen or not (may_look or _may_ask(thresholds)):
            return
        kept = keeper.keep_values(sorted({*self._parts[part]}.difference(traced)), thresholds)
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
            self._found += 1
            self._suspected.add(part)
        if found and (again or self._found == _CERTAIN) and not self._unseen:
            self._unseen = True
            warnings.warn(
                "Pruned weights are changed between steps through .data, which leaves no trace, and became new latent "
                "weights each time. They are looked through in every step from now on, which takes time. Change them "
                "in place under torch.no_grad() instead, as in weight.mul_(0.999).",
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


# -- what was done, weight by weight ----------------------------------------------------------------------------------


def is_edited(weight: Tensor, latent: Tensor, threshold: Tensor, exponent: float) -> bool:
    """Return whether a tensor is not what its latent weights were pruned to. Waits for the device."""
    one = threshold.reshape(1)
    pieces = _in_pieces(weight, latent)
    return any(not torch.equal(mine, *shrunk([behind], one, exponent)) for mine, behind in pieces)


class Edited:
    """Some tensors as they are, beside the latent weights and the thresholds that made them what they were."""

    def __init__(
        self, weights: Sequence[Tensor], latents: Sequence[Tensor], thresholds: Tensor, exponent: float
    ) -> None:
        self._thresholds, self._exponent = thresholds, exponent
        rows = zip(weights, latents, thresholds.unbind(), strict=True)
        self._pieces = [
            _Piece(i, *piece, threshold)
            for i, (weight, latent, threshold) in enumerate(rows)
            for piece in _in_pieces(weight, latent)
        ]
        self._runs = list(_together(self._pieces))

    def keep_values(self) -> Tensor:
        """Let survivors shrink to the values that they were given, and latent weights behind zeros make a move.

        Returns whether there were any.
        """
        found = torch.zeros((), dtype=torch.bool, device=self._thresholds.device)
        changes, _, survivors, behind = self._judged()
        for change in changes:
            found |= change.keep(survivors.unbind(), behind.unbind()).to(found.device)
            del change  # before the next one is looked at
        return found

    def others(self) -> list[bool]:
        """Return which tensors hold other weights than they were left with, most of them and with zeros filled."""
        _, replaced, _, _ = self._judged()
        return replaced.tolist()

    def _judged(self) -> tuple[Iterator[_Change], Tensor, Tensor, Tensor]:
        """Return what was done, and of each tensor whether it was replaced, and what was meant.

        Survivors were meant where hardly a zero was filled, and where they moved a little from what they were left
        with: by noise, a pull, an average. Latent weights that are loaded are nearer to the present latent ones. What
        is behind zeros was meant to move as well where those were filled with little.
        """
        if not self._pieces:
            nothing = torch.zeros(0, dtype=torch.bool, device=self._thresholds.device)
            return iter(()), nothing, nothing, nothing
        # Several are looked at more than once: they might not fit into memory together.
        only = _Change(self._runs[0], self._exponent) if len(self._runs) == 1 else None
        filled, edits, zeros, weights = self._of_tensors(_Change.counts, 4, only)
        alone = (filled <= _FILLED * torch.minimum(edits, zeros)) & (zeros > 0)
        moved = behind = torch.zeros_like(alone)
        if alone.is_cuda or not bool(alone.all()):  # an answer need not be waited for on a CPU
            away, from_latents, size, fill, fill_from_latents = self._of_tensors(_Change.squares, 5, only)
            moved = (away <= _MOVE**2 * size) & (away <= from_latents)
            behind = moved & ~alone & (fill <= _MOVE**2 * fill_from_latents)
        changes = iter([only]) if only else (_Change(run, self._exponent) for run in self._runs)
        return changes, (edits > _REPLACED * weights) & ~alone & ~behind, alone | moved, behind

    def _of_tensors(
        self, found: Callable[[_Change], Tensor], rows: int, only: _Change | None = None
    ) -> tuple[Tensor, ...]:
        """Add up what is found in the pieces of each tensor, one run after the other.

        What is found of one has its place before the next is looked at: anything small that stays behind among what a
        run leaves free makes an allocator take new memory for every run.
        """
        if only is not None and len(self._pieces) == len(self._thresholds):
            return found(only).unbind()
        of_pieces = torch.zeros(rows, len(self._pieces), dtype=torch.float64, device=self._thresholds.device)
        begin = 0
        for run in self._runs:
            of_pieces[:, begin : begin + len(run)] = found(_Change(run, self._exponent))
            begin += len(run)
        sums: dict[int, Tensor] = {}
        for piece, column in zip(self._pieces, of_pieces.unbind(1), strict=True):
            sums[piece.tensor] = sums[piece.tensor] + column if piece.tensor in sums else column
        return torch.stack([*sums.values()], dim=1).unbind()


@dataclass
class _Piece:
    """A tensor, or a part of a large one."""

    tensor: int  #: which one
    weight: Tensor
    latent: Tensor
    threshold: Tensor

    @property
    def size(self) -> int:
        return self.weight.numel()


def _most(weight: Tensor) -> int:
    return _TOGETHER if weight.device.type == "cpu" else _ELSEWHERE


def _in_pieces(weight: Tensor, latent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if weight.numel() <= _most(weight):
        yield weight, latent
        return
    dim = max(range(weight.ndim), key=lambda d: weight.shape[d])
    rows = max(1, _most(weight) * weight.shape[dim] // weight.numel())
    yield from zip(weight.split(rows, dim), latent.split(rows, dim), strict=True)


def _together(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield neighbours of one kind, few enough to be put together."""
    run: list[_Piece] = []
    for piece in pieces:
        kinds = {(p.weight.device, p.weight.dtype) for p in (*run[:1], piece)}
        if run and (len(kinds) > 1 or sum(p.size for p in run) + piece.size > _most(piece.weight)):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


class _Change:
    """What was done to some pieces, their weights one after the other."""

    def __init__(self, pieces: Sequence[_Piece], exponent: float) -> None:
        self._pieces, self._exponent = pieces, exponent
        self._sizes = [piece.size for piece in pieces]
        self._each = torch.stack([piece.threshold for piece in pieces])
        self._weight, self._latent = _flat([p.weight for p in pieces]), _flat([p.latent for p in pieces])
        self._left = self._written()
        self._edited = (self._weight != self._left) & ~self._weight.isnan()  # NaN differs from itself
        self._zero = self._left == 0

    def counts(self) -> Tensor:
        """Return of each piece: zeros that were filled, edits, zeros, and weights that were or are not zero."""
        either = ~self._zero | (self._weight != 0)
        return self._summed([self._edited & self._zero, self._edited, self._zero, either])

    def squares(self) -> Tensor:
        """Return sums of squares of each piece.

        How far edited survivors are from what they were left with, and from latent weights, and their own size; how
        large filled zeros are, and how far from latent weights.
        """
        filled, survived = self._edited & self._zero, self._edited & ~self._zero
        weight, left, latent = (x.to(compute_dtype(x.dtype)) for x in (self._weight, self._left, self._latent))
        far = [torch.where(survived, x, 0.0) for x in (weight - left, weight - latent, left)]
        far += [torch.where(filled, x, 0.0) for x in (weight, weight - latent)]
        return self._summed([x.square_() for x in far])

    def _summed(self, rows: Sequence[Tensor]) -> Tensor:
        """Add up each row, piece by piece."""
        pieces = torch.stack(list(rows)).split(self._sizes, 1)
        return torch.stack([piece.sum(1).double() for piece in pieces], dim=1)

    def keep(self, survivors: Sequence[Tensor], behind: Sequence[Tensor]) -> Tensor:
        """Let edited survivors of some tensors shrink to their values, and what is behind zeros of some move.

        Returns whether there were any.
        """
        filled = self._edited & self._zero & self._per_weight(behind)
        latent, kept = self._latent + torch.where(filled, self._weight, 0.0), filled
        if self._exponent != math.inf:  # the hard shrink leaves survivors alone
            survived = self._edited & ~self._zero & (self._weight != 0) & self._per_weight(survivors)
            latent, kept = self._unshrunk(survived, latent), filled | survived
        self._write(latent, [piece.latent for piece in self._pieces])
        self._write(torch.where(kept, self._written(), self._weight), [piece.weight for piece in self._pieces])
        return kept.any()

    def _unshrunk(self, which: Tensor, others: Tensor) -> Tensor:
        """Return what shrinks to some of the weights, and ``others`` elsewhere."""
        each = self._spread_out(self._each)
        if which.is_cuda:  # which of them must not be asked
            return torch.where(which, unshrink(self._weight, each, self._exponent), others)
        others[which] = unshrink(self._weight[which], each[which], self._exponent)
        return others

    def _per_weight(self, truths: Sequence[Tensor]) -> Tensor:
        """Return what is true of a tensor for every weight of it."""
        return self._spread_out(torch.stack([truths[piece.tensor] for piece in self._pieces]))

    def _written(self) -> Tensor:
        return _flat(shrunk([piece.latent for piece in self._pieces], self._each, self._exponent))

    def _spread_out(self, values: Tensor) -> Tensor:
        """Return each piece's value for every weight of it."""
        here = values.to(self._weight.device).unbind()
        return _joined([one.expand(size) for one, size in zip(here, self._sizes, strict=True)])

    def _write(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write values, one after the other, into the tensors that they are of."""
        pieces = [piece.view(t.shape) for piece, t in zip(values.split(self._sizes), tensors, strict=True)]
        torch._foreach_copy_(list(tensors), pieces)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return _joined([tensor.reshape(-1) for tensor in tensors])


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # no copy of a large one
