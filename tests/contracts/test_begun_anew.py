"""What comes between the pruner and the first step, or in mid-training: weights, schedules, too many steps."""

from __future__ import annotations

import copy
import datetime
import os
import socket
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mounts import EITHER_MOUNT
from networks import mlp, train, training, wide_batches
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pareback as pb

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = wide_batches(60, 16, 32)
SIZE = 2 * 32 * 40


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def trained(seed: int) -> nn.Sequential:
    model = mlp(32, 40, 32, seed=seed)
    train(model, sgd(model), DATA[:40])
    return model


# -- before the first step -------------------------------------------------------------------------------------------


def _rank(rank: int, port: int, goal: Any, mount: Any, halves: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32))
    optimizer = sgd(model)
    pruner = mount(model, optimizer, goal, total_steps=20, min_size=100, **({"ramp": 0.0} if halves else {}))
    net = nn.Sequential(*map(_wrapped, model)) if halves else DistributedDataParallel(model)
    if halves and rank == 0:
        with torch.no_grad():
            for parameter in model.parameters():  # weights of one process alone, looked at for a while
                parameter.neg_().neg_()
    for x, y in DATA[:20]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
    pruner.finish()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)
    assert pb.inspect(model).pruned_nonzeros <= SIZE // 2
    dist.destroy_process_group()


def _wrapped(layer: nn.Module) -> nn.Module:
    return DistributedDataParallel(layer) if [*layer.parameters()] else layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goal", "halves"),
    [
        (pb.Budget(sparsity=0.9), False),
        (pb.Fixed(sparsity=0.9), False),
        (pb.methods.ST3(sparsity=0.9), False),
        (pb.Fixed(sparsity=0.9), True),
    ],
    ids=["exact", "fixed", "st3", "fixed, two wrappers and edits in one process"],
)
@EITHER_MOUNT
def test_processes_that_began_with_weights_of_their_own(mount: Any, goal: Any, halves: bool) -> None:
    """DDP gives all those of the first process, after the pruner was built. All ended with other weights and masks.

    Around two halves of a model it is not the only wrapper, and what one process wrote to was broadcast to nobody.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, goal, mount, halves), nprocs=2)  # type: ignore[attr-defined]


def _fine_tuned_by_one(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
    model = trained(0)
    net = DistributedDataParallel(model)
    if rank == 0:
        optimizer = sgd(model)
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=5)
        train(model, optimizer, DATA[:5])
        assert pruner.finish().pruned_nonzeros == SIZE // 10
    dist.barrier()
    assert net.module is model
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_process_alone_may_prune_what_all_have_trained() -> None:
    """It asked the others, who wait at a barrier, whether DDP had copied weights: DDP did so before the pruner was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_fine_tuned_by_one, args=(port,), nprocs=2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.9), pb.methods.ST3(sparsity=0.9)])
@EITHER_MOUNT
def test_weights_that_are_loaded_before_the_first_step_begin_it(mount: Any, goal: Any) -> None:
    """The training is bit for bit that of a pruner which was built on them."""
    start = mlp(32, 40, 32)
    nn.init.uniform_(start[0].weight, -3.0, 3.0)  # of another spread than the model has
    ends = []
    for late in (False, True):
        model = mlp(32, 40, 32)
        if not late:
            model.load_state_dict(start.state_dict())
        optimizer = sgd(model)
        pruner = mount(model, optimizer, goal, total_steps=20)
        if late:
            with torch.no_grad():
                names = {
                    name.replace("parametrizations.", "").replace(".original", ""): p
                    for name, p in model.named_parameters()
                }
                for name, value in start.state_dict().items():
                    names[name].copy_(value)
        train(model, optimizer, DATA[:20])
        ends.append([value.clone() for value in pruner.latent_tensors().values()])
        pruner.finish()
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_row_that_is_written_over_before_the_first_step_takes_no_other_weights_along() -> None:
    """Everything behind the zeros of its tensor was lost: those are other weights only where most of them are."""
    model = trained(0)
    before = model[0].weight.detach().clone()
    optimizer = sgd(model, lr=1e-12)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
    with torch.no_grad():
        model[0].weight[0] = 0.25
    train(model, optimizer, DATA[:1])
    with pruner.latents():
        torch.testing.assert_close(model[0].weight.detach()[1:], before[1:], rtol=0, atol=1e-6)
        assert bool((model[0].weight[0] == 0.25).all())


@pytest.mark.parametrize("ramp", [0.0, 0.5])
def test_one_layer_that_is_replaced_takes_no_edit_of_another_along(ramp: float) -> None:
    """A layer is loaded and rows of another begin anew: those held their old values again."""
    model = trained(0)
    optimizer = sgd(model, lr=1e-12)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), total_steps=100, ramp=ramp)
    loaded = trained(5)[0].weight.detach()
    with torch.no_grad():
        model[0].weight.copy_(loaded)
        model[2].weight[:8] = 0.5
    train(model, optimizer, DATA[:1])
    with pruner.latents():
        torch.testing.assert_close(model[0].weight.detach(), loaded, rtol=0, atol=1e-6)
        torch.testing.assert_close(model[2].weight.detach()[:8], torch.full((8, 40), 0.5), rtol=0, atol=1e-6)


def test_looking_before_the_first_step_is_no_edit() -> None:
    """latents() and landed() write to the weights themselves; those behind zeros are not lost by it."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
    twin, its, other = copy.deepcopy((model, optimizer, pruner))
    with pruner.latents():
        pass
    with pruner.landed():
        pass
    train(model, optimizer, DATA[:1])
    train(twin, its, DATA[:1])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    other.finish()


@pytest.mark.parametrize(
    ("kind", "low", "high"), [(torch.optim.SGD, 1e-3, 0.2), (torch.optim.AdamW, 1e-4, 1e-2)], ids=["sgd", "adamw"]
)
def test_a_schedule_may_be_attached_after_the_pruner(kind: Any, low: float, high: float) -> None:
    """Thresholds learn as with the schedule there before; they learned two hundred times as fast."""
    ends, tops = [], []
    for late in (False, True):
        torch.manual_seed(0)
        model = mlp(32, 40, 32)
        optimizer = kind(model.parameters(), lr=low)

        def scheduled(it: Any = optimizer) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(it, max_lr=high, total_steps=41)

        schedule = None if late else scheduled()
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40)
        schedule = schedule or scheduled()
        tops.append(0.0)
        for _ in training(model, optimizer, DATA[:40]):
            schedule.step()
            rates = pruner._step.groups.read()
            tops[-1] = max(tops[-1], float((rates.lr * rates.multiple).max()))
        ends.append(pruner.r())
        pruner.finish()
    assert tops[0] == pytest.approx(0.01, rel=0.02)
    assert tops[0] == tops[1]
    assert torch.equal(*ends)


def test_a_rate_that_rises_by_hand_is_curbed() -> None:
    """From 1e-6 to 0.1 without a scheduler: at most 0.01 of a spread per step, not a thousand spreads."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model, 1e-6)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40)
    highest = 0.0
    for step, _ in enumerate(training(model, optimizer, DATA[:40])):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 10)
        rates = pruner._step.groups.read()
        highest = max(highest, float((rates.lr * rates.multiple).max()))
    assert 0.009 < highest <= 0.0101
    assert pruner.finish().pruned_nonzeros == SIZE // 10


# -- in the middle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two"])
@pytest.mark.parametrize("method", [pb.methods.GMP, pb.methods.ACDC, pb.methods.RigL, pb.methods.OneShot])
def test_masks_are_chosen_anew_for_weights_that_are_loaded(method: Any, several: bool) -> None:
    """Those of the old weights would cut most of the large ones of the new. The count stays that of the schedule."""
    if several and method.ranks_together:
        return
    model = mlp(32, 40, 32)
    optimizer: Any = [sgd(model[0]), sgd(model[2])] if several else sgd(model)
    pruner = pb.Pruner(model, optimizer, method(sparsity=0.9), total_steps=60)
    train(model, optimizer, DATA[:55])
    loaded = trained(3)
    model.load_state_dict(loaded.state_dict())
    with pytest.warns(UserWarning, match="Weights outside the masks were given values before step 55"):
        train(model, optimizer, DATA[55:56])
    weights = [loaded[0].weight.detach(), loaded[2].weight.detach()]
    counts = [int((p != 0).sum()) for p in pruner.parameters]
    assert sum(counts) == SIZE // 10
    if method is pb.methods.RigL:  # its counts are each tensor's own
        wanted = [w.abs() >= w.abs().flatten().topk(n).values[-1] for w, n in zip(weights, counts, strict=True)]
    else:
        level = torch.cat([w.abs().flatten() for w in weights]).topk(SIZE // 10).values[-1]
        wanted = [w.abs() >= level for w in weights]
    assert all(torch.equal(p != 0, mask) for p, mask in zip(pruner.parameters, wanted, strict=True))
    train(model, optimizer, DATA[56:])  # and nothing is said any more
    assert pruner.finish().pruned_nonzeros == SIZE // 10


@pytest.mark.parametrize("method", [pb.methods.GMP, pb.methods.RigL])
def test_masks_are_chosen_anew_where_they_are_due_as_well(method: Any) -> None:
    """Just before such a step what was loaded was cut by the old masks, in silence: 43 to 57 % of its energy stayed."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model, lr=1e-9)
    pruner = pb.Pruner(model, optimizer, method(sparsity=0.8, every=4), total_steps=60)
    due = next(step for step in range(32, 60) if not pruner.may_replay(step))
    train(model, optimizer, DATA[:due])
    loaded = trained(3)
    model.load_state_dict(loaded.state_dict())
    with pytest.warns(UserWarning, match=f"Weights outside the masks were given values before step {due}"):
        train(model, optimizer, DATA[due : due + 1])
    for i in (0, 2):
        kept, dense = model[i].weight.detach(), loaded[i].weight.detach()
        best = dense.flatten().square().topk(int(kept.count_nonzero())).values.sum()
        assert kept.square().sum() > (0.85 if method is pb.methods.RigL else 0.95) * best


def test_masks_of_an_optimizer_that_steps_later_are_chosen_anew_as_well() -> None:
    """The other's steps took what was loaded for what it was left with: the old masks cut it, without a word."""
    model = mlp(32, 40, 32)
    rare, often = sgd(model[0], lr=1e-9), sgd(model[2], lr=1e-9)
    pb.Pruner(model, [rare, often], pb.methods.RigL(sparsity=0.8), total_steps=60)
    loaded = trained(3)[0].weight.detach()
    for number, batch in enumerate(DATA[:8]):
        train(model, [often, rare] if number % 4 == 0 else [often], [batch])
    with torch.no_grad():
        model[0].weight.copy_(loaded)
    for batch in DATA[8:11]:
        train(model, [often], [batch])
    with pytest.warns(UserWarning, match="Weights outside the masks were given values"):
        train(model, [often, rare], DATA[11:12])
    kept = model[0].weight.detach()
    best = loaded.flatten().square().topk(int(kept.count_nonzero())).values.sum()
    assert kept.square().sum() > 0.85 * best


@pytest.mark.filterwarnings("error")
def test_noise_outside_the_masks_is_cut_and_changes_none() -> None:
    """RigL chose masks anew in every step, with a warning for each. Large weights are mentioned once, in a loop too."""
    ends = []
    for noise in (0.0, 1e-4):
        model = mlp(32, 40, 32)
        optimizer = sgd(model)
        pruner = pb.Pruner(model, optimizer, pb.methods.RigL(sparsity=0.8), total_steps=40)
        for batch in DATA[:40]:
            train(model, optimizer, [batch])
            with torch.no_grad():
                for p in pruner.parameters:
                    p.add_(noise * torch.ones_like(p) * (p == 0))
        pruner.detach()
        ends.append(pruner.counts())
    assert ends[0] == ends[1]
    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, pb.methods.RigL(sparsity=0.8), total_steps=40)
    train(model, optimizer, DATA[:5])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in DATA[5:20]:
            model.load_state_dict(trained(3).state_dict())
            train(model, optimizer, [batch])
    assert len(told) == 1


class Raising(torch.optim.SGD):
    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Weights outside the masks were given values")
@pytest.mark.parametrize("loads", [1, 2, 3])
def test_a_step_that_raises_keeps_the_masks_of_weights_that_were_loaded(loads: int) -> None:
    """Also where such weights come in several steps in a row: the masks of before would cut them."""
    model = mlp(32, 40, 32)
    optimizer = Raising(model.parameters(), lr=1e-9)
    pb.Pruner(model, optimizer, pb.methods.RigL(sparsity=0.8, every=50), total_steps=60)
    train(model, optimizer, DATA[:5])
    for number in range(loads):
        optimizer.raises = number == loads - 1
        loaded = trained(3 + number)
        model.load_state_dict(loaded.state_dict())
        if optimizer.raises:
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, DATA[5:6])
        else:
            train(model, optimizer, DATA[5:6])
    for i in (0, 2):
        kept, dense = model[i].weight.detach(), loaded[i].weight.detach()
        best = dense.flatten().square().topk(int(kept.count_nonzero())).values.sum()
        assert kept.square().sum() > 0.99 * best


def test_masks_that_are_not_chosen_anew_are_said_to_cut() -> None:
    """A method of one's own that says nothing of loaded weights: the masks stay, with a warning."""

    class Fixed(pb.goals.MaskGoal):
        def first_masks(self, weights: Any) -> Any:
            return [weight.abs() > weight.abs().median() for weight in weights]

        def is_due(self, step: int, total_steps: int | None) -> bool:
            return False

        def masks(self, view: Any) -> None:
            return None

    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, Fixed())
    train(model, optimizer, DATA[:5])
    model.load_state_dict(trained(3).state_dict())
    with pytest.warns(UserWarning, match="before step 5, as load_state_dict does, and are cut: Fixed says nothing"):
        train(model, optimizer, DATA[5:6])


def test_rows_that_begin_anew_after_a_checkpoint_of_landed_stay() -> None:
    """Everything that was written between loading such a checkpoint and the first step was lost."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40)
    train(model, optimizer, DATA[:30])
    with pruner.landed():
        saved = copy.deepcopy((model.state_dict(), pruner.state_dict()))
    before = {name: value.clone() for name, value in pruner.latent_tensors().items()}
    twin = mlp(32, 40, 32)
    its = sgd(twin, lr=1e-12)
    other = pb.Pruner(twin, its, pb.Budget(sparsity=0.9), total_steps=40)
    other.load_state_dict(saved[1])
    twin.load_state_dict(saved[0])
    with torch.no_grad():
        twin[2].weight[:8] = 0.5
    train(twin, its, DATA[30:31])
    after = other.latent_tensors()
    torch.testing.assert_close(after["2.weight"][:8], torch.full((8, 40), 0.5), rtol=0, atol=1e-6)
    torch.testing.assert_close(after["2.weight"][8:], before["2.weight"][8:], rtol=0, atol=1e-6)
    torch.testing.assert_close(after["0.weight"], before["0.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["model first", "state first", "model before the pruner"])
@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.9), pb.methods.ST3(sparsity=0.9), pb.methods.RigL(sparsity=0.9)])
def test_a_checkpoint_from_inside_landed_goes_on_as_it_would_have(goal: Any, order: str) -> None:
    """The weights shown there were taken for edits of those in training, and shrunk once more."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=40)
    train(model, optimizer, DATA[:30])
    with pruner.landed():
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), pruner.state_dict()))
    twin = mlp(32, 40, 32)
    if order == "model before the pruner":
        twin.load_state_dict(saved[0])
    its = sgd(twin)
    other = pb.Pruner(twin, its, goal, total_steps=40)
    its.load_state_dict(saved[1])
    if order == "state first":
        other.load_state_dict(saved[2])
    if order != "model before the pruner":
        twin.load_state_dict(saved[0])
    if order != "state first":
        other.load_state_dict(saved[2])
    steps = DATA[30:31] if order == "state first" else DATA[30:40]
    for one, opt in ((model, optimizer), (twin, its)):
        train(one, opt, steps)
    apart = max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    if order == "state first":  # the first gradient is of the weights that were loaded last
        assert apart < 0.01
        return
    assert apart == 0.0
    assert pruner.finish().pruned_nonzeros == other.finish().pruned_nonzeros


@EITHER_MOUNT
def test_far_more_steps_than_were_announced_are_mentioned(mount: Any) -> None:
    """Epochs given where steps are counted. It is said once, when ten times as many are done."""
    model = mlp(32, 40, 32)
    optimizer = sgd(model)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=5)
    train(model, optimizer, DATA[:49])
    with pytest.warns(UserWarning, match="10 times the 5 steps that total_steps announced.* not epochs"):
        train(model, optimizer, DATA[49:50])
    train(model, optimizer, DATA[50:60])
    assert pruner.finish().pruned_nonzeros == SIZE // 10


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.5), pb.methods.RigL(sparsity=0.5), pb.methods.GMP(sparsity=0.5)])
def test_a_tensor_without_elements_is_left_out(goal: Any) -> None:
    model = mlp(32, 40, 32)
    model.nothing = nn.Parameter(torch.zeros(0, 5))
    pruner = pb.Pruner(model, sgd(model), goal, total_steps=5, min_size=0)
    assert pruner.names == ["0.weight", "2.weight"]
