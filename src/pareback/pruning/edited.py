"""What others did to pruned weights, weight by weight: to survivors alone, or are these other weights altogether?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import shrunk
from ..shrink import unshrink

#: Of edited weights, or of all zeros, so many may have been zeros where nothing but survivors was meant.
_FILLED = 0.1
#: Weights are other ones altogether if more than this share of those that were or are not zero has changed.
_REPLACED = 0.5
#: So many weights are looked at together on a CPU, whose caches hold them, and elsewhere: small tensors at once, as
#: calling operators takes its time, and large ones in pieces, as a dozen copies of them might not fit into memory.
_TOGETHER, _ELSEWHERE = 2**18, 2**22


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
        """Let edited survivors shrink to the values that they were given; return whether there were any."""
        found = torch.zeros((), dtype=torch.bool, device=self._thresholds.device)
        changes, (_, survivors) = self._judged()
        only = survivors.unbind()
        for change in changes:
            found |= change.keep(only).to(found.device)
        return found

    def others(self) -> list[bool]:
        """Return which tensors hold other weights than they were left with, most of them and with zeros filled."""
        _, (replaced, survivors) = self._judged()
        return (replaced & ~survivors).tolist()

    def _judged(self) -> tuple[Iterator[_Change], tuple[Tensor, Tensor]]:
        """Return what was done, and of each tensor whether it was replaced and whether survivors alone were meant."""
        if not self._pieces:
            nothing = torch.zeros(0, dtype=torch.bool, device=self._thresholds.device)
            return iter(()), (nothing, nothing)
        # Several are looked at twice: they might not fit into memory together.
        first = [_Change(self._runs[0], self._exponent)] if len(self._runs) == 1 else None
        changes = first or self._changes()
        counts = torch.cat([change.counts().to(self._thresholds.device) for change in changes], dim=1)
        filled, edits, zeros, weights = self._of_tensors(counts)
        survivors = (filled <= _FILLED * torch.minimum(edits, zeros)) & (zeros > 0)
        return iter(first or self._changes()), (edits > _REPLACED * weights, survivors)

    def _changes(self) -> Iterator[_Change]:
        return (_Change(run, self._exponent) for run in self._runs)

    def _of_tensors(self, counts: Tensor) -> tuple[Tensor, ...]:
        """Add up what was counted in the pieces of each tensor."""
        if len(self._pieces) == len(self._thresholds):
            return counts.unbind()
        sums: dict[int, Tensor] = {}
        for piece, column in zip(self._pieces, counts.unbind(1), strict=True):
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
        written = self._written()
        self._edited, self._zero = self._weight != written, written == 0

    def counts(self) -> Tensor:
        """Return of each piece: zeros that were filled, edits, zeros, and weights that were or are not zero."""
        either = ~self._zero | (self._weight != 0)
        masks = torch.stack([self._edited & self._zero, self._edited, self._zero, either])
        return torch.stack([mask.sum(1) for mask in masks.split(self._sizes, 1)], dim=1)

    def keep(self, survivors: Sequence[Tensor]) -> Tensor:
        """Let edited survivors of some tensors shrink to their values; return whether there were any."""
        allowed = self._spread_out(torch.stack([survivors[piece.tensor] for piece in self._pieces]))
        kept = self._edited & ~self._zero & (self._weight != 0) & allowed
        latent = unshrink(self._weight, self._spread_out(self._each), self._exponent)
        self._write(torch.where(kept, latent, self._latent), [piece.latent for piece in self._pieces])
        self._write(torch.where(kept, self._written(), self._weight), [piece.weight for piece in self._pieces])
        return kept.any()

    def _written(self) -> Tensor:
        return _flat(shrunk([piece.latent for piece in self._pieces], self._each, self._exponent))

    def _spread_out(self, values: Tensor) -> Tensor:
        """Return each piece's value for every weight of it."""
        here = values.to(self._weight.device).unbind()
        return torch.cat([one.expand(size) for one, size in zip(here, self._sizes, strict=True)])

    def _write(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write values, one after the other, into the tensors that they are of."""
        pieces = [piece.view(t.shape) for piece, t in zip(values.split(self._sizes), tensors, strict=True)]
        torch._foreach_copy_(list(tensors), pieces)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
