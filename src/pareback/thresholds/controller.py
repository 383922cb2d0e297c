"""How thresholds move: the state of the rule, one step of it, and what every goal shares.

All state is tensors on the device, and a step only launches work on it: nothing is read back, so a step can be
captured in a CUDA graph and still sees new targets and learning rates when it is replayed. A step calculates in float64
whatever the state is stored in, so that it comes to the same numbers here, in C++ and on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..costs.limits import Range
from ..kernels import Moments
from .compiled import CompiledOnGpu
from .extremes import Extremes

#: The slope of the sparsity is measured on weights within this many σ of the threshold, above and below.
BAND = 0.05
#: The farthest a threshold may move in one step, in σ. Keeps a wrong slope from emptying a tensor.
STRIDE = 0.3

#: A spread that falls below this share of itself in one step is of other weights, loaded or reset: no training shrinks
#: them so fast.
RELOADED = 0.5

ADAM_BETAS = (0.9, 0.999)

#: Where to prune, and the ends of the bands in which slopes are counted: one entry per tensor in each.
Cut = tuple[Tensor, Tensor]
#: Counts what pruning there would leave of the weights as they are now: non-zeros and band. Tensors that are not asked
#: for are not swept, and their counts mean nothing.
Recount = Callable[[Cut, Sequence[bool]], tuple[Tensor, Tensor]]


def ramp_share(step: Tensor, ramp_steps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return how much of the goal is asked for at ``step``: a cubic that starts steep and ends flat.

    >>> ramp_share(torch.tensor([0, 50, 100, 150]), 100)
    tensor([0.0000, 0.8750, 1.0000, 1.0000])
    """
    if ramp_steps == 0:
        return torch.ones_like(step, dtype=dtype)
    return (1.0 - (1.0 - (step.double() / ramp_steps).clamp(max=1.0)) ** 3).to(dtype)


@dataclass
class Rates:
    """What the thresholds' own small optimizer reads from the user's, one entry per tensor."""

    lr: Tensor  #: the optimizer's own
    multiple: Tensor  #: the thresholds learn at this multiple of it
    momentum: Tensor
    adaptive: Tensor  #: whether the tensor's optimizer normalises gradients, as Adam does


@dataclass
class State:
    """Everything a resumed run needs to go on with the same bits, beside the latent weights."""

    r: Tensor
    threshold: Tensor  #: what the weights were last pruned at
    spread: Tensor  #: σ, as measured before the last step
    peak: Tensor
    nonzero: Tensor
    band: Tensor
    step: Tensor
    velocity: Tensor = field(init=False)
    square: Tensor = field(init=False)
    normalised: Tensor = field(init=False)
    drift: Tensor = field(init=False)  #: how far the last step would have missed the budget if nobody had looked
    missed: Tensor = field(init=False)  #: the exact budget's errors at the last step and at that before it
    damping: Tensor = field(init=False)  #: how much of its gain the exact budget uses

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # the library reads memory from one end to the other
            setattr(self, name, value.contiguous())
        self.velocity = torch.zeros_like(self.r)
        self.square = torch.zeros_like(self.r)
        self.normalised = torch.zeros_like(self.step)
        self.drift = torch.zeros_like(self.r[0])
        self.missed = self.r.new_zeros(2)
        self.damping = torch.ones_like(self.r[0])

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name."""
        return dict(vars(self))

    def to(self, device: torch.device) -> None:
        """Move in place."""
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))


@dataclass(frozen=True)
class Room:
    """Where every tensor stands within its range."""

    r: Tensor
    sparsity: Tensor  #: of each tensor, as stored
    slope: Tensor  #: its measured change per unit of r
    spread: Tensor  #: σ of each tensor, as just measured
    least: Tensor  #: the fewest non-zeros it may have
    most: Tensor  #: and the most
    can_tighten: Tensor  #: whether a tensor is above its least non-zeros
    can_loosen: Tensor  #: whether it is below its most


@dataclass(frozen=True)
class View(Room):
    """What a rule may look at when it decides how far thresholds move."""

    share: Tensor  #: how much of the goal is asked for now
    share_before: Tensor
    gradient: Tensor  #: the task's, ∂L/∂r
    rates: Rates
    state: State
    advance: Tensor  #: 1, or 0 where the optimizer skipped its step

    def descend(self, gradient: Tensor) -> Tensor:
        """Return the move that the thresholds' optimizer makes for ``gradient``, and keep its momenta."""
        state, rates, go = self.state, self.rates, self.advance > 0
        first, second = ADAM_BETAS
        gradient = gradient.double()
        decay = torch.where(rates.adaptive, first, rates.momentum.double())
        fresh = torch.where(rates.adaptive, gradient * (1.0 - first), gradient)
        velocity = torch.where(go, decay * state.velocity.double() + fresh, state.velocity.double())
        square = second * state.square.double() + (1.0 - second) * gradient.square()
        square = torch.where(go, square, state.square.double())
        state.velocity.copy_(velocity)
        state.square.copy_(square)
        state.normalised.add_(go.to(state.normalised.dtype))
        count = state.normalised.clamp_min(1).double()
        scale = (square / (1.0 - second**count)).sqrt() + 1e-12
        along = torch.where(rates.adaptive, velocity / (1.0 - first**count) / scale, velocity)
        return -rates.lr.double() * rates.multiple.double() * along


class Rule(ABC):
    """How one kind of goal moves thresholds. A new one overrides :meth:`move`."""

    @abstractmethod
    def move(self, view: View) -> Tensor:
        """Return the wanted change of every ``r``."""

    def refine(self, controller: Controller, cut: Cut, recount: Recount, hold: Tensor | None) -> Cut:
        """Correct the move after counting what it would leave; return where to prune then.

        ``cut`` is what :meth:`Controller.advance` returned. Where ``hold`` is not zero the optimizer skipped its
        step, and nothing may move.
        """
        return cut

    def loss(self, controller: Controller) -> Tensor:
        """Return the sparsity loss as it is now, for logging."""
        return torch.zeros_like(controller.state.r[0])

    def share_asked(self) -> float | None:
        """Return how much of the goal is asked for by now, where that is the rule's own and not the ramp's."""
        return None

    #: Whether a threshold stays where it is when training changes the spread of its tensor, and r follows. Elsewhere r
    #: stays, and the threshold follows, as in the paper.
    holds_thresholds = False
    #: Whether the rule keeps masks and leaves thresholds at zero; see masks.py.
    keeps_masks = False
    #: Whether thresholds follow plain gradients beside an optimizer that normalises them, as Adam does. Where a rule
    #: adds a gradient of its own, normalising would cancel the factor that the user gave it.
    plain_gradients = False

    def native(self) -> NativeRule | None:
        """Return what the CPU's step in C++ has to know to do the same (kernels/control.h), or None if it cannot."""
        return None


@dataclass(frozen=True)
class NativeRule:
    """One of the rules that are written in C++, too, and its numbers."""

    kind: int
    form: int = 0
    shares: Tensor | None = None  #: [limits, tensors]
    budgets: Tensor | None = None
    weights: Tensor | None = None
    target: Tensor | None = None  #: [tensors]
    tolerance: float = 0.0
    passes: int = 0


class Controller:
    """Holds the state and moves it by a rule, keeping every tensor within its range."""

    def __init__(
        self,
        rule: Rule,
        sizes: Sequence[int],
        ranges: Sequence[Range],
        state: State,
        ramp_steps: int,
        extremes: Extremes | None = None,
    ) -> None:
        self.rule = rule
        self.state = state
        self.ramp_steps = ramp_steps
        self.extremes = extremes
        self._compiled = CompiledOnGpu(self._advance)
        like = state.r
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=like.device)
        # Aim a little inside the floor, so that a step of the weights does not push a tensor through it.
        least = [min(b.most, b.least + max(1, b.least // 20)) for b in ranges]
        self.least = torch.tensor(least, dtype=torch.float64, device=like.device)
        self.most = torch.tensor([b.most for b in ranges], dtype=torch.float64, device=like.device)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.state.to(device)
        self.sizes, self.least, self.most = (x.to(device) for x in (self.sizes, self.least, self.most))
        for name, value in vars(self.rule).items():
            if isinstance(value, (Tensor, Extremes)):  # else every step would copy it, and wait
                setattr(self.rule, name, value.to(device))
        if self.extremes is not None:
            self.extremes = self.extremes.to(device)

    def may_look(self) -> bool:
        """Whether a step may read numbers back: on the CPU they are there; elsewhere it would have to wait."""
        return self.state.r.device.type == "cpu"

    def share(self) -> Tensor:
        """Return how much of the goal is asked for at the present step."""
        return ramp_share(self.state.step, self.ramp_steps, torch.float64)

    def share_asked(self) -> Tensor:
        """Return the same for those who ask: masks follow a schedule of their own."""
        own = self.rule.share_asked()
        return self.share() if own is None else torch.full_like(self.sizes[0], own)

    def sparsity(self) -> Tensor:
        """Return each tensor's stored sparsity."""
        return 1.0 - self.state.nonzero.to(self.sizes.dtype) / self.sizes

    def slope(self) -> Tensor:
        """Return the measured change of each tensor's sparsity per unit of r; never less than half a weight's."""
        width = BAND + self.state.r.double().clamp(max=BAND)  # no magnitude is below zero
        return self.state.band.clamp_min(0.5).to(self.sizes.dtype) / (self.sizes * width)

    def advance(self, moments: Moments, rates: Rates, skipped: Tensor | None = None) -> Cut:
        """Move the thresholds by one optimizer step; where ``skipped`` is not zero nothing moves.

        Returns where to prune now, and the ends of the bands in which slopes are counted.
        """
        return self._compiled(self.state.r.is_cuda, moments, rates, skipped)

    def _advance(self, moments: Moments, rates: Rates, skipped: Tensor | None) -> Cut:
        state = self.state
        go = torch.ones_like(self.sizes[0]) if skipped is None else (skipped == 0).to(self.sizes).reshape(())
        share_before = self.share()
        state.step.add_(go.to(state.step.dtype))
        self.observe(moments, go)
        room = self.room()
        view = View(
            r=room.r,  # field by field, as the compiler cannot unpack a dataclass
            sparsity=room.sparsity,
            slope=room.slope,
            spread=room.spread,
            least=room.least,
            most=room.most,
            can_tighten=room.can_tighten,
            can_loosen=room.can_loosen,
            share=self.share(),
            share_before=share_before,
            gradient=_finite(moments.pull.double() / room.r.clamp_min(1e-3)),
            rates=rates,
            state=state,
            advance=go,
        )
        move = self.within(room, self.rule.move(view))
        state.r.copy_((room.r + move * go).clamp_min(0.0))
        return self.cut()

    def observe(self, moments: Moments, go: Tensor | float = 1.0) -> None:
        """Take over the spread of the weights, from which the thresholds follow."""
        spread = (moments.square.double() / self.sizes).sqrt()
        # A spread that overflowed would prune everything; the last good one serves until weights are finite again.
        usable = torch.isfinite(spread) & torch.as_tensor(go > 0)
        if self.rule.holds_thresholds:
            trained = usable & (spread > 0) & (spread >= RELOADED * self.state.spread.double())
            held = self.state.threshold.double() / spread
            self.state.r.copy_(torch.where(trained, held, self.state.r.double()))
        self.state.spread.copy_(torch.where(usable, spread, self.state.spread.double()))
        self.state.peak.copy_(torch.where(usable, moments.peak.double(), self.state.peak.double()))

    def thresholds(self) -> Tensor:
        """Return where to prune now. Whatever r says, the largest weight stays."""
        state = self.state
        return torch.minimum(state.r.double() * state.spread, 0.999 * state.peak.double()).to(state.r.dtype)

    def cut(self) -> Cut:
        """Return where to prune now, and where the bands end in which slopes are counted."""
        thresholds = self.thresholds()
        return thresholds, (thresholds + BAND * self.state.spread.double()).to(thresholds.dtype)

    def _ranges(self) -> tuple[Tensor, Tensor]:
        if self.extremes is None:
            return self.least, self.most
        least, most = self.extremes.ranges(self.sparsity(), self.least)
        ramped = self.share() >= 1.0
        return torch.where(ramped, least, self.least), torch.where(ramped, most, self.most)

    def room(self) -> Room:
        """Return where every tensor stands."""
        least, most = self._ranges()
        kept, r, spread = self.state.nonzero.double(), self.state.r.double(), self.state.spread.double()
        return Room(r, self.sparsity(), self.slope(), spread, least, most, kept > least, (kept < most) & (r > 0))

    def within(self, room: Room, move: Tensor) -> Tensor:
        """Limit each tensor's move so that, by its measured slope, it stays between its least and most."""
        per_r = self.sizes * room.slope
        kept = self.state.nonzero.to(self.sizes.dtype)
        up = ((kept - room.least) / per_r).clamp_min(-STRIDE)
        down = ((kept - room.most) / per_r).clamp(max=STRIDE)
        return torch.maximum(torch.minimum(move, up), down)


def _finite(gradient: Tensor) -> Tensor:
    """Ignore gradients that overflowed."""
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
