"""A pruner's life in any order: stepped, skipped, edited, loaded, saved, copied, moved, frozen, interrupted, finished.

Hypothesis draws the order. Whatever it is, the model holds what the latent weights and thresholds say, no latent weight
is lost, a copy and a resumed run go on to the same bits, and the end is the budget.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from networks import PRUNED, backward, batches, network
from torch import Tensor, nn

import pareback as pb
from pareback.kernels import shrunk

TOTAL = 24
DATA = batches(64)
SIZES = [1280, 2048]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
}
GOALS: dict[str, Callable[[], Any]] = {
    "budget": lambda: pb.Budget(sparsity=0.8),
    "penalty": lambda: pb.Budget(sparsity=0.8, enforce="squared", weight=5.0),
    "fixed": lambda: pb.Fixed(sparsity=0.8),
    "unconstrained": lambda: pb.Unconstrained(weight=1.0),
    "feather": lambda: pb.methods.Feather(sparsity=0.8),
    "gmp": lambda: pb.methods.GMP(sparsity=0.8),
    "rigl": lambda: pb.methods.RigL(sparsity=0.8, every=2),
    "acdc": lambda: pb.methods.ACDC(sparsity=0.8),
}
#: Those that keep masks: they have no thresholds to shrink by, and nothing behind their zeros.
MASKED = ("gmp", "rigl", "acdc")


class Life:
    """A model, its optimizer and its pruner."""

    def __init__(self, optimizer: str, goal: str, shrink: str | None) -> None:
        shrink = None if goal in MASKED else shrink
        self.kinds = (optimizer, goal, shrink)
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.pruner = pb.Pruner(self.model, self.optimizer, GOALS[goal](), total_steps=TOTAL, shrink=shrink)

    def step(self, number: int) -> None:
        backward(self.model, DATA[number % len(DATA)])
        with warnings.catch_warnings():  # said where weights were edited
            warnings.filterwarnings("ignore", "Weights outside the masks were given values")
            self.optimizer.step()

    def pruned(self) -> list[Tensor]:
        return [self.model.get_parameter(name).detach() for name in PRUNED]

    def latents(self) -> list[Tensor]:
        return list(self.pruner.latent_tensors().values())

    def masks(self) -> list[Tensor]:
        return list(self.pruner.state_dict().get("masks", {}).values())

    def bits(self) -> list[Tensor]:
        held = [*self.model.state_dict().values(), *self.masks()]
        return [value.clone() for value in (*held, *self.latents(), self.pruner.r(), self.pruner.thresholds())]

    def resumed(self) -> Life:
        """Return what a new process makes of the saved states."""
        file = io.BytesIO()
        states = {"model": self.model, "optimizer": self.optimizer, "pruner": self.pruner}
        torch.save({name: part.state_dict() for name, part in states.items()}, file)
        file.seek(0)
        saved, new = torch.load(file, weights_only=True), Life(*self.kinds)
        while len(new.optimizer.param_groups) < len(self.optimizer.param_groups):
            new.add_group()
        new.model.load_state_dict(saved["model"])
        new.optimizer.load_state_dict(saved["optimizer"])
        new.pruner.load_state_dict(saved["pruner"])
        return new

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    def copied(self, through_pickle: bool) -> Life:
        """Return a copy of all three, which go together."""
        if through_pickle:
            return pickle.loads(pickle.dumps(self))
        return copy.deepcopy(self)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


class PrunersLife(RuleBasedStateMachine):
    """Rules do something to the three; invariants hold after each."""

    @initialize(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        goal=st.sampled_from(sorted(GOALS)),
        shrink=st.sampled_from([None, "hard", "power", "soft"]),
    )
    def begin(self, optimizer: str, goal: str, shrink: str | None) -> None:
        self.life = Life(optimizer, goal, shrink)
        self.number = 0
        self.steps = 0
        self.edited = False  # whether the weights are another's since the last step
        self.zeroed = 0  # latent weights that somebody set to zero

    @property
    def finished(self) -> bool:
        return self.life.pruner.finished

    # -- what may happen -----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.finished)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.life.step(self.number)
            self.number += 1
            self.steps += 1
        self.edited = False

    @precondition(lambda self: not self.finished)
    @rule()
    def skip(self) -> None:
        """A batch is computed and not learned from, as after an overflow."""
        before = self.life.bits()
        backward(self.life.model, DATA[self.number % len(DATA)])
        self.number += 1
        assert_equal(self.life.bits(), before)

    @precondition(lambda self: not self.finished)
    @rule()
    def step_without_gradients(self) -> None:
        self.life.optimizer.zero_grad(set_to_none=True)
        self.life.optimizer.step()
        self.steps += 1
        self.edited = False

    @precondition(lambda self: not self.finished)
    @rule(
        tensor=st.integers(0, 1), row=st.integers(0, 31), value=st.sampled_from([0.0, 0.25, -3.0]), data=st.booleans()
    )
    def edit(self, tensor: int, row: int, value: float, data: bool) -> None:
        """A row of weights is written over, in place or through .data; the next step begins from it."""
        weights = self.life.model.get_parameter(PRUNED[tensor])
        with torch.no_grad():
            (weights.data if data else weights)[row] = value
        self.edited = True
        if value == 0.0:  # a zero over a pruned weight is no edit, over another one it is
            self.zeroed += weights.shape[1]

    @precondition(lambda self: not self.finished)
    @rule(seed=st.integers(10, 12))
    def load_other_weights(self, seed: int) -> None:
        other = {name: value.clone() for name, value in network(seed).state_dict().items()}
        self.life.model.load_state_dict(other)
        assert_equal(list(self.life.model.state_dict().values()), list(other.values()))
        self.life.step(self.number)
        self.number, self.steps = self.number + 1, self.steps + 1
        self.edited, self.zeroed = False, 0

    @precondition(lambda self: not self.finished)
    @rule()
    def save_and_resume(self) -> None:
        """A resumed run goes on to the same bits; it is the one that lives on."""
        if self.edited:  # an edit belongs to the model's state, and is adopted by both at their next step
            self.step(1)
        new = self.life.resumed()
        assert_equal(new.bits(), self.life.bits())
        self._go_on_together(new)

    @precondition(lambda self: not self.finished)
    @rule(through_pickle=st.booleans())
    def copy(self, through_pickle: bool) -> None:
        new = self.life.copied(through_pickle)
        assert_equal(new.bits(), self.life.bits())
        self._go_on_together(new)

    def _go_on_together(self, new: Life) -> None:
        for _ in range(2):
            for life in (self.life, new):
                life.step(self.number)
            self.number, self.steps = self.number + 1, self.steps + 1
            assert_equal(new.bits(), self.life.bits())
        self.life, self.edited = new, False

    @precondition(lambda self: not self.finished)
    @rule(through=st.sampled_from([torch.float64, None]))
    def move(self, through: torch.dtype | None) -> None:
        """The model's memory is another one, as after .to(device)."""
        if self.edited:
            self.step(1)
        before = self.life.bits()
        if through is None:
            for parameter in self.life.model.parameters():
                parameter.data = parameter.data.clone()
        else:
            self.life.model.to(through).to(torch.float32)
        assert_equal(self.life.bits(), before)

    @precondition(lambda self: not self.finished)
    @rule(tensor=st.integers(0, 1))
    def freeze_for_a_step(self, tensor: int) -> None:
        """A pruned tensor gets no gradient for a step."""
        weights = self.life.model.get_parameter(PRUNED[tensor]).requires_grad_(False)
        self.life.step(self.number)
        weights.requires_grad_(True)
        self.number, self.steps, self.edited = self.number + 1, self.steps + 1, False

    @precondition(lambda self: not self.finished and len(self.life.optimizer.param_groups) < 3)
    @rule()
    def add_a_group(self) -> None:
        before = self.life.bits()
        self.life.add_group()
        assert_equal(self.life.bits(), before)

    @precondition(lambda self: not self.finished)
    @rule(where=st.sampled_from(["closure", "pre", "post"]))
    def raise_inside_a_step(self, where: str) -> None:
        """The model holds pruned weights where it is caught, and no latent weight is lost."""
        optimizer = self.life.optimizer
        backward(self.life.model, DATA[self.number % len(DATA)])

        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        register = {"pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook}
        handle = register[where](fail) if where != "closure" else None
        with pytest.raises(OSError, match="disk"):
            optimizer.step(fail if where == "closure" else None)
        if handle is not None:
            handle.remove()
        self.life.pruner.counts()
        if where == "post":  # the step itself is done
            self.steps, self.edited = self.steps + 1, False

    @precondition(lambda self: not self.finished)
    @rule()
    def look_at_latents(self) -> None:
        if self.edited:
            self.step(1)
        kept = [value.clone() for value in self.life.latents()]
        with self.life.pruner.latents():
            assert_equal(self.life.pruned(), kept)
        assert_equal(self.life.latents(), kept)

    @precondition(lambda self: not self.finished and self.steps > 2)
    @rule()
    def finish(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "finish\\(\\) was called after|finish\\(\\) cut")
            report = self.life.pruner.finish()
        counts = [int(value.count_nonzero()) for value in self.life.pruned()]
        assert report.pruned_nonzeros == sum(counts)
        if self.life.kinds[1] in ("budget", "feather") or (self.life.kinds[1] in MASKED and not self.zeroed):
            assert sum(counts) == math.floor(sum(SIZES) * 0.2 + 1e-9)
        if self.life.kinds[1] == "fixed":
            assert counts == [256, 409]
        assert self.life.pruner.finish() is report
        self.frozen = False

    @precondition(lambda self: self.finished)
    @rule()
    def fine_tune(self) -> None:
        """What is left moves on, under pb.freeze, and zeros stay zeros."""
        if not self.frozen:
            pb.freeze(self.life.model, self.life.optimizer)
            self.frozen = True
        before = [value == 0 for value in self.life.pruned()]
        self.life.step(self.number)
        self.number += 1
        assert all(bool((value[zeros] == 0).all()) for value, zeros in zip(self.life.pruned(), before, strict=True))

    # -- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_model_is_what_latents_and_thresholds_say(self) -> None:
        life = self.life
        assert all(value.isfinite().all() for value in life.model.state_dict().values())
        if self.finished or self.edited:
            return
        again = shrunk(life.latents(), life.pruner.thresholds(), life.pruner.exponent)
        assert_equal(life.pruned(), again)
        assert life.pruner.counts() == [int(value.count_nonzero()) for value in life.pruned()]

    @invariant()
    def no_latent_weight_is_lost(self) -> None:
        if not self.finished and self.life.kinds[1] not in MASKED:
            dense = sum(int(value.count_nonzero()) for value in self.life.latents())
            assert dense >= sum(SIZES) - self.zeroed

    @invariant()
    def nothing_is_outside_the_masks(self) -> None:
        if not self.finished and not self.edited:
            pairs = zip(self.life.pruned(), self.life.masks(), strict=self.life.kinds[1] in MASKED)
            assert not any(bool(value[~mask].any()) for value, mask in pairs)

    @invariant()
    def steps_are_counted(self) -> None:
        if not self.finished:
            assert int(self.life.pruner.metrics()["step"]) == self.steps
        if not self.finished and self.life.kinds[1] in MASKED:  # masks have a count of their own
            asked = self.life.pruner.goal.share(self.steps, TOTAL)
            assert float(self.life.pruner.metrics()["share"]) == pytest.approx(asked)


#: A few dozen lives, always the same ones: what fails here can be run again. PAREBACK_LIVES draws so many others.
LIVES = int(os.environ.get("PAREBACK_LIVES", "0"))
PrunersLife.TestCase.settings = settings(
    max_examples=LIVES or 60,
    stateful_step_count=20,
    deadline=None,
    derandomize=not LIVES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_a_pruners_life = PrunersLife.TestCase
