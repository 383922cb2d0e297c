"""The thresholds' learning rates, read from the user's optimizers at every step so that schedules carry over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .control import Rates
from .selection import Selected
from .wording import excluding, listed

#: Thresholds learn at this multiple of their tensor's learning rate, by how its optimizer scales gradients.
SGD_MULTIPLE = 0.01
ADAPTIVE_MULTIPLE = 1.0
#: And at most at this rate, in σ per step: lr = 1 is a factor to Adadelta and its like, not a step.
ADAPTIVE_MOST = 0.01


class GroupRates:
    """Knows which parameter group of which optimizer each pruned tensor belongs to."""

    def __init__(
        self,
        selected: Sequence[Selected],
        optimizers: Sequence[Optimizer],
        multiple: float | None,
        like: Tensor,
    ) -> None:
        places = [_place(s, optimizers) for s in selected]
        missing = [s.name for s, place in zip(selected, places, strict=True) if place is None]
        if missing:
            are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
            raise ValueError(
                f"{listed(missing)} would be pruned but {are} in no optimizer that was given. Add {them} to the "
                f"optimizer, or leave {them} out with {excluding(missing)}."
            )
        twice = [s.name for s in selected if sum(_place(s, [one]) is not None for one in set(optimizers)) > 1]
        if twice:
            are, them = ("is", "it") if len(twice) == 1 else ("are", "them")
            raise ValueError(
                f"{listed(twice)} {are} in more than one of the optimizers given, and a step of the second would fill "
                f"the zeros again. Let one optimizer move {them}."
            )
        found = [place for place in places if place is not None]
        for o, g in dict.fromkeys(found):
            if not isinstance(optimizers[o].param_groups[g].get("lr"), (int, float, Tensor)):
                raise ValueError(
                    f"{type(optimizers[o]).__name__} has no learning rate (lr) in its parameter group {g}, which the "
                    "thresholds would follow. Give it an lr."
                )
        self._groups: list[tuple[Optimizer, int, Tensor]] = []
        for place in dict.fromkeys(found):
            members = [i for i, other in enumerate(found) if other == place]
            index = torch.tensor(members, device=like.device)
            self._groups.append((optimizers[place[0]], place[1], index))
        #: The tensors each optimizer moves.
        self.parts = [[i for i, place in enumerate(found) if place[0] == k] for k in range(len(optimizers))]
        self._index = [torch.tensor(part, dtype=torch.int64, device=like.device) for part in self.parts]
        adaptive = [is_adaptive(optimizers[o].param_groups[g]) for o, g in found]
        default = [ADAPTIVE_MULTIPLE if a else SGD_MULTIPLE for a in adaptive]
        multiples = default if multiple is None else [multiple] * len(found)
        self._multiple = torch.tensor(multiples, dtype=like.dtype, device=like.device)
        capped = [ADAPTIVE_MOST if a and multiple is None else math.inf for a in adaptive]
        self._most = torch.tensor(capped, dtype=like.dtype, device=like.device)
        self._is_capped = any(map(math.isfinite, capped))
        #: −1 where an optimizer maximises and a threshold has to follow the task's gradient uphill.
        maximized = [bool(optimizers[o].param_groups[g].get("maximize")) for o, g in found]
        self.sense = torch.tensor([-1.0 if m else 1.0 for m in maximized]).to(like) if any(maximized) else None
        self._lr, self._momentum = torch.zeros_like(like), torch.zeros_like(like)
        self._adaptive = torch.tensor(adaptive, device=like.device)
        self._written: dict[tuple[int, int], float] = {}  # what the rates hold, to write only what changed

    def read(self) -> Rates:
        """Return the present rates, without waiting for the device."""
        lr, momentum = self._of_groups(self._lr, "lr"), self._of_groups(self._momentum, "momentum")
        return Rates(lr.minimum(self._most) if self._is_capped else lr, self._multiple, momentum, self._adaptive)

    def _of_groups(self, rates: Tensor, name: str) -> Tensor:
        values = [optimizer.param_groups[number].get(name, 0.0) for optimizer, number, _ in self._groups]
        if len(values) == 1 and isinstance(values[0], Tensor) and values[0].device == rates.device:
            return values[0].reshape(1).to(rates).expand(len(rates))  # launches nothing
        for place, value in enumerate(values):
            self._write(rates, place, self._groups[place][2], value)
        return rates

    def _write(self, rates: Tensor, place: int, index: Tensor, value: float | Tensor) -> None:
        """Write one group's rate. A tensor on the device is copied there, so that a replayed graph sees it change."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            rates.index_copy_(0, index, value.reshape(1).to(rates).expand(len(index)))
            return
        number = float(value)
        if self._written.get((id(rates), place)) != number:
            rates.index_fill_(0, index, number)
            self._written[id(rates), place] = number

    def of_part(self, part: int, values: Tensor) -> Tensor:
        """Return the entries of ``values`` that belong to one optimizer's tensors."""
        return values if len(self._index[part]) == len(values) else values.index_select(0, self._index[part])

    def set_part_(self, part: int, values: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        """Overwrite those entries of each vector, in place."""
        if len(self._index[part]) == len(values[0]):
            torch._foreach_copy_(list(values), list(fresh))
        else:
            for value, new in zip(values, fresh, strict=True):
                value.index_copy_(0, self._index[part], new)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self._groups = [(o, g, index.to(device)) for o, g, index in self._groups]
        self._index = [index.to(device) for index in self._index]
        self._written.clear()
        self._multiple, self._lr, self._most = (x.to(device) for x in (self._multiple, self._lr, self._most))
        self.sense = None if self.sense is None else self.sense.to(device)
        self._momentum, self._adaptive = self._momentum.to(device), self._adaptive.to(device)


def is_adaptive(group: dict[str, Any]) -> bool:
    """Whether a parameter group belongs to an optimizer that divides gradients by their size, as Adam does."""
    if "history_size" in group:  # LBFGS scales the whole step, not each gradient by its size
        return False
    return "momentum" not in group or "betas" in group or "alpha" in group


def _place(wanted: Selected, optimizers: Sequence[Optimizer]) -> tuple[int, int] | None:
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            if any(p is wanted.parameter for p in group["params"]):
                return o, g
    return None
