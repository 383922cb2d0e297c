"""Checkpoints: a resumed run goes on bit for bit, and a state that does not fit is refused before anything changes."""

import copy
import warnings

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import assert_same, batches, copied, network, train
from saving import saved_and_loaded

import pareback as pb

OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
}
GOALS = {
    "exact": (pb.Budget(sparsity=0.9), {}),
    "exact-two-limits": (pb.Budget(sparsity=0.8, bytes=0.4), {}),
    "extremes": (pb.Budget(sparsity=0.6, extremes=(0.4, 0.7)), {}),
    "extremes-hinge": (pb.Budget(sparsity=0.6, enforce="hinge", extremes=(0.4, 0.7)), {}),
    "squared": (pb.Budget(sparsity=0.8, enforce="squared"), {}),
    "search": (pb.Fixed(sparsity=0.8), {}),
    "search-ramped": (pb.Fixed(sparsity=0.8), {"ramp": 0.9}),
    "gaussian": (pb.Fixed(sparsity=0.8, bound="gaussian"), {}),
    "unconstrained": (pb.Unconstrained(weight=1.0), {}),
    "soft": (pb.Unconstrained(weight=1.0), {"shrink": "soft"}),
    "no-straight-through": (pb.Budget(sparsity=0.8), {"straight_through": False}),
}


def states_of(*things):
    """Return the states of things as a checkpoint gives them back through the safe loader."""
    return saved_and_loaded([thing.state_dict() for thing in things], weights_only=True)


def build(seed, optimizer, goal, mount):
    model = network(seed)
    made = OPTIMIZERS[optimizer](model)
    wanted, options = GOALS[goal]
    return model, made, mount(model, made, wanted, total_steps=60, **options)


def everything(model, optimizer, pruner):
    """Return all tensors of a run under one flat set of names."""
    found = copied(model)
    found.update({f"control.{k}": v.clone() for k, v in pruner.state_dict()["control"].items()})
    found.update({f"latents.{k}": v.clone() for k, v in pruner.state_dict()["latents"].items()})
    for number, entry in optimizer.state_dict()["state"].items():
        found.update({f"optimizer.{number}.{k}": v.clone() for k, v in entry.items() if isinstance(v, torch.Tensor)})
    return found


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize(
    ("goal", "optimizer"),
    [*((goal, "sgd") for goal in GOALS), *((goal, "adamw") for goal in ("exact", "search", "unconstrained"))],
)
def test_a_resumed_run_equals_the_straight_one(optimizer, goal, mount):
    """30 steps, a checkpoint file, fresh objects and 30 more: the same bits as 60 at a stretch, and after finish()."""
    data = batches(60)
    straight = build(0, optimizer, goal, mount)
    train(straight[0], straight[1], data[:30])
    states = states_of(*straight)
    resumed = build(11, optimizer, goal, mount)
    for thing, state in zip(resumed, states, strict=True):
        thing.load_state_dict(state)
    assert_same(everything(*resumed), everything(*straight))
    for run in (straight, resumed):
        train(run[0], run[1], data[30:])

    assert_same(everything(*resumed), everything(*straight))
    assert straight[2].finish().as_dict() == resumed[2].finish().as_dict()
    assert_same(copied(resumed[0]), copied(straight[0]))


@EITHER_MOUNT
def test_a_loaded_model_computes_as_the_saved_one_before_any_step(mount):
    """Evaluation right after loading gives the saved model's outputs, without a step in between."""
    model, optimizer, pruner = build(0, "sgd", "exact", mount)
    train(model, optimizer, batches(40))
    x = batches(1, seed=3)[0][0]
    states = states_of(model, optimizer, pruner)
    other = build(7, "sgd", "exact", mount)
    for thing, state in zip(other, states, strict=True):
        thing.load_state_dict(state)
    assert torch.equal(other[0](x), model(x))
    assert other[2].counts() == pruner.counts()
    assert_same(other[2].metrics(), pruner.metrics())


@pytest.mark.parametrize("swapped", [False, True])
def test_resuming_with_two_optimizers(swapped):
    """Two optimizers, stepped in the order given or the other, resume bit for bit too."""

    def make(seed):
        model = network(seed)
        first = torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.AdamW(model[2:].parameters(), lr=3e-3)
        pruner = pb.Pruner(model, [first, second], pb.Unconstrained(weight=0.1), threshold_lr=0.1)
        return model, first, second, pruner

    def run(things, data):
        model, first, second, _ = things
        train(model, [second, first] if swapped else [first, second], data)

    straight, first = make(0), make(0)
    run(straight, batches(30))
    run(first, batches(30)[:15])
    states = states_of(*first)
    resumed = make(4)
    for thing, state in zip(resumed, states, strict=True):
        thing.load_state_dict(state)
    run(resumed, batches(30)[15:])
    assert torch.equal(resumed[3].r(), straight[3].r())
    assert_same(copied(resumed[0]), copied(straight[0]))


def test_a_checkpoint_of_plain_tensors():
    """The state holds tensors, strings and numbers only, named by tensor, so that other tools can read it."""
    model, optimizer, pruner = build(0, "sgd", "exact", pb.Pruner)
    train(model, optimizer, batches(3))
    (state,) = states_of(pruner)
    assert state["names"] == ["0.weight", "2.weight"]
    assert set(state["latents"]) == {"0.weight", "2.weight"}
    assert all(type(value) is torch.Tensor for value in [*state["control"].values(), *state["latents"].values()])


def test_a_copied_state_does_not_follow_the_training():
    """``deepcopy(pruner.state_dict())`` is a snapshot, as with torch's own states."""
    model, optimizer, pruner = build(0, "sgd", "exact", pb.Pruner)
    saved = copy.deepcopy(pruner.state_dict())
    train(model, optimizer, batches(3))
    assert int(saved["control"]["step"]) == 0
    pruner.load_state_dict(saved)
    assert int(pruner.metrics()["step"]) == 0


def test_resuming_on_another_precision_of_the_file():
    """A state saved in float32 loads into a float64 model, as torch's own states do."""
    _, _, pruner = build(0, "sgd", "unconstrained", pb.Pruner)
    wide = network(3, dtype=torch.float64)
    other = pb.Pruner(wide, torch.optim.SGD(wide.parameters(), lr=0.1), pb.Unconstrained(weight=1.0))
    other.load_state_dict(states_of(pruner)[0])
    assert other.r().dtype == torch.float64
    assert torch.equal(other.r().float(), pruner.r())


def _without(key):
    def change(state):
        del state[key]

    return change


def _set(key, value):
    def change(state):
        state[key] = value

    return change


def _latent(name, value):
    def change(state):
        state["latents"][name] = value

    return change


def _control(name, value):
    def change(state):
        state["control"][name] = value

    return change


WRONG = {
    "no version": (_without("version"), "version"),
    "newer version": (_set("version", 99), "version 99"),
    "other names": (_set("names", ["0.weight", "3.weight"]), "3.weight.*include="),
    "fewer names": (_set("names", ["0.weight"]), "'0.weight', this pruner prunes '0.weight', '2.weight'"),
    "other order": (_set("names", ["2.weight", "0.weight"]), "'2.weight', '0.weight'"),
    "other shape": (_latent("2.weight", torch.zeros(5, 5)), r"2\.weight"),
    "shape that would broadcast": (_latent("2.weight", torch.zeros(1, 64)), r"2\.weight"),
    "scalar": (_latent("0.weight", torch.zeros(())), r"0\.weight"),
    "missing latent": (lambda state: state["latents"].pop("2.weight"), r"2\.weight"),
    "no latents": (_without("latents"), "latents"),
    "no control": (_without("control"), "control"),
    "control of another size": (_control("r", torch.zeros(5)), "r"),
    "control incomplete": (lambda state: state["control"].pop("velocity"), "velocity"),
}


@pytest.mark.parametrize("what", WRONG)
@EITHER_MOUNT
def test_a_state_that_does_not_fit_is_refused(what, mount):
    """Wrong version, names, shapes or missing parts give a ValueError that names them, and leave the run as it was."""
    change, words = WRONG[what]
    model, optimizer, pruner = build(0, "sgd", "exact", mount)
    train(model, optimizer, batches(10))
    state = copy.deepcopy(pruner.state_dict())
    train(model, optimizer, batches(10))
    change(state)
    before = everything(model, optimizer, pruner)
    with pytest.raises(ValueError, match=words):
        pruner.load_state_dict(state)
    assert_same(everything(model, optimizer, pruner), before)


@pytest.mark.parametrize("wrong", ["model", "optimizer"])
def test_the_state_of_something_else_is_refused(wrong):
    """Mixing up the three states of a checkpoint is answered at once."""
    model, optimizer, pruner = build(0, "sgd", "exact", pb.Pruner)
    with pytest.raises(ValueError, match="version"):
        pruner.load_state_dict({"model": model, "optimizer": optimizer}[wrong].state_dict())


@EITHER_MOUNT
def test_finished_pruners_load_nothing(mount):
    """After ``finish()`` there is nothing to resume; loading says so instead of half-doing it."""
    model, optimizer, pruner = build(0, "sgd", "search", mount)
    train(model, optimizer, batches(3))
    state = copy.deepcopy(pruner.state_dict())
    with pytest.warns(UserWarning, match="3 of 60 steps"):
        pruner.finish()
    before = copied(model)
    with pytest.raises(RuntimeError, match="finish"):
        pruner.load_state_dict(state)
    assert_same(copied(model), before)


def test_a_finished_state_is_not_resumed_from():
    """The state of a finished pruner has no latent weights; a new pruner does not make them up."""
    model, _, pruner = build(0, "sgd", "search", pb.Pruner)
    with pytest.warns(UserWarning, match="0 of 60 steps"):
        pruner.finish()
    state = pruner.state_dict()
    other = build(1, "sgd", "search", pb.Pruner)
    before = everything(*other)
    with pytest.raises(ValueError, match="finish"):
        other[2].load_state_dict(state)
    assert_same(everything(*other), before)
    assert model is not None


@EITHER_MOUNT
def test_a_state_goes_on_to_another_goal_with_a_warning(mount):
    """From a run to 60 % zeros to one of 90 %: both goals are named, and the new one is met. States from before
    goals were saved, and those of the same goal, say nothing."""
    goals = pb.Budget(sparsity=0.6), pb.Budget(sparsity=0.9)
    model, data = network(0), batches(60)
    optimizer = OPTIMIZERS["sgd"](model)
    first = mount(model, optimizer, goals[0], total_steps=60)
    train(model, optimizer, data[:30])
    state = copy.deepcopy(first.state_dict())

    second = network(1)
    optimizer = OPTIMIZERS["sgd"](second)
    pruner = mount(second, optimizer, goals[1], total_steps=60)
    with pytest.warns(UserWarning, match=r"way to Budget\(sparsity=0\.6.*goes on to Budget\(sparsity=0\.9"):
        pruner.load_state_dict(state)
    train(second, optimizer, data[30:])
    pruner.finish()
    assert sum(int((p != 0).sum()) for p in pruner.parameters) == sum(p.numel() for p in pruner.parameters) // 10

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.load_state_dict(state)
        first.load_state_dict({key: value for key, value in state.items() if key != "goal"})
