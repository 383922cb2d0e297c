"""The pruner: a goal attached to a model and to the steps of its optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..costs.limits import Limit
from ..costs.selection import MIN_SIZE, plain_names
from ..errors import InvalidUse
from ..goals.goal import Goal, checked_goal
from ..messages import suggests_options
from ..sharding import Shards, like, local
from ..shrink import predicted_sparsity
from ..thresholds.controller import Controller
from ..thresholds.masks import MaskRule
from . import state as saved
from .attachment import Attachment, reusable
from .beside import BesideOptimizer
from .ends import Beginning, Lander, unland
from .groups import Groups
from .hooks import check_optimizers, check_ownership, is_accelerated
from .options import (
    check_dense_gradients,
    check_mask_options,
    check_shrink,
    check_threshold_lr,
    check_unowned,
    checked_share,
    checked_total,
    pruned_here,
    ramp_steps,
    warn_of_adapters,
)
from .step import Mount, Step
from .watch import warn_of_growth

if TYPE_CHECKING:
    from ..report import Known, Report

#: finish() speaks up where the model's non-zeros differ from the pruner's by more than this share, and a handful.
_CUT, _HANDFUL = 0.1, 50


class Pruner:
    """Trains a model to a goal from inside its optimizer's step.

    The model's own parameters hold the pruned weights, so everything that works with a plain model works. During
    ``optimizer.step()`` they show the latent weights, kept in memory of their own, and the optimizer moves those; after
    it the thresholds move and the latents are pruned into the parameters. The hooks keep the pruner alive.

    Args:
        model: any module. It is pruned to the initial target at once and never otherwise modified.
        optimizer: the torch optimizer of its parameters, or a sequence of them, stepped in that order.
        goal: :class:`~pareback.Budget`, :class:`~pareback.Fixed` or :class:`~pareback.Unconstrained`.
        total_steps: the optimizer steps the training will take; needed where the target grows.
        shrink: ``"hard"`` keeps surviving weights as they are, ``"power"`` lets them start at zero on the threshold,
            ``"soft"`` subtracts it. An exact budget takes ``"power"`` by default, other goals ``"hard"``.
        ramp: share of ``total_steps`` over which the target grows; 0.5 for an exact budget, else 0.
        straight_through: whether pruned weights go on receiving their gradient, or which share of it; all of it unless
            the goal says otherwise.
        include, exclude: fnmatch patterns on parameter names; ``include`` overrides ``min_size``.
        min_size: the fewest elements of a tensor that is pruned by default.
        example_inputs: a batch like those the model is called with; needed for FLOPs.
        threshold_lr: the thresholds' learning rate as a multiple of their tensor's. By default 0.01 beside SGD and 1
            beside Adam and its like; under an exact budget more where ``total_steps`` are few or the rate is low.

    >>> import pareback as pb
    >>> model = torch.nn.Linear(100, 20)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> pruner = Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=50)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 100)).square().mean().backward()
    ...     optimizer.step()
    >>> _ = pruner.finish()
    >>> int(model.weight.count_nonzero())
    200
    """

    #: Whether optimizers that evaluate the model several times in a step can be used.
    _repeats_closures = False

    @suggests_options
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        goal: Goal,
        total_steps: int | None = None,
        *,
        shrink: str | None = None,
        ramp: float | None = None,
        straight_through: float | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        min_size: int = MIN_SIZE,
        example_inputs: Any = None,
        threshold_lr: float | None = None,
    ) -> None:
        self.model, self.goal = model, goal
        optimizers = check_optimizers(optimizer, self._repeats_closures)
        include, exclude = reusable(include), reusable(exclude)
        resolved = checked_goal(goal).resolve(model, include, exclude, min_size, example_inputs)
        self._resolved = resolved
        self._exponent = check_shrink(shrink or goal.usual_shrink)
        self._straight_through = checked_share(
            goal.usual_straight_through if straight_through is None else straight_through
        )
        self.total_steps = checked_total(total_steps)
        growing = ramp_steps(goal.usual_ramp if ramp is None else ramp, self.total_steps)
        check_threshold_lr(threshold_lr)
        self.parameters, self.names = resolved.parameters, resolved.names
        if include is None:
            warn_of_adapters(model, self.names)
        check_dense_gradients(model, self.parameters)
        check_unowned(self.names, self.parameters)
        check_ownership(model, optimizers)
        self._shards = Shards(self.parameters)
        like = torch.zeros(len(self.names), dtype=resolved.dtype, device=local(self.parameters[0]).device)
        rule = goal.rule(resolved, like, self.total_steps)
        groups = Groups(resolved.selected, optimizers, threshold_lr, like, rule.plain_gradients, self.total_steps)
        read = {"shrink": shrink, "ramp": ramp, "straight_through": straight_through, "threshold_lr": threshold_lr}
        check_mask_options(goal, read, [one for one, part in zip(optimizers, groups.parts, strict=True) if part])
        # Everything that can be refused has been; from here on the model changes.
        with torch.no_grad():
            tensors = [local(p.detach()) for p in self.parameters]
            zeros = 0 if model in pruned_here else sum(t.numel() - int(t.count_nonzero()) for t in tensors)
            self._beginning = Beginning(goal, resolved, self._exponent, self._shards)
            state = self._beginning.state(tensors, 0.0 if growing else 1.0)
            extremes = goal.extremes_of(resolved, state.r)
            controller = Controller(rule, resolved.sizes, resolved.ranges, state, growing, extremes)
            mount = self._mounted(state.threshold)
            self._step = Step(
                self.names, self.parameters, resolved.ranges, controller, groups, mount, self._shards, self._exponent
            )
            self._lander = Lander(goal, resolved, self._step)
            if isinstance(rule, MaskRule):
                rule.begin(mount.latents())
            for part in range(len(optimizers)):
                self._step.prune(part)
            self._step.exchange_counts()
        if growing == 0:
            goal.check_start(resolved, state.nonzero.tolist())
        self._report: Report | None = None
        self._spread_before = state.spread.clone()
        self._saved_whole = is_accelerated(optimizer)
        choice = (include, exclude, min_size)
        repeats = self._repeats_closures and not rule.keeps_masks  # masks hold between steps, not within one
        self._attachment = Attachment(
            self._step, resolved, choice, zeros, self._settle, self._restart, self._unland, repeats, self.total_steps
        )

    def _restart(self, edited: Sequence[int]) -> None:
        fresh = self._beginning.anew(self._step, edited)
        if fresh is not None:
            self._spread_before = fresh

    def _unland(self) -> None:
        unland(self._step, self._lander)

    def _mounted(self, thresholds: Tensor) -> Mount:
        return BesideOptimizer(self.parameters, self._exponent, self._straight_through)

    @property
    def exponent(self) -> float:
        """The exponent by which weights shrink: ``math.inf`` for hard, 3 for power, 1 for soft."""
        return self._exponent

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers in whose steps the model is pruned."""
        return self._step.groups.optimizers

    @property
    def limits(self) -> list[Limit]:
        """The goal's limits in numbers: what a model with some non-zeros costs, and what is allowed."""
        return list(self._resolved.limits)

    def detach(self) -> None:
        """Leave the optimizers, without landing on the goal; twice is harmless. The model stays as it is."""
        self._settle()
        self._attachment.end()

    def _settle(self) -> None:
        """Prune again if a step was cut short by an exception and left latent weights in the model."""
        if not self._looking:  # asked within latents(): the weights are to stay as they are until its end
            self._step.settle()

    @property
    def _looking(self) -> str:
        """The block in which the model has other weights because the user asked for them, if it is within one."""
        return self._attachment.looking

    def may_replay(self, step: int) -> bool:
        """Whether a CUDA graph may replay that step of the training, the first being 0.

        True for every step, unless the goal keeps masks: those change on the host, between two replays.

        >>> import pareback as pb
        >>> model = torch.nn.Linear(100, 20)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = Pruner(model, optimizer, pb.methods.RigL(sparsity=0.9, every=100), total_steps=1000)
        >>> [step for step in range(1000) if not pruner.may_replay(step)]
        [100, 200, 300, 400, 500, 600, 700]
        """
        rule = self._step.controller.rule
        return not (isinstance(rule, MaskRule) and rule.is_due(step))

    def learns_alike(self, total_steps: int) -> bool:
        """Whether thresholds would learn at the same rates if the training took ``total_steps``.

        Unless ``threshold_lr`` was given, those of an exact budget learn faster where the steps are few.
        """
        return self._step.groups.learn_alike(total_steps)

    def expect_more_steps(self) -> None:
        """Let the training go on far beyond ``total_steps`` without a warning: it has no end of its own."""
        self._attachment.announced = None

    # -- what a user asks --------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Tensor]:
        """Return what is worth logging as tensors on the device; nothing waits for them.

        ``sparsity`` is that of all pruned tensors together, ``share`` how much of the goal is asked for by now,
        ``step`` counts optimizer steps (rounds of several optimizers), ``loss`` is :meth:`loss`; ``tensor_sparsity``
        and ``r`` have one entry per pruned tensor, in the order of ``names``.
        """
        self._settle()
        if not self.finished:
            self._attachment.warn_of_gone()
        controller, r = self._step.controller, self.r()
        each = controller.sparsity()
        return {
            "loss": self.loss(),
            "r": r,
            "share": controller.share_asked().to(r),
            "sparsity": ((each * controller.sizes).sum() / controller.sizes.sum()).to(r),
            "step": controller.state.step.clone(),
            "tensor_sparsity": each.to(r),
        }

    def loss(self) -> Tensor:
        """Return the sparsity loss, for logging. It acts on the thresholds already: do not add it to yours.

        Of an exact budget it is by how much the stored weights exceed what is allowed by now, as a share of what can be
        pruned: 0 where the budget is met.
        """
        controller = self._step.controller
        return controller.rule.loss(controller).to(controller.state.r)

    def counts(self) -> list[int]:
        """Return each pruned tensor's non-zeros, in the order of ``names``. Waits for the device."""
        self._settle()
        counts = self._shards.gather(self._step.counts_here()[0][None]).sum(0)[0]
        return [int(n) for n in counts.tolist()]

    def r(self) -> Tensor:
        """Return each tensor's threshold in units of its spread."""
        return self._step.controller.state.r.clone()

    def thresholds(self) -> Tensor:
        """Return the magnitude below which each tensor was last pruned."""
        return self._step.controller.state.threshold.clone()

    def spreads(self) -> Tensor:
        """Return the root mean square of each tensor's latent weights, as of the last step."""
        return self._step.controller.state.spread.clone()

    def latent_tensors(self) -> dict[str, Tensor]:
        """Return the latent weights by name, as they are kept: they change with the next step. None after finish()."""
        self._settle()
        pairs = zip(self.names, self.parameters, self._latents(), strict=not self.finished)
        return {name: like(latent, parameter) for name, parameter, latent in pairs}

    def _latents(self) -> list[Tensor]:
        return [] if self.finished else self._step.mount.latents()

    def known(self) -> dict[int, Known]:
        """Return, by parameter id, what a report cannot read off the model."""
        from ..report import Known

        self._settle()
        rule = self._step.controller.rule  # masks have no threshold to predict from
        predicted = [None] * len(self.names) if rule.keeps_masks else predicted_sparsity(self.r()).tolist()
        aside = not self.finished and not self._step.mount.holds_pruned
        counts: list[int | None] = [*self.counts()] if aside else [None] * len(predicted)
        rows = zip(self.parameters, counts, predicted, strict=True)
        return {id(p): Known(n, s) for p, n, s in rows}

    @contextmanager
    def latents(self) -> Iterator[None]:
        """Let the model compute with its latent weights for a while, for instance to average them.

        >>> import pareback as pb
        >>> model = torch.nn.Linear(100, 20)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
        >>> with pruner.latents():
        ...     dense = int(model.weight.count_nonzero())
        >>> dense, int(model.weight.count_nonzero())
        (2000, 200)
        """
        if self.finished:
            raise InvalidUse("The pruner has finished and let go of the latent weights.")
        if self._looking == "latents()":  # within another such block, which ends it
            yield
            return
        self._refuse_within("latents()")
        self._settle()
        step = self._step
        with torch.no_grad(), step.edits.writing():
            step.adopt_edits()
            for part, members in enumerate(step.groups.parts):
                if members:
                    step.mount.show_latents(part)
                    step.mount.pruned_at(members, torch.zeros(len(members)))
                    step.held[part] = True
        self._attachment.looking = "latents()"
        try:
            yield
        finally:
            self._attachment.looking = ""
            self._settle()

    @property
    def ramp_ended(self) -> bool:
        """Whether the full goal is asked for by now. Waits for the device."""
        controller = self._step.controller
        if isinstance(controller.rule, MaskRule):
            controller.rule.catch_up(controller.state.step)
        return bool(controller.share_asked() >= 1.0)

    @contextmanager
    def landed(self) -> Iterator[None]:
        """Let the model hold for a while what :meth:`finish` would leave, to save or to judge it.

        In training the weights are a few off the budget, at most; here they meet it exactly. Afterwards the model is
        what it was, bit for bit, and training goes on as if nothing had been asked. While the ramp lasts, nothing
        changes: the goal is not asked for in full yet.

        >>> import pareback as pb
        >>> model = torch.nn.Linear(100, 20)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=50, ramp=0)
        >>> with pruner.landed():
        ...     int(model.weight.count_nonzero())
        200
        """
        self._refuse_within("landed()")
        if self.finished or not self._step.mount.holds_pruned or not self.ramp_ended:
            yield
            return
        self._settle()
        weights = [local(p.detach()) for p in self.parameters]
        shown = [(weight, weight.clone()) for weight in weights]
        with torch.no_grad(), self._step.edits.writing():
            edited = self._step.edited()
            self._lander.take_over()
            for i, value in self._lander.final():
                self._step.mount.land(i, value)
        self._attachment.looking = "landed()"
        try:
            yield
        finally:
            self._attachment.looking = ""
            with self._step.edits.writing():
                _give_back([*shown, *edited])

    def landed_tensors(self) -> dict[str, Tensor]:
        """Return by name copies of the weights that :meth:`landed` would show; none where it would show no others."""
        if self.finished or not self.ramp_ended:
            return {}
        self._settle()
        with torch.no_grad(), self._step.edits.writing():
            edited = self._step.edited() if self._step.mount.holds_pruned else []
            self._lander.take_over()
            found = {self.names[i]: like(value, self.parameters[i]) for i, value in self._lander.final()}
            _give_back(edited)
            return found

    def prune_(self, model: nn.Module) -> nn.Module:
        """Prune a copy of the model, such as an average of its latent weights, to the same non-zeros per tensor."""
        theirs = plain_names(model)
        self._settle()
        for name, value in self._lander.copies(model, self.counts()):
            local(theirs[name].detach()).copy_(value)
        return model

    def landed_copies(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a copy's weights by name, pruned to what :meth:`landed` would keep. The copy stays as it is."""
        landed = [local(value).count_nonzero() for value in self.landed_tensors().values()]
        counts = self._shards.gather(torch.stack(landed)[None]).sum(0)[0].tolist() if landed else self.counts()
        theirs = plain_names(model)
        self._settle()
        return {name: like(value, theirs[name]) for name, value in self._lander.copies(model, counts)}

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` has been called."""
        return self._report is not None

    def finish(self) -> Report:
        """Land on the goal exactly, remove the hooks, and return the report. Calling it again changes nothing."""
        if self._report is not None:
            return self._report
        from ..report import report_on

        self._refuse_within("finish()")
        self._settle()
        self._attachment.check_present()
        done, rule = int(self._step.controller.state.step), self._step.controller.rule
        if isinstance(rule, MaskRule):
            rule.catch_up(self._step.controller.state.step)
        early = self.total_steps is not None and done < self.total_steps
        if early:
            warnings.warn(
                f"finish() was called after {done} of {self.total_steps} steps; the model is cut to its final budget "
                "now, without the training that was planned to follow.",
                stacklevel=2,
            )
        with torch.no_grad():
            expected = sum(self.counts())
            self._lander.take_over()
            shown = self._lander.nonzeros_shown() if self._step.mount.holds_pruned else expected
            self._lander.land()
            cut = shown - sum(self.counts())
        edited = abs(shown - expected) > max(_CUT * expected, _HANDFUL)
        if edited and not early and cut > 0:
            warnings.warn(
                f"finish() cut {cut:,} of {shown:,} non-zero weights in one shot: the weights were not those "
                "that this pruner had brought to the budget (a checkpoint from the middle of the ramp, or weights "
                "from elsewhere). Evaluate the model again, and fine-tune it under pb.freeze().",
                stacklevel=2,
            )
        now = self.spreads()
        warn_of_growth(self.names, self._spread_before.to(now.device), now)
        self._attachment.end()
        pruned_here.add(self.model)
        self._report = report_on(self.model, self.known(), self._resolved.flops)
        for note in self.goal.notes(self._resolved, self.counts()):
            warnings.warn(note, stacklevel=2)
        return self._report

    # -- checkpoints and copies --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; it loads under ``torch.load(weights_only=True)``.

        Of a sharded model it has this process's shards; with an optimizer that Accelerate has prepared, all of them,
        and every process has to ask.
        """
        self._settle()
        state = saved.state_of(self._step, self.goal, self.latent_tensors())
        if self._looking == "landed()":  # beside weights that are not those of the training
            state["landed"] = True
        return saved.whole_state(state) if self._saved_whole else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Load the model's own weights before or after; the order does not matter."""
        if self.finished:
            raise InvalidUse("The pruner has finished: finish() let go of what a state would be loaded into.")
        self._refuse_within("load_state_dict()")
        state = saved.checked(state, self.names)
        self._settle()
        saved.load_into(self._step, self.goal, state)
        self._attachment.state_loaded(bool(state.get("landed")))

    def _refuse_within(self, what: str) -> None:
        if self._looking:
            raise InvalidUse(f"{what} was asked for inside pruner.{self._looking}. Leave the block first.")

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_within("A copy of the pruner")
        self._settle()
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on as a copy, or after unpickling."""
        vars(self).update(state)
        if not self.finished:
            self._attachment.revive()


def _give_back(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Leave tensors as they were when they were copied."""
    with torch.no_grad():
        for tensor, value in copies:
            tensor.copy_(value)
