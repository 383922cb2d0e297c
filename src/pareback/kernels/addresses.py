"""Where the tensors of a launch are: tables on the device that let one launch sweep many of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import InvalidUse

#: Elements a program handles at a time: one load of 16 bytes for each of its 128 threads.
BLOCK = 512
#: A launch has about this many programs at most, each going through several blocks. More of them spend their time on
#: finding their tensor: 16,384 made the sweeps a third slower on an H200, 1,056 to 4,224 were alike. And few partial
#: sums are left to add up however large a tensor is.
PROGRAMS = 4224

_REMEMBERED = 256
_SPARE = 8


@dataclass
class AddressTable:
    """The addresses of weights, latents and gradients (0 where there are none), and a counter per tensor."""

    addresses: Tensor
    counters: Tensor


@dataclass
class Spans:
    """How tensors of certain sizes are cut up among programs, on the device."""

    span: int  #: elements per program
    sizes: Tensor
    first: Tensor  #: each tensor's first program, and the number of programs at the end
    owner: Tensor  #: each program's tensor
    programs: int
    #: Page-locked memory and counters for tables made while a graph is captured, when neither may be allocated.
    spare: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    #: What captured graphs read at every replay, and which therefore has to stay.
    used: list[object] = field(default_factory=list)


_spans: dict[tuple[object, ...], Spans] = {}
_tables: OrderedDict[tuple[object, ...], AddressTable] = OrderedDict()


def spans_of(sizes: tuple[int, ...], device: torch.device) -> Spans:
    """Return how to cut up tensors of these sizes."""
    key = (device, sizes)
    if key not in _spans:
        span = BLOCK * max(1, -(-sum(sizes) // (BLOCK * PROGRAMS)))
        numbers = torch.tensor([max(1, -(-size // span)) for size in sizes])  # an empty shard has its sums, too
        first = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), numbers)
        made = Spans(span, torch.tensor(sizes).to(device), first.to(device), owner.to(device), int(first[-1]))
        made.spare = _spares(len(sizes), device, _SPARE)
        _spans[key] = made
    found = _spans[key]
    missing = _SPARE - len(found.spare)
    if missing and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        # Every training that is captured in this process takes some, and the next network may be cut up alike.
        found.spare += _spares(len(sizes), device, missing)
    return found


def _spares(number: int, device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    if device.type != "cuda":
        return []
    host = (torch.empty(3, number, dtype=torch.int64).pin_memory() for _ in range(count))
    return [(table, _counters(number, device)) for table in host]


def table_of(
    weights: Sequence[Tensor] | None,
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    spans: Spans,
) -> AddressTable:
    """Return the addresses on the device.

    The last tables are remembered, as a training loop meets the same addresses again and again.
    """
    device, none = latents[0].device, [0] * len(latents)
    addresses = [
        none if weights is None else [w.data_ptr() for w in weights],
        [latent.data_ptr() for latent in latents],
        none if grads is None else [0 if g is None else g.data_ptr() for g in grads],
    ]
    key = (device, *(address for row in addresses for address in row))
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _tables:
        _tables.move_to_end(key)
        if capturing:
            spans.used.append(_tables[key])
        return _tables[key]
    if capturing:
        return _captured(addresses, spans, device)
    host = torch.tensor(addresses)
    on_device = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    _tables[key] = AddressTable(on_device, _counters(len(latents), device))
    if len(_tables) > _REMEMBERED:
        _tables.popitem(last=False)
    return _tables[key]


def _captured(addresses: list[list[int]], spans: Spans, device: torch.device) -> AddressTable:
    """Return a table that a graph being captured fills each time it is replayed."""
    if not spans.spare:
        raise InvalidUse(f"More than {_SPARE} graphs were captured with one pruner. Build a new pruner.")
    host, counters = spans.spare.pop()
    spans.used.append((host, counters))
    host.copy_(torch.tensor(addresses))
    return AddressTable(torch.empty_like(host, device=device).copy_(host, non_blocking=True), counters)


def _counters(number: int, device: torch.device) -> Tensor:
    return torch.zeros(number, dtype=torch.int32, device=device)
