"""Noticed, never silent: what pulls model, optimizer and pruner apart is carried on with, or said in a sentence."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import PRUNED, assert_same, backward, batches, copied, network, nonzeros, train
from optimizers import Fails, Sam, adamw, sgd
from saving import saved_and_loaded
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pareback as pb

#: 80 % of the 1,280 + 2,048 weights are to go, over the first 20 of 40 steps.
GOAL, KEPT, TOTAL, RAMP = pb.Budget(sparsity=0.8), 665, 40, 20

Run = tuple[nn.Sequential, torch.optim.Optimizer, Any]


MAKERS = pytest.mark.parametrize("make", [sgd, adamw])


def in_training(mount: Any = pb.Pruner, steps: int = 25, make: Any = sgd, seed: int = 0) -> Run:
    model = network(seed)
    optimizer = make(model.parameters())
    pruner = mount(model, optimizer, GOAL, total_steps=TOTAL)
    train(model, optimizer, batches(TOTAL)[:steps])
    return model, optimizer, pruner


def seen(model: nn.Module) -> list[int]:
    """Count the non-zeros that the forward pass sees, also where weights are parametrized."""
    return [int(model.get_submodule(name[0]).weight.count_nonzero()) for name in PRUNED]


def latents(pruner: Any) -> dict[str, Tensor]:
    return copy.deepcopy(pruner.state_dict()["latents"])


def words(*parts: str) -> str:
    """Return a pattern that finds a message with all of these in it, in whatever order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the messages of all warnings within the block."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(one.message) for one in caught]


# -- parameters that are no longer the model's --------------------------------------------------------------------


def assign(model: nn.Sequential) -> None:
    model.load_state_dict(copied(network(seed=7)), assign=True)


def replace(model: nn.Sequential) -> None:
    model[0] = nn.Linear(20, 64)


LEAVING = {"assign=True": (assign, PRUNED), "another layer": (replace, PRUNED[:1])}


@EITHER_MOUNT
@pytest.mark.parametrize("ask", ["step", "metrics"])
@pytest.mark.parametrize("how", LEAVING)
def test_parameters_that_left_the_model_are_named(how: str, ask: str, mount: Any) -> None:
    """The optimizer goes on moving tensors that no forward pass sees; the next step says so, and so do the metrics."""
    model, optimizer, pruner = in_training(mount)
    leave, names = LEAVING[how]
    leave(model)
    backward(model, batches(1)[0])
    with pytest.warns(UserWarning, match=words(*map(repr, names), "no longer", "optimizer still moves")) as caught:
        optimizer.step() if ask == "step" else pruner.metrics()
    others = [repr(name) for name in PRUNED if name not in names]
    assert not any(other in str(one.message) for other in others for one in caught)


@EITHER_MOUNT
@pytest.mark.parametrize("how", LEAVING)
def test_finish_refuses_a_model_whose_parameters_left(how: str, mount: Any) -> None:
    """A report on weights that were never trained would be nonsense: an error names them and changes nothing."""
    model, _, pruner = in_training(mount, TOTAL)
    leave, names = LEAVING[how]
    leave(model)
    before = copied(model)
    with pytest.raises(pb.UserError, match=words(*map(repr, names), "no longer")) as caught:
        pruner.finish()
    assert isinstance(caught.value, RuntimeError)
    assert_same(copied(model), before)
    assert not pruner.finished


def test_assigned_weights_train_on_with_an_optimizer_and_a_pruner_of_their_own() -> None:
    """The way out: a new optimizer and a new pruner, the old ones being dropped. Nothing is said, the budget is met."""
    model, optimizer, pruner = in_training()
    assign(model)
    optimizer = sgd(model.parameters())
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL)
    for batch in batches(TOTAL):
        train(model, optimizer, [batch])
        assert nonzeros(model) == pruner.counts()
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


# -- copies of a whole run ----------------------------------------------------------------------------------------


def unpickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


ORDERS = ["model optimizer pruner", "pruner optimizer model", "optimizer model pruner", "optimizer pruner model"]
WAYS = [
    *((pb.Pruner, copy.deepcopy, order, sgd) for order in ORDERS),
    *((pb.ParametrizedPruner, copy.deepcopy, order, sgd) for order in ORDERS[:2]),  # torch cannot pickle these models
    *((pb.Pruner, unpickled, order, adamw) for order in ORDERS[:2]),
    (pb.Pruner, copy.deepcopy, ORDERS[0], adamw),
    (pb.Pruner, saved_and_loaded, ORDERS[0], sgd),
]


def go_on_side_by_side(run: tuple[Any, Any, Any], twin: tuple[Any, Any, Any], data: Sequence[Any]) -> None:
    """Train the copy, then the original, on the same batches; they end alike, and neither has moved the other."""
    model, optimizers, pruner = run
    before, counts, step = copied(model), pruner.counts(), int(pruner.metrics()["step"])
    train(twin[0], twin[1], data)
    assert_same(copied(model), before)
    assert (pruner.counts(), int(pruner.metrics()["step"])) == (counts, step)
    assert seen(twin[0]) == twin[2].counts() != counts

    after = copied(twin[0])
    train(model, optimizers, data)
    assert_same(copied(twin[0]), after)
    assert_same(after, copied(model))
    assert twin[2].finish().as_dict() == pruner.finish().as_dict()
    assert sum(nonzeros(twin[0])) == sum(nonzeros(model)) == KEPT
    assert_same(copied(twin[0]), copied(model))


@pytest.mark.slow
@pytest.mark.parametrize(("mount", "way", "order", "make"), WAYS)
def test_a_copy_of_model_optimizer_and_pruner_prunes_by_itself(mount: Any, way: Any, order: str, make: Any) -> None:
    """Copied together, in whatever order, the three belong together: the copy trains to the same bits and budget."""
    run = dict(zip(("model", "optimizer", "pruner"), in_training(mount, 10, make), strict=True))
    twin = way({name: run[name] for name in order.split()})
    assert all(twin[name] is not run[name] for name in run)
    assert twin["pruner"].model is twin["model"]
    wanted = ("model", "optimizer", "pruner")
    go_on_side_by_side(tuple(run[n] for n in wanted), tuple(twin[n] for n in wanted), batches(TOTAL)[10:])


@pytest.mark.parametrize("way", [copy.deepcopy, unpickled])
def test_a_copied_tuple_prunes_by_itself(way: Any) -> None:
    """As above for ``copy.deepcopy((model, optimizer, pruner))``; a copy of the copy does, too."""
    run = in_training(steps=10)
    first = way(run)
    go_on_side_by_side(first, way(first), batches(TOTAL)[10:])
    assert int(run[2].metrics()["step"]) == 10
    train(run[0], run[1], batches(TOTAL)[10:])
    run[2].finish()
    assert_same(copied(run[0]), copied(first[0]))


@EITHER_MOUNT
def test_a_copy_of_the_pruner_alone_brings_model_and_optimizers(mount: Any) -> None:
    """``deepcopy(pruner)`` is a whole run: ``twin.model`` and ``twin.optimizers``, here two of them, train on."""
    model = network()
    optimizers = [sgd(model[:2].parameters()), adamw(model[2:].parameters())]
    pruner = mount(model, optimizers, GOAL, total_steps=TOTAL)
    train(model, optimizers, batches(TOTAL)[:10])
    twin = copy.deepcopy(pruner)
    assert [type(one) for one in twin.optimizers] == [torch.optim.SGD, torch.optim.AdamW]
    assert not set(map(id, twin.model.parameters())) & set(map(id, model.parameters()))
    assert list(pruner.optimizers) == optimizers
    go_on_side_by_side((model, optimizers, pruner), (twin.model, twin.optimizers, twin), batches(TOTAL)[10:])


# -- errors within a step -----------------------------------------------------------------------------------------


def failing(parameters: Any) -> Fails:
    return Fails(parameters, lr=0.1)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    backward(model, batch)
    optimizer.step()


def closure_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.step(lambda: backward(model, batch))


def scaled_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(batch[0]), batch[1])).backward()
    scaler.step(optimizer)
    scaler.update()


CALLS = pytest.mark.parametrize("call", [plain_step, closure_step, scaled_step])


def assert_pruned_when_caught(model: nn.Module, pruner: Any, step: Callable[[], None]) -> None:
    """Take a step that raises, and look at the model where the user does: in the except block, asking nobody."""
    try:
        step()
    except (OSError, KeyboardInterrupt):
        counts = nonzeros(model)
        saved = copied(model)
    else:
        pytest.fail("the step did not raise")
    assert sum(counts) == pytest.approx(KEPT, abs=60)  # half a step may have moved weights across the thresholds
    assert [int(saved[name].count_nonzero()) for name in PRUNED] == counts
    assert pruner.counts() == counts
    assert_same(copied(model), saved)  # asking has changed nothing
    with pruner.latents():
        assert nonzeros(model) == [1280, 2048]


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@CALLS
def test_a_step_that_raises_leaves_a_pruned_model(call: Any, error: BaseException) -> None:
    """Whatever is caught, and however the step was called: the model holds pruned weights, and training goes on."""
    model, optimizer, pruner = in_training(make=failing)
    data = batches(TOTAL)
    for _ in range(2):
        optimizer.error = error
        assert_pruned_when_caught(model, pruner, lambda: call(model, optimizer, data[25]))
    optimizer.error = None
    for batch in data[25:]:
        call(model, optimizer, batch)
        assert nonzeros(model) == pruner.counts()
        assert sum(nonzeros(model)) == pytest.approx(KEPT, abs=60)
    assert int(pruner.metrics()["step"]) == TOTAL  # a step that failed is none
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


HOOKS = {
    "pre": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "post": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "global pre": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "global post": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("call", [plain_step, closure_step])
@pytest.mark.parametrize("where", HOOKS)
def test_a_hook_that_raises_leaves_a_pruned_model(where: str, call: Any) -> None:
    """A hook of the user's, registered in mid-training, checks something and raises, at its first call or a later."""
    model, optimizer, pruner = in_training()
    data = batches(TOTAL)
    full = True

    def check(*_: Any) -> None:
        if full:
            raise OSError("the disk is full")

    handle = HOOKS[where](optimizer, check)
    try:
        assert_pruned_when_caught(model, pruner, lambda: call(model, optimizer, data[25]))
        full = False
        train(model, optimizer, data[25:30])
        full = True
        assert_pruned_when_caught(model, pruner, lambda: call(model, optimizer, data[30]))
    finally:
        handle.remove()
    train(model, optimizer, data[30:])
    assert nonzeros(model) == pruner.counts()
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


def test_a_closure_that_raises_leaves_a_pruned_model() -> None:
    """Nothing has been moved then: the very weights of before are there, and the step does not count."""
    model, optimizer, pruner = in_training()
    before = copied(model)

    def closure() -> Tensor:
        backward(model, batches(1)[0])
        raise OSError("the disk is full")

    assert_pruned_when_caught(model, pruner, lambda: optimizer.step(closure))
    assert_same(copied(model), before)
    train(model, optimizer, batches(TOTAL)[25:])
    assert int(pruner.metrics()["step"]) == TOTAL
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


@pytest.mark.parametrize(
    ("mount", "call"),
    [*((pb.Pruner, call) for call in (plain_step, closure_step, scaled_step)), (pb.ParametrizedPruner, plain_step)],
)
@pytest.mark.parametrize("built", ["before", "after"])
def test_schedulers_go_along(built: str, call: Any, mount: Any) -> None:
    """Built before the pruner or after it, a schedule runs as without one, past a failed step and past finish();
    torch warns of an optimizer whose step was replaced behind a scheduler's back, and does not here."""

    def schedule() -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

    model, data = network(), batches(TOTAL)
    optimizer = failing(model.parameters())
    if built == "before":
        scheduler = schedule()
    pruner = mount(model, optimizer, GOAL, total_steps=TOTAL)
    if built == "after":
        scheduler = schedule()
    for number, batch in enumerate(data):
        if number in (0, 25):
            optimizer.error = OSError("the disk is full")
            if number == 25 and mount is pb.Pruner:
                assert_pruned_when_caught(model, pruner, lambda batch=batch: call(model, optimizer, batch))
            else:
                with pytest.raises(OSError, match="disk"):
                    call(model, optimizer, batch)
            optimizer.error = None
        call(model, optimizer, batch)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** ((number + 1) // 10))
    assert seen(model) == pruner.counts()
    assert pruner.finish().pruned_nonzeros == KEPT
    again = schedule()
    call(model, optimizer, data[0])
    scheduler.step()
    again.step()


# -- an optimizer in the place of the known one -------------------------------------------------------------------


@EITHER_MOUNT
def test_a_new_optimizer_is_pruned_beside_from_its_first_step(mount: Any) -> None:
    """Replaced in the middle of the ramp without a word to the pruner: it says once that pruning goes on, and it does,
    along the ramp and from the latent weights that there are."""
    model, optimizer, pruner = in_training(mount, steps=8)
    data, before = batches(TOTAL), latents(pruner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backward(model, data[8])
    with pytest.warns(UserWarning, match="goes on"):
        optimizer.step()
    for name, latent in latents(pruner).items():  # the first step of AdamW moves a weight by its rate at most
        assert latent.count_nonzero() == latent.numel()
        assert (latent - before[name]).abs().max() < 1.02e-3
    for number in range(9, TOTAL + 1):
        if number > 9:
            train(model, optimizer, [data[number - 1]])  # says nothing more
        asked = 3328 * (1 - 0.8 * (1 - (1 - min(1.0, number / RAMP)) ** 3))
        assert int(pruner.metrics()["step"]) == number
        assert seen(model) == pruner.counts()
        assert sum(seen(model)) == pytest.approx(asked, abs=60)
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


def test_a_new_optimizer_sets_the_pace_of_the_thresholds() -> None:
    """They follow its learning rate: at nearly none they hardly move in ten steps, though the old one's was large."""

    def run(rate: float) -> Tensor:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=10.0))
        train(model, optimizer, batches(3))
        start = pruner.r()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        with pytest.warns(UserWarning, match="goes on"):
            train(model, optimizer, batches(10))
        return (pruner.r() - start).abs().max()

    assert run(1e-7) < 1e-4 < 1e-3 < run(1e-2)


def test_lbfgs_in_the_place_of_another_optimizer_is_refused() -> None:
    """It would evaluate the model on unpruned weights, as at construction; nothing has changed, the old one goes on."""
    model, optimizer, pruner = in_training()
    before = copied(model)
    other = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    with pytest.raises(pb.UserError, match=words("LBFGS", "ParametrizedPruner")) as caught:
        other.step(lambda: backward(model, batches(1)[0]))
    assert isinstance(caught.value, ValueError)
    assert_same(copied(model), before)
    assert nonzeros(model) == pruner.counts()
    train(model, optimizer, batches(TOTAL)[25:])
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


@EITHER_MOUNT
@pytest.mark.parametrize("whose", ["another model's", "the head's"])
def test_optimizers_of_other_parameters_are_left_alone(whose: str, mount: Any) -> None:
    """A discriminator, a student, an unpruned head: their optimizers step as if there were no pruner."""
    model, optimizer, pruner = in_training(mount, steps=0)
    other = model if whose == "the head's" else network(3)
    own = sgd(model[4].parameters() if other is model else other.parameters())
    for batch in batches(TOTAL):
        train(model, optimizer, [batch])
        train(other, own, [batch])
        assert seen(model) == pruner.counts()
    if other is not model:
        assert nonzeros(other) == [1280, 2048]
    assert int(pruner.metrics()["step"]) == TOTAL
    assert pruner.finish().pruned_nonzeros == KEPT


def test_a_wrapper_around_the_known_optimizer_is_no_other_one() -> None:
    """SAM holds the same groups and steps the optimizer inside: nothing to notice, and a step counts once."""
    model = network()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    pruner = pb.Pruner(model, sam.base_optimizer, GOAL, total_steps=TOTAL)
    for number, batch in enumerate(batches(TOTAL)):
        backward(model, batch)
        sam.step(lambda batch=batch: backward(model, batch))
        assert int(pruner.metrics()["step"]) == number + 1
        assert nonzeros(model) == pruner.counts()
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


# -- parameters that joined the optimizer -------------------------------------------------------------------------


def thawing(mount: Any = pb.Pruner, **options: Any) -> Run:
    """Return a run whose second layer was frozen when the pruner was built, and trains from now on."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    pruner = mount(model, optimizer, GOAL, total_steps=TOTAL, **options)
    assert pruner.names == ["0.weight"]
    train(model, optimizer, batches(5))
    model[2].requires_grad_(True)
    return model, optimizer, pruner


@EITHER_MOUNT
def test_a_tensor_that_joined_the_optimizer_unpruned_is_named_once(mount: Any) -> None:
    """Gradual unfreezing: the next step says what is not pruned and how it would be, later steps nothing. The advice
    works: a second pruner takes it over."""
    model, optimizer, pruner = thawing(mount)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    backward(model, batches(1)[0])
    with pytest.warns(UserWarning, match=words("'2.weight'", "not pruned", "include=")) as caught:
        optimizer.step()
    assert not any("bias" in str(one.message) for one in caught)
    train(model, optimizer, batches(4))
    assert seen(model)[1] == 2048

    second = mount(model, optimizer, pb.Budget(sparsity=0.5), total_steps=30, include="2.weight")
    train(model, optimizer, batches(30))
    assert pruner.finish().pruned_nonzeros == 256
    assert second.finish().pruned_nonzeros == 1024
    assert nonzeros(model) == [256, 1024]


@pytest.mark.parametrize("what", ["bias", "small", "another model's", "left out", "pruned at once"])
def test_tensors_that_joined_and_are_not_to_be_pruned_cause_no_warning(what: str) -> None:
    """Biases, tensors below the smallest size, those of another model, those that the user left out with exclude= and
    those that have a pruner of their own already."""
    model, optimizer, pruner = thawing(exclude="2.*") if what == "left out" else thawing()
    joining = {
        "bias": [model[2].bias],
        "small": [nn.Parameter(torch.randn(9, 9))],
        "another model's": list(network(3).parameters()),
    }.get(what, list(model[2].parameters()))
    if what == "small":
        model.register_parameter("small", joining[0])
    optimizer.add_param_group({"params": joining})
    if what == "pruned at once":
        pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.5), include="2.weight")
    train(model, optimizer, batches(5))
    assert int(pruner.metrics()["step"]) == 10


# -- optimizers that step unequally -------------------------------------------------------------------------------


def of_two(mount: Any, total: int = TOTAL) -> tuple[nn.Sequential, list[torch.optim.Optimizer], Any]:
    model = network()
    optimizers = [sgd(model[:2].parameters()), adamw(model[2:].parameters())]
    return model, optimizers, mount(model, optimizers, GOAL, total_steps=total)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mount", "times"), [(pb.Pruner, (5, 1)), (pb.ParametrizedPruner, (5, 1)), (pb.Pruner, (1, 5))]
)
def test_rounds_end_with_the_last_optimizer(times: tuple[int, int], mount: Any) -> None:
    """Five steps of one to one of the other: steps of the last one count. When the two are more than 10 apart, in the
    third round, a warning says so once; two rounds before that nothing did."""
    model, optimizers, pruner = of_two(mount, total=24 * times[1])
    said: list[list[str]] = []
    for number, batch in enumerate(batches(24), 1):
        with heard() as messages:
            for optimizer, often in zip(optimizers, times, strict=True):
                for _ in range(often):
                    backward(model, batch)
                    optimizer.step()
        said.append(messages)
        assert int(pruner.metrics()["step"]) == number * times[1]
        assert seen(model) == pruner.counts()
    assert [len(messages) for messages in said] == [0, 0, 1] + [0] * 21
    assert re.search(words("round", "last"), said[2][0])
    assert sum(seen(model)) == pytest.approx(KEPT, abs=60)
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == KEPT


@EITHER_MOUNT
@pytest.mark.parametrize("swapped", [False, True])
def test_equal_steps_cause_no_warning(swapped: bool, mount: Any) -> None:
    """In the order given or the other, with an optimizer of unpruned tensors beside them that steps when it likes."""
    model, optimizers, pruner = of_two(mount)
    extra = nn.Parameter(torch.zeros(5))
    beside = torch.optim.SGD([extra], lr=0.1)
    for number, batch in enumerate(batches(TOTAL)):
        train(model, optimizers[::-1] if swapped else optimizers, [batch])
        for _ in range(number % 3):
            beside.step()
    assert int(pruner.metrics()["step"]) == TOTAL
    assert pruner.finish().pruned_nonzeros == KEPT


def test_an_optimizer_without_pruned_tensors_keeps_its_own_time() -> None:
    """It was given to the pruner, last even; rounds end with the last one that has tensors to prune, and how often
    this one steps is nobody's business."""
    model = network()
    body, head = sgd(model[:4].parameters()), adamw(model[4].parameters())
    pruner = pb.Pruner(model, [body, head], GOAL, total_steps=TOTAL)
    for number, batch in enumerate(batches(TOTAL)):
        train(model, body if number % 5 else [body, head], [batch])
    assert int(pruner.metrics()["step"]) == TOTAL
    assert pruner.finish().pruned_nonzeros == KEPT


# -- resuming without the pruner's state --------------------------------------------------------------------------


def checkpoint(make: Any, steps: int = 10) -> dict[str, Any]:
    """Return the three states of a run in the middle of the ramp: some 70 % of the weights are zero."""
    model, optimizer, pruner = in_training(pb.Pruner, steps, make)
    things = {"model": model, "optimizer": optimizer, "pruner": pruner}
    return {name: copy.deepcopy(thing.state_dict()) for name, thing in things.items()}


STARTS_ANEW = words("anew", "pruner.state_dict()")


@MAKERS
@pytest.mark.parametrize("order", ["model optimizer", "optimizer model"])
def test_resuming_without_the_pruners_state_is_noticed(order: str, make: Any) -> None:
    """Model and optimizer are in the middle of the ramp, the pruner is at its start: the next step says so, once."""
    state = checkpoint(make)
    model, optimizer, pruner = in_training(pb.Pruner, 0, make, seed=5)
    for name in order.split():
        {"model": model, "optimizer": optimizer}[name].load_state_dict(state[name])
    backward(model, batches(1)[0])
    with pytest.warns(UserWarning, match=STARTS_ANEW):
        optimizer.step()
    train(model, optimizer, batches(5))
    assert int(pruner.metrics()["step"]) == 6


@MAKERS
def test_building_the_pruner_on_a_resumed_run_is_noticed(make: Any) -> None:
    """Loaded first and pruned then: it is said by the end of the first step."""
    state = checkpoint(make)
    model = network(5)
    optimizer = make(model.parameters())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

    def start() -> pb.Pruner:
        pruner = pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL)
        train(model, optimizer, batches(1))
        return pruner

    with pytest.warns(UserWarning, match=STARTS_ANEW) as caught:
        pruner = start()
    assert len(caught) == 1
    train(model, optimizer, batches(5))
    assert int(pruner.metrics()["step"]) == 6


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "pruner"])), ids=" ".join)
def test_resuming_with_all_three_states_is_silent(order: tuple[str, ...]) -> None:
    """In whatever order they are loaded."""
    state = checkpoint(sgd)
    run = dict(zip(("model", "optimizer", "pruner"), in_training(pb.Pruner, 0, seed=5), strict=True))
    for name in order:
        run[name].load_state_dict(state[name])
    train(run["model"], run["optimizer"], batches(5))
    assert int(run["pruner"].metrics()["step"]) == 15


def test_the_pruners_state_may_come_last() -> None:
    """Model and optimizer loaded, then the pruner built, then its state loaded: steps have nothing to say."""
    state = checkpoint(sgd)
    model = network(5)
    optimizer = sgd(model.parameters())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody can know yet that its state will follow
        pruner = pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL)
    pruner.load_state_dict(state["pruner"])
    train(model, optimizer, batches(TOTAL)[10:])
    assert pruner.finish().pruned_nonzeros == KEPT


@EITHER_MOUNT
@pytest.mark.parametrize("how", ["went on", "loaded before", "loaded after", "weights alone"])
def test_pruning_that_starts_on_trained_dense_weights_is_silent(how: str, mount: Any) -> None:
    """A dense model that has been trained, or loaded, is where pruning usually starts, with a used optimizer too."""
    make = adamw if mount is pb.Pruner else sgd
    trained = network(3)
    used = make(trained.parameters())
    train(trained, used, batches(10))
    model = trained if how == "went on" else network(5)
    optimizer = used if how == "went on" else make(model.parameters())

    def load() -> None:
        model.load_state_dict(copied(trained))
        if how != "weights alone":
            optimizer.load_state_dict(copy.deepcopy(used.state_dict()))

    if how == "loaded before":
        load()
    pruner = mount(model, optimizer, GOAL, total_steps=TOTAL)
    if how in ("loaded after", "weights alone"):
        load()
    train(model, optimizer, batches(5))
    assert seen(model) == pruner.counts()


# -- a cut in one shot --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", ["power", "hard"])
@pytest.mark.parametrize("what", ["an earlier epoch", "pruned elsewhere", "dense"])
def test_finish_says_how_much_it_cuts_in_one_shot(what: str, shrink: str) -> None:
    """Weights loaded after the whole training are cut to the budget without any: the numbers are those of the model
    before and after, counted here."""
    model, data = network(), batches(TOTAL)
    optimizer = sgd(model.parameters())
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL, shrink=shrink)
    train(model, optimizer, data[:5])
    early = copied(model)
    train(model, optimizer, data[5:])
    other = network(7)
    if what == "pruned elsewhere":
        assert pb.prune_(other, pb.Budget(sparsity=0.5)).pruned_nonzeros == 1664
    model.load_state_dict(early if what == "an earlier epoch" else copied(other))
    there = [model.get_parameter(name).detach() != 0 for name in PRUNED]
    had = sum(int(mask.sum()) for mask in there)
    assert had > 2 * KEPT

    with pytest.warns(UserWarning, match="non-zero") as caught:
        pruner.finish()
    assert len(caught) == 1
    left = sum(nonzeros(model))
    gone = sum(int((mask & (model.get_parameter(n) == 0)).sum()) for n, mask in zip(PRUNED, there, strict=True))
    assert left == KEPT
    message = str(caught[0].message)
    # Where what had been pruned before comes back, more is cut than the difference; either is a true number.
    assert any(f"{cut:,} of {had:,} non-zero" in message for cut in (had - left, gone))


@pytest.mark.parametrize(("mount", "make"), [(pb.Pruner, sgd), (pb.Pruner, adamw), (pb.ParametrizedPruner, sgd)])
@pytest.mark.parametrize(
    "goal",
    [GOAL, pb.Budget(sparsity=0.8, enforce="squared"), pb.Fixed(sparsity=0.8), pb.Unconstrained()],
    ids=["exact", "squared", "search", "unconstrained"],
)
def test_finishing_a_whole_training_is_silent(goal: pb.Goal, make: Any, mount: Any) -> None:
    """There is always a weight or two to cut at the end; that is no news."""
    model = network()
    optimizer = make(model.parameters())
    pruner = mount(model, optimizer, goal, total_steps=TOTAL)
    train(model, optimizer, batches(TOTAL))
    with heard() as messages:
        pruner.finish()
    assert messages == []


@EITHER_MOUNT
@pytest.mark.parametrize("steps", [0, 3, 15])
def test_finishing_early_is_said_once(steps: int, mount: Any) -> None:
    """The warning of a training cut short covers the cut."""
    model, _, pruner = in_training(mount, steps)
    with heard() as messages:
        pruner.finish()
    assert len(messages) == 1
    assert f"after {steps} of {TOTAL} steps" in messages[0]
    assert sum(nonzeros(model)) == KEPT


# ---------------------------------------------------------------- what a review found


@pytest.mark.slow
def test_a_pruner_that_nobody_can_reach_is_in_nobodys_way() -> None:
    """A function that failed and is tried again: the pruner of the first try is garbage, and not at work."""
    model = network()

    def attempt() -> None:
        pb.Pruner(model, sgd(model.parameters()), GOAL, total_steps=TOTAL)

    attempt()
    attempt()
    kept = sgd(model.parameters())
    pb.Pruner(model, kept, GOAL, total_steps=TOTAL)
    with pytest.raises(pb.UserError, match="being pruned by another pruner already"):
        attempt()


@pytest.mark.parametrize("what", ["finish", "copy"])
def test_within_latents_there_is_no_end_and_no_copy(what: str) -> None:
    """The weights are not the pruned ones there: a sentence says so, and everything goes on afterwards."""
    model, optimizer, pruner = in_training()
    with pruner.latents(), pytest.raises(pb.UserError, match=r"inside pruner\.latents\(\)"):
        pruner.finish() if what == "finish" else copy.deepcopy((model, optimizer, pruner))
    train(model, optimizer, batches(TOTAL)[25:])
    assert pruner.finish().pruned_nonzeros == KEPT


def test_pruning_further_after_finish_is_silent() -> None:
    """A second pruner on the same model and optimizer: its zeros were made here, and nothing was loaded."""
    model, optimizer, pruner = in_training(steps=TOTAL)
    pruner.finish()
    with heard() as said:
        further = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
        train(model, optimizer, batches(20, seed=3))
    assert said == []
    assert further.finish().pruned_nonzeros == 332


def test_a_scheduler_over_the_hooks_holds_no_finished_pruner() -> None:
    """A scheduler built after the pruner wraps the optimizer's step once more, and keeps what it wrapped."""
    model, optimizer, pruner = in_training()
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train(model, optimizer, batches(TOTAL)[25:])
    pruner.finish()
    watched = weakref.ref(pruner)
    del pruner
    gc.collect()
    assert watched() is None
    train(model, optimizer, batches(2))


class Whole(torch.optim.SGD):
    """An optimizer whose copies take everything along."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def test_a_copied_step_steps_the_copy() -> None:
    """Even where the copy took our guard along, which is bound to it then."""
    model = network()
    optimizer = Whole(model.parameters(), lr=0.05)
    pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL)
    twin = copy.deepcopy(optimizer)
    before = copied(model)
    for parameter in twin.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    values = [p.detach().clone() for p in twin.param_groups[0]["params"]]
    twin.step()
    assert_same(copied(model), before)
    assert all(not torch.equal(old, new) for old, new in zip(values, twin.param_groups[0]["params"], strict=True))


@EITHER_MOUNT
def test_weights_that_blew_up_are_named_at_the_end(mount: Any) -> None:
    """A gradient of a million times the usual throws latent weights far off; a budget that is met does not show it."""
    model, optimizer, pruner = in_training(mount, steps=30)
    backward(model, batches(TOTAL)[30])
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(1e6)
    optimizer.step()
    train(model, optimizer, batches(TOTAL)[31:])
    with pytest.warns(UserWarning, match=words(*PRUNED, "times their spread at the beginning", "clip_grad_norm_")):
        assert pruner.finish().pruned_nonzeros == KEPT
