"""Methods that keep masks, where a training is short, resumed, skipped or loaded otherwise than planned."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from method_training import STEPS, begun, network, train
from torch import nn

import pareback as pb
from pareback.methods import ACDC, GMP, OneShot, RigL

MASKS = pytest.mark.parametrize("method", [ACDC, GMP, OneShot, RigL], ids=lambda method: method.__name__)


def kept(model: nn.Module, pruner: Any) -> list[int]:
    """The non-zeros of every pruned tensor."""
    return [int(model.get_parameter(name).count_nonzero()) for name in pruner.names]


# -- steps that do not count -----------------------------------------------------------------------------------------


@MASKS
def test_a_step_that_gradscaler_skips_changes_no_mask(method: type) -> None:
    """A fused optimizer's step runs even where its gradients overflow: weights, masks and count stay."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    pruner = pb.Pruner(model, optimizer, method(sparsity=0.8), total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    torch.manual_seed(1)
    for number in range(30):
        before, step = copy.deepcopy(model.state_dict()), int(pruner.metrics()["step"])
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, 20)).square().mean()).backward()
        skipped = number % 3 == 1
        if skipped:
            model.get_parameter(pruner.names[0]).grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        assert int(pruner.metrics()["step"]) == step + (not skipped)
        if skipped:
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert pruner.finish().pruned_nonzeros == 665


@MASKS
def test_a_step_that_raises_is_not_counted(method: type) -> None:
    """Every step fails once and is repeated: masks change when they would have, and the end is the same to the bit."""

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    ends = []
    for fails in (False, True):
        model, optimizer, pruner = begun(method(sparsity=0.8))
        for step in range(STEPS):
            if fails:
                handle = optimizer.register_step_pre_hook(fail)
                with pytest.raises(OSError, match="disk"):
                    train(model, optimizer, step, step + 1)
                handle.remove()
            train(model, optimizer, step, step + 1)
            assert bool(pruner.metrics()["share"] == pruner.goal.share(step + 1, STEPS))
        pruner.finish()
        ends.append(model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


class Interrupted(torch.optim.SGD):
    """Moves every weight, as momentum does; Ctrl-C may come before its hooks run."""

    interrupts = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1).add_(1e-3)
        if self.interrupts:
            raise KeyboardInterrupt


@pytest.mark.parametrize("mount", [pb.Pruner, pb.ParametrizedPruner])
@MASKS
def test_a_step_that_is_interrupted_leaves_a_pruned_model(method: type, mount: Any) -> None:
    """Weights outside the masks have moved by then: whoever catches Ctrl-C and saves the model would save them."""
    model = network()
    optimizer = Interrupted(model.parameters(), lr=0.1)
    pruner = mount(model, optimizer, method(sparsity=0.8), total_steps=STEPS)
    train(model, optimizer, 0, 55)
    zeros = [model.get_submodule(name[0]).weight == 0 for name in pruner.names]
    assert sum(int(one.sum()) for one in zeros) == 3328 - 665
    optimizer.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 55, 56)
    left = [model.get_submodule(name[0]).weight[one] for name, one in zip(pruner.names, zeros, strict=True)]
    assert not any(bool(one.any()) for one in left)
    assert sum(pruner.counts()) == 665


def test_weights_that_came_before_an_interrupted_first_step_are_not_lost() -> None:
    """The masks are those of the weights that were loaded; those of the first ones would cut others."""
    model = network()
    optimizer = Interrupted(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, OneShot(sparsity=0.8, when=0.0), total_steps=STEPS)
    trained = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(trained)
    optimizer.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 0, 1)
    magnitudes = torch.cat([trained[name].abs().flatten() for name in pruner.names])
    stays = torch.cat([(model.get_parameter(name) != 0).flatten() for name in pruner.names])
    assert int(stays.sum()) == 665
    assert float(magnitudes[stays].min()) > float(magnitudes[~stays].max())


# -- resumed trainings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [OneShot, GMP], ids=lambda method: method.__name__)
def test_a_shortened_training_makes_up_for_the_cut_that_it_has_passed(method: type) -> None:
    """29 of 60 steps, then 40 in all: the cut after half, or the end of the cubic, was due before step 30."""
    model, optimizer, pruner = begun(method(sparsity=0.8))
    train(model, optimizer, 0, 29 if method is OneShot else 33)
    states = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, pruner)]
    assert sum(kept(model, pruner)) > 665
    other = network()
    own = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    again = pb.Pruner(other, own, method(sparsity=0.8), total_steps=40)
    for thing, state in zip((other, own, again), states, strict=True):
        thing.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"training of another length.* weights go at once now"):
        train(other, own, 33, 34)
    assert sum(kept(other, again)) == 665


def test_a_prolonged_training_brings_no_weight_back() -> None:
    """GMP asks for less by then than is gone already: it waits."""
    model, optimizer, pruner = begun(GMP(sparsity=0.8))
    train(model, optimizer, 0, 40)
    states = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, pruner)]
    gone = [model.get_parameter(name) == 0 for name in pruner.names]
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner.detach()
    again = pb.Pruner(model, own, GMP(sparsity=0.8), total_steps=200)
    for thing, state in zip((model, own, again), states, strict=True):
        thing.load_state_dict(state)
    train(model, own, 40, 80)
    assert all(not bool(model.get_parameter(name)[old].any()) for name, old in zip(again.names, gone, strict=True))


def gone_on(before: pb.Goal, goal: pb.Goal, optimizers: int = 1) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
    """Half a training to one goal, saved and loaded into a pruner of another."""
    made = []
    for aim in (before, goal):
        model = network()
        parts = [model[:2].parameters(), model[2:].parameters()] if optimizers == 2 else [model.parameters()]
        several = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
        made.append((model, several, pb.Pruner(model, several, aim, total_steps=STEPS)))
    (model, several, pruner), (other, own, again) = made
    take_steps(model, several, 0, 30)
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The state was saved on the way to")
        again.load_state_dict(pruner.state_dict())
    return other, own, again


def take_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(32, 20, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("before", "goal", "optimizers"),
    [
        (RigL(sparsity=0.8), RigL(sparsity=0.95), 1),
        (RigL(sparsity=0.8), RigL(sparsity=0.95), 2),
        (RigL(sparsity=0.95), RigL(sparsity=0.8), 1),
        (GMP(sparsity=0.8), RigL(sparsity=0.8), 1),
        (ACDC(sparsity=0.8), RigL(sparsity=0.95), 1),
        (OneShot(sparsity=0.8, when=0.0), OneShot(sparsity=0.95, when=0.0), 1),
    ],
)
def test_a_state_that_goes_on_to_another_sparsity_is_trained_at_it(before: pb.Goal, goal: Any, optimizers: int) -> None:
    """Its masks had other counts. Those would have stayed until finish() cut them without any training."""
    model, own, pruner = gone_on(before, goal, optimizers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The state was saved in a training of another length, or on the way to")
        take_steps(model, own, 30, 31)
    wanted = goal.kept(3328)
    assert sum(kept(model, pruner)) == wanted
    if isinstance(goal, RigL):
        assert kept(model, pruner) == goal.counts([model.get_parameter(name).shape for name in pruner.names])
    take_steps(model, own, 31, STEPS)
    assert pruner.finish().pruned_nonzeros == wanted


@pytest.mark.filterwarnings("error")
def test_a_dense_phase_that_begins_at_once_is_not_said_to_cut() -> None:
    """AC/DC's masks of a longer training were looked up, said to cut 2,663 weights, and replaced in the same step."""
    goal = ACDC(sparsity=0.8)
    for total in range(61, 200):
        phases = dict(goal.phases(total))
        if phases.get(30) is False:
            break
    model, optimizer, pruner = begun(goal)
    train(model, optimizer, 0, 30)
    states = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, pruner)]
    other = network()
    own = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    again = pb.Pruner(other, own, goal, total_steps=total)
    for thing, state in zip((other, own, again), states, strict=True):
        thing.load_state_dict(state)
    train(other, own, 30, 31)
    assert sum(kept(other, again)) > 3000


@pytest.mark.parametrize(
    ("before", "goal"),
    [(GMP(sparsity=0.95), GMP(sparsity=0.8)), (OneShot(sparsity=0.95, when=0.0), OneShot(sparsity=0.8, when=0.0))],
    ids=["gmp", "oneshot"],
)
def test_weights_that_do_not_return_are_mentioned_at_the_end(before: pb.Goal, goal: pb.Goal) -> None:
    """A state of 95 % that goes on to 80 ends sparser than that, without a word."""
    model, own, pruner = gone_on(before, goal)
    take_steps(model, own, 30, STEPS)
    with pytest.warns(UserWarning, match=r"weights are not zero, where 665 may stay.* brings none back"):
        assert pruner.finish().pruned_nonzeros < 665


def test_weights_in_masks_that_nothing_has_moved_are_mentioned() -> None:
    """Behind a unit that died no gradient arrives: what RigL grows there stays zero."""
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    pruner = pb.Pruner(model, optimizer, RigL(sparsity=0.5), total_steps=STEPS, include="*.weight")
    with torch.no_grad():
        for i in (0, 2):
            model[i].weight[:, :10] = 0.0
    take_steps(model, [optimizer], 0, STEPS)
    with pytest.warns(UserWarning, match=r"weights are not zero, where 1,200 may stay. Others in the masks are zero"):
        pruner.finish()


def test_a_state_without_masks_is_refused_by_those_who_keep_them() -> None:
    """An exact budget's state is whole as it is; the sentence names both goals and a way that works."""
    with pytest.raises(pb.UserError, match=r"on the way to Budget\(.*keeps no masks, and GMP\(.* Begin anew from the"):
        gone_on(pb.Budget(sparsity=0.8), GMP(sparsity=0.8))


@MASKS
def test_a_training_resumed_without_the_pruners_state_is_warned_of(method: type) -> None:
    """Its schedule would start anew, with other masks."""
    model, optimizer, pruner = begun(method(sparsity=0.8))
    train(model, optimizer, 0, 55)
    assert sum(kept(model, pruner)) == 665
    other = network()
    own = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    goal = RigL(sparsity=0.8, seed=7) if method is RigL else method(sparsity=0.8)
    pb.Pruner(other, own, goal, total_steps=STEPS)
    other.load_state_dict(model.state_dict())
    own.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="the pruner's own state was not loaded"):
        train(other, own, 55, 56)


def test_a_trained_model_may_be_loaded_after_its_pruner_was_built() -> None:
    """One-shot pruning keeps the largest of the weights that train, not of those that were there at first."""
    torch.manual_seed(3)
    trained = {name: torch.randn_like(value) for name, value in network().state_dict().items()}
    model, optimizer, pruner = begun(OneShot(sparsity=0.8, when=0.0))
    model.load_state_dict(trained)
    train(model, optimizer, 0, 1)
    magnitudes = torch.cat([trained[name].abs().flatten() for name in pruner.names])
    largest = torch.zeros_like(magnitudes, dtype=torch.bool).index_fill_(0, magnitudes.topk(665).indices, True)
    stays = torch.cat([(model.get_parameter(name) != 0).flatten() for name in pruner.names])
    assert torch.equal(stays, largest)


# -- short trainings -------------------------------------------------------------------------------------------------


def test_masks_change_in_short_trainings_too() -> None:
    """A fiftieth of the steps, at most 100: 100 steps have 37 changes of RigL, 15,600 those of the paper."""
    assert [step for step in range(100) if RigL(sparsity=0.9).is_due(step, 100)] == list(range(2, 75, 2))
    assert [step for step in range(15_600) if RigL(sparsity=0.9).is_due(step, 15_600)] == list(range(100, 11_700, 100))
    assert sum(GMP(sparsity=0.9).is_due(step, 100) for step in range(100)) == 36
    assert GMP(sparsity=0.9).is_due(780 + 100, 15_600)


@pytest.mark.parametrize(
    "goal", [ACDC(sparsity=0.8, warmup=0.0), ACDC(sparsity=0.8, warmup=0, last_sparse=1, last_dense=0)]
)
def test_acdc_can_begin_with_a_sparse_phase(goal: ACDC) -> None:
    """The first step leaves the share that was asked for."""
    model, optimizer, pruner = begun(goal)
    assert goal.phases(STEPS)[0] == (0, True)
    train(model, optimizer, 0, 1)
    assert sum(kept(model, pruner)) == 665
    assert not pruner.may_replay(0)


# -- every tensor keeps its floor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ACDC, GMP, OneShot], ids=lambda method: method.__name__)
def test_no_tensor_is_emptied_by_a_ranking_of_all(method: type) -> None:
    """A layer of tiny weights keeps a thousandth, as pb.plan says; without any the outputs would be constant."""
    model, optimizer, pruner = begun(method(sparsity=0.8))
    with torch.no_grad():
        model.get_parameter(pruner.names[1]).mul_(1e-6)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 0, STEPS)
    assert kept(model, pruner) == [662, 3]


@pytest.mark.parametrize(
    ("sparsity", "shapes"),
    [(0.9593, [(1, 1)] * 100 + [(30, 30)] * 3), (0.993, [(2, 2)] * 60 + [(60, 60)] * 4), (0.9, [(64, 20), (32, 64)])],
)
def test_rigls_counts_are_possible_and_add_up(sparsity: float, shapes: list[tuple[int, int]]) -> None:
    """Where a weight each is more than ERK gives to many tiny tensors, the large ones share the rest."""
    goal, sizes = RigL(sparsity=sparsity), [rows * columns for rows, columns in shapes]
    counts = goal.counts(shapes)
    assert all(max(1, -(-size // 1000)) <= count <= size for count, size in zip(counts, sizes, strict=True))
    assert sum(counts) == goal.kept(sum(sizes))
    alike = [count for count, shape in zip(counts, shapes, strict=True) if shape == shapes[-1]]
    assert max(alike) - min(alike) <= len(alike)


def test_a_seed_is_a_whole_number() -> None:
    for seed in ("a", 1.5, True):
        with pytest.raises(pb.UserError, match=r"seed=.* is not a whole number"):
            RigL(sparsity=0.9, seed=seed)  # type: ignore[arg-type]


# -- what is said of the goal while it is not met --------------------------------------------------------------------


def test_the_share_that_masks_are_asked_for_is_the_methods_own() -> None:
    """GMP's cubic, one-shot's cut and AC/DC's phases; what landed() shows changes nothing before the goal is asked."""
    model, optimizer, pruner = begun(GMP(sparsity=0.8, begin=0.0, end=0.75, every=1))
    train(model, optimizer, 0, 9)  # a fifth of 45 steps
    assert float(pruner.metrics()["share"]) == pytest.approx(1 - 0.8**3)
    assert not pruner.ramp_ended
    with pruner.landed():
        assert sum(kept(model, pruner)) > 665
    train(model, optimizer, 9, 46)
    assert pruner.ramp_ended
    assert float(pruner.metrics()["share"]) == 1.0
    once, phased = OneShot(sparsity=0.8), ACDC(sparsity=0.8)
    assert [once.share(step, 60) for step in (0, 29, 30, 59)] == [0.0, 0.0, 1.0, 1.0]
    assert [phased.share(step, 100) for step in (9, 10, 14, 15, 84, 85)] == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert RigL(sparsity=0.8).share(0, 60) == 1.0


def test_a_report_on_masks_predicts_nothing() -> None:
    """There is no threshold that a Gaussian could be cut at."""
    model, optimizer, pruner = begun(GMP(sparsity=0.8))
    train(model, optimizer, 0, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = pruner.finish()
    assert report.predicted_sparsity is None
    assert "Gaussian" not in str(report)


# -- optimizers that do not step in rounds, and tensors that are not trained ------------------------------------------


def rigls_changes(pace: Callable[[int], int], resumed_at: int = -1) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Masks of RigL's first tensor after each of forty rounds, whose optimizer takes ``pace(round)`` steps in each."""

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        model = network()
        several = [torch.optim.SGD(part, lr=0.1) for part in (model[:2].parameters(), model[2:].parameters())]
        return model, several, pb.Pruner(model, several, RigL(sparsity=0.8, every=4, end=1.0), total_steps=100)

    model, several, pruner = build()
    changed, found = [], [pruner.state_dict()["masks"]["0.weight"].clone()]
    for step in range(40):
        for turn in range(pace(step)):
            take_steps(model, several[:1], 10 * step + turn, 10 * step + turn + 1)
        if step == resumed_at:
            states = [copy.deepcopy(thing.state_dict()) for thing in (model, *several, pruner)]
            model, several, pruner = build()
            for thing, state in zip((model, *several, pruner), states, strict=True):
                thing.load_state_dict(state)
        take_steps(model, several[1:], step, step + 1)
        found.append(pruner.state_dict()["masks"]["0.weight"].clone())
        if not torch.equal(found[-1], found[-2]):
            changed.append(step)
    return changed, model.state_dict()


@pytest.mark.filterwarnings("ignore:The optimizers have taken")
@pytest.mark.parametrize(
    ("pace", "wanted"),
    [
        (lambda step: 1, [4, 8, 12, 16, 20, 24, 28, 32, 36]),
        (lambda step: step % 2, [5, 9, 13, 17, 21, 25, 29, 33, 37]),  # in odd rounds, where no masks are due
        (lambda step: 3, [4, 8, 12, 16, 20, 24, 28, 32, 36]),
        (lambda step: int(step > 29), [30, 32, 36]),
    ],
    ids=["once", "every other", "three times", "late"],
)
def test_rigl_follows_an_optimizer_at_its_own_pace(pace: Callable[[int], int], wanted: list[int]) -> None:
    """Masks change once for every step at which they are due: at the optimizer's next, however often it steps."""
    plain, end = rigls_changes(pace)
    assert plain == wanted
    for at in (12, 13):
        again, resumed = rigls_changes(pace, resumed_at=at)
        assert again == wanted
        assert all(torch.equal(value, resumed[key]) for key, value in end.items())


def test_rigl_leaves_tensors_alone_whose_rate_is_zero() -> None:
    """What grows there would never move from zero, and the largest weights would be gone in a few turns."""
    model = network()
    rest = [*model[2].parameters(), *model[4].parameters()]
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    pruner = pb.Pruner(model, optimizer, RigL(sparsity=0.8, every=4), total_steps=STEPS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 0, 40)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight != 0, before["2.weight"] != 0)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 40, STEPS)
    assert not torch.equal(model[0].weight != 0, before["0.weight"] != 0)
    assert pruner.finish().pruned_nonzeros == 665
