"""Which optimizer moves each pruned tensor, in which parameter group, and how fast its threshold learns there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..costs.selection import Selected
from ..errors import InvalidValue
from ..messages import excluding, listed
from ..thresholds.controller import Rates

#: Thresholds learn at this multiple of their tensor's learning rate, by how its optimizer scales gradients; an exact
#: budget's at more where the training is short or its rate low.
SGD_MULTIPLE = 0.01
ADAPTIVE_MULTIPLE = 1.0
#: Then at a rate of this, in σ, over the number of steps. It is what the multiples above give 15,000 steps at 0.1 and
#: 0.001, and with less thresholds stay where they began (results/threshold-rates.json).
TRAVEL = 15.0
#: And at most at this rate, however few steps there are.
QUICKEST = 0.01
#: And at most at this rate, in σ per step: lr = 1 is a factor to Adadelta and its like, not a step.
ADAPTIVE_MOST = 0.01


class Groups:
    """The pruned tensors divided among optimizers and parameter groups, and the rates read from those at every step."""

    def __init__(
        self,
        selected: Sequence[Selected],
        optimizers: Sequence[Optimizer],
        multiple: float | None,
        like: Tensor,
        plain_gradients: bool = False,
        total_steps: int | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self._asked = multiple, plain_gradients, total_steps
        found = _places(selected, optimizers)
        self._shape = self._present_shape()
        members: dict[tuple[int, int], list[int]] = {}
        for i, place in enumerate(found):
            members.setdefault(place, []).append(i)
        #: The tensors each optimizer moves.
        self.parts = [[i for i, place in enumerate(found) if place[0] == k] for k in range(len(optimizers))]
        self._index = [torch.tensor(part, dtype=torch.int64, device=like.device) for part in self.parts]
        adaptive = {place: is_adaptive(_group(optimizers, place)) for place in members}
        self._groups = [
            _Group(
                optimizers[place[0]],
                place,
                torch.tensor(which, device=like.device),
                ADAPTIVE_MOST if adaptive[place] and multiple is None else math.inf,
            )
            for place, which in members.items()
        ]
        self._found = found
        self._multiple = torch.zeros_like(like)
        self._known_multiples: list[float] | None = None
        self.set_multiples()
        self._adaptive = torch.tensor([adaptive[p] and not plain_gradients for p in found], device=like.device)
        self._lr, self._momentum = torch.zeros_like(like), torch.zeros_like(like)
        maximized = [bool(_group(optimizers, place).get("maximize")) for place in found]
        #: −1 where an optimizer maximises and a threshold has to follow the task's gradient uphill.
        self.sense = torch.tensor([-1.0 if m else 1.0 for m in maximized]).to(like) if any(maximized) else None

    def set_multiples(self) -> None:
        """Set the multiples by what is known of the schedules: by now, or at the first step, they may be attached."""
        multiples = self._multiples(self._asked[2])
        if multiples != self._known_multiples:  # a copy from the host waits for a GPU
            self._known_multiples = multiples
            self._multiple.copy_(torch.tensor(multiples, dtype=self._multiple.dtype))
        quickest = math.inf if self._asked[0] is not None else _quickest(self._asked[2])
        for group in self._groups:
            group.curb(multiples[self._found.index(group.place)], quickest)

    def _multiples(self, total_steps: int | None) -> list[float]:
        """Return the multiple of its learning rate at which each tensor's threshold learns in so many steps."""
        multiple, plain_gradients, _ = self._asked
        if multiple is not None:
            return [multiple] * len(self._found)
        steps = None if plain_gradients else total_steps
        usual = {place: _usual_multiple(self.optimizers, place, steps) for place in dict.fromkeys(self._found)}
        return [usual[place] for place in self._found]

    def learn_alike(self, total_steps: int) -> bool:
        """Whether thresholds would learn at the same multiples in so many steps."""
        return self._multiples(total_steps) == self._multiples(self._asked[2])

    def divided(self, selected: Sequence[Selected], optimizers: Sequence[Optimizer]) -> Groups:
        """Return the tensors divided among other optimizers or groups, with the same settings."""
        multiple, plain_gradients, total_steps = self._asked
        return Groups(selected, optimizers, multiple, self._lr, plain_gradients, total_steps)

    def changed(self) -> bool:
        """Whether an optimizer has other parameter groups than when the tensors were divided among them."""
        return self._shape != self._present_shape()

    def _present_shape(self) -> list[tuple[int, Any]]:
        return [(len(group["params"]), group.get("maximize")) for one in self.optimizers for group in one.param_groups]

    def read(self) -> Rates:
        """Return the present rates, without waiting for the device."""
        return Rates(self._read(self._lr, "lr"), self._multiple, self._read(self._momentum, "momentum"), self._adaptive)

    def read_into(self) -> Rates:
        """Return the present rates in memory that is always the same."""
        for group in self._groups:
            group.write(self._lr, "lr")
            group.write(self._momentum, "momentum")
        return Rates(self._lr, self._multiple, self._momentum, self._adaptive)

    def _read(self, rates: Tensor, name: str) -> Tensor:
        first = self._groups[0].value(name)
        if len(self._groups) == 1 and _is_away(first):
            launches_nothing: Tensor = first.reshape(1).to(rates).expand(len(rates))
            return launches_nothing
        for group in self._groups:
            group.write(rates, name)
        return rates

    def at_rest(self, part: int) -> set[int]:
        """Return those of an optimizer's tensors whose learning rate is zero. Waits for rates that are on a device."""
        groups = self.optimizers[part].param_groups
        return {i for i in self.parts[part] if float(groups[self._found[i][1]]["lr"]) == 0.0}

    def of_part(self, part: int, values: Tensor) -> Tensor:
        """Return the entries of ``values`` that belong to one optimizer's tensors."""
        return values if len(self.parts[part]) == len(values) else values.index_select(0, self._index[part])

    def set_part_(self, part: int, values: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        """Overwrite those entries of each vector, in place."""
        if len(self.parts[part]) == len(values[0]):
            torch._foreach_copy_(list(values), list(fresh))
        else:
            for value, new in zip(values, fresh, strict=True):
                value.index_copy_(0, self._index[part], new.to(value.dtype))

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        for group in self._groups:
            group.to(device)
        self._index = [index.to(device) for index in self._index]
        self._multiple, self._adaptive = self._multiple.to(device), self._adaptive.to(device)
        self._lr, self._momentum = self._lr.to(device), self._momentum.to(device)
        self.sense = None if self.sense is None else self.sense.to(device)


class _Group:
    """One parameter group: its pruned tensors, and what was last written of its rates."""

    def __init__(self, optimizer: Optimizer, place: tuple[int, int], index: Tensor, most: float) -> None:
        self._optimizer, self.place, self._index = optimizer, place, index
        self._most = most
        self._bend, self._beyond = math.inf, 0.0
        self._written: dict[str, float] = {}

    def curb(self, multiple: float, quickest: float) -> None:
        """Let thresholds learn no faster than ``quickest`` where the rate rises above all that was known of it.

        Only a raised multiple is curbed: at the usual one, thresholds are as fast as their weights.
        """
        usual = _usual(self._optimizer.param_groups[self.place[1]])
        raised = usual < multiple and quickest < math.inf
        self._bend, self._beyond = (quickest / multiple, usual / multiple) if raised else (math.inf, 0.0)
        self._written.clear()

    def value(self, name: str) -> Any:
        """Return a rate as the optimizer has it: a number or a tensor."""
        settings = self._optimizer.param_groups[self.place[1]]
        if name == "momentum":
            return settings.get("momentum", 0.0)
        rate = settings["lr"]
        if not _is_away(rate):
            rate = min(float(rate), self._most)
            return rate if rate <= self._bend else max(self._bend, self._beyond * rate)
        rate = rate.clamp_max(self._most) if self._most < math.inf else rate
        return rate if self._bend == math.inf else torch.maximum(rate.clamp_max(self._bend), self._beyond * rate)

    def write(self, rates: Tensor, name: str) -> None:
        """Write one rate. A tensor on the device is copied there, so that a replayed graph sees it change."""
        value = self.value(name)
        if _is_away(value):
            rates.index_copy_(0, self._index, value.reshape(1).to(rates).expand(len(self._index)))
            return
        number = float(value)
        if self._written.get(name) != number:
            rates.index_fill_(0, self._index, number)
            self._written[name] = number

    def to(self, device: torch.device) -> None:
        self._index = self._index.to(device)
        self._written.clear()


def _usual_multiple(optimizers: Sequence[Optimizer], place: tuple[int, int], total_steps: int | None) -> float:
    """Return the multiple of a group's learning rate at which thresholds learn if nobody says otherwise.

    ``total_steps`` is None where the length is not known, or where a penalty drives them, whose weight counts.
    """
    group = _group(optimizers, place)
    usual, highest = _usual(group), _highest_rate(optimizers[place[0]], group)
    if total_steps is None or highest <= 0.0:
        return usual
    highest = min(highest, ADAPTIVE_MOST) if is_adaptive(group) else highest
    return max(usual, _quickest(total_steps) / highest)


def _usual(group: dict[str, Any]) -> float:
    return ADAPTIVE_MULTIPLE if is_adaptive(group) else SGD_MULTIPLE


def _quickest(total_steps: int | None) -> float:
    """Return at which rate, in σ per step, thresholds learn where their tensor's rate is highest."""
    return math.inf if total_steps is None else min(TRAVEL / total_steps, QUICKEST)


def _highest_rate(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the rate that a group's schedule goes down from, as far as can be told, in a resumed training as well."""
    scheduled = group.get("max_lr", group.get("initial_lr"))  # as torch's schedulers note it
    if scheduled is not None:
        return float(scheduled)
    given = getattr(optimizer, "defaults", {}).get("lr")
    return max(float(rate) for rate in (given, group["lr"]) if isinstance(rate, (int, float, Tensor)))


def _is_away(value: object) -> bool:
    """Whether a rate is a tensor on another device, whose value would have to be waited for."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def is_adaptive(group: dict[str, Any]) -> bool:
    """Whether a parameter group belongs to an optimizer that divides gradients by their size, as Adam does."""
    if "history_size" in group:  # LBFGS scales the whole step, not each gradient by its size
        return False
    return "momentum" not in group or "betas" in group or "alpha" in group


def _group(optimizers: Sequence[Optimizer], place: tuple[int, int]) -> dict[str, Any]:
    return optimizers[place[0]].param_groups[place[1]]  # type: ignore[no-any-return]


def _places(selected: Sequence[Selected], optimizers: Sequence[Optimizer]) -> list[tuple[int, int]]:
    """Return the optimizer and the group of every tensor, refusing tensors in none, or in several optimizers."""
    places: dict[int, list[tuple[int, int]]] = {}
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                places.setdefault(id(parameter), []).append((o, g))
    missing = [s.name for s in selected if id(s.parameter) not in places]
    if missing:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise InvalidValue(
            f"{listed(missing)} would be pruned but {are} in no optimizer that was given. Add {them} to the "
            f"optimizer, or leave {them} out with {excluding(missing)}."
        )
    owners = [{id(optimizers[o]) for o, _ in places[id(s.parameter)]} for s in selected]
    twice = [s.name for s, held in zip(selected, owners, strict=True) if len(held) > 1]
    if twice:
        are, them = ("is", "it") if len(twice) == 1 else ("are", "them")
        raise InvalidValue(
            f"{listed(twice)} {are} in more than one of the optimizers given, and a step of the second would fill "
            f"the zeros again. Let one optimizer move {them}."
        )
    found = [places[id(s.parameter)][0] for s in selected]
    for place in dict.fromkeys(found):
        if not isinstance(_group(optimizers, place).get("lr"), (int, float, Tensor)):
            raise InvalidValue(
                f"{type(optimizers[place[0]]).__name__} has no learning rate (lr) in its parameter group {place[1]}, "
                "which the thresholds would follow. Give it an lr."
            )
    return found
