"""DistributedDataParallel: replicas stay identical bit for bit, the budget is met, and names have no prefix."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import batches, in_two_processes, network, of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pareback as pb

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
]

WORLD = 2


def steps(model, optimizer, count, rank, accumulate=1):
    """Train on this rank's half of each batch."""
    for x, y in batches(count, size=32):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(WORLD)[rank].chunk(accumulate), y.chunk(WORLD)[rank].chunk(accumulate), strict=True))
        for number, (part_x, part_y) in enumerate(parts):
            model.require_backward_grad_sync = number == len(parts) - 1
            (F.cross_entropy(model(part_x), part_y) / accumulate).backward()
        optimizer.step()


GOALS = {
    "exact": pb.Budget(sparsity=0.9),
    "search": pb.Fixed(sparsity=0.9),
    "unconstrained": pb.Unconstrained(weight=2.0),
}


def every_goal(rank, folder):
    found = {}
    for goal in GOALS:
        for mount in (pb.Pruner, pb.ParametrizedPruner):
            model = network(seed=rank)  # DDP makes the replicas equal
            replica = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(replica.parameters(), lr=3e-3)
            if mount is pb.Pruner:
                pruner = mount(replica, optimizer, GOALS[goal], total_steps=25)
            else:  # parametrizing takes parameters away from the hooks of a DDP that is there already
                pruner = mount(model, optimizer, GOALS[goal], total_steps=25)
                replica = DistributedDataParallel(model)
            steps(replica, optimizer, 25, rank, accumulate=2)
            training = copy.deepcopy(pruner.state_dict())
            report = pruner.finish()
            found[goal, mount.__name__] = {
                "names": pruner.names,
                "rows": [row.name for row in report.rows],
                "keys": list(model.state_dict()),
                "training": training,
                "final": copy.deepcopy(model.state_dict()),
                "nonzeros": report.pruned_nonzeros,
                "counts": pruner.counts(),
            }
    return found


def wrapped_later(rank, folder):
    """A pruner built on the module before it is wrapped, and its state moved to a plain run."""
    model = network(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    steps(replica, optimizer, 20, rank)
    found = {"training": copy.deepcopy(pruner.state_dict())}
    plain = network(seed=3)
    other = pb.Pruner(plain, torch.optim.SGD(plain.parameters(), lr=0.1), pb.Budget(sparsity=0.8), total_steps=20)
    other.load_state_dict(pruner.state_dict())
    plain.load_state_dict(model.state_dict())
    found["reports"] = other.finish().as_dict(), pruner.finish().as_dict()
    found["final"] = copy.deepcopy(plain.state_dict()), copy.deepcopy(model.state_dict())
    return found


def other_mount(rank, folder):
    """Parametrizing what DDP has attached to would leave its gradients out of the reduction."""
    model = network(seed=0)
    replica = DistributedDataParallel(model)
    try:
        pb.ParametrizedPruner(replica, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.8))
        said = None
    except ValueError as error:
        said = str(error)
    return {"said": said, "keys": list(model.state_dict())}


def unused(rank, folder):
    """Pruned weights have no gradient (no straight-through), and some parameters are not reached at all."""
    model = network(seed=0)
    model.spare = nn.Linear(40, 40)
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    pruner = pb.Pruner(replica, optimizer, pb.Fixed(sparsity=0.8), straight_through=False)
    steps(replica, optimizer, 5, rank)
    return copy.deepcopy(model.state_dict()), pruner.counts()


@pytest.fixture(scope="module")
def runs():
    return in_two_processes(every_goal, wrapped_later, other_mount, unused)


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
@pytest.mark.parametrize("goal", GOALS)
def test_replicas_are_identical(runs, goal, mount):
    """Weights, latent weights, thresholds and masks agree on both ranks to the last bit, during training and after."""
    one, two = (found[goal, mount] for found in of(runs, every_goal))
    for part in ("control", "latents"):
        for name, value in one["training"][part].items():
            assert torch.equal(value, two["training"][part][name]), name
    for name, value in one["final"].items():
        assert torch.equal(value, two["final"][name]), name
    assert one["counts"] == two["counts"]


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
def test_the_budget_is_met(runs, mount):
    """An exact budget and a fixed sparsity hold to the weight, as on one process."""
    for found in of(runs, every_goal):
        assert found["exact", mount]["nonzeros"] == 332
        assert found["search", mount]["counts"] == [128, 204]


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
def test_names_have_no_prefix(runs, mount):
    """Patterns, reports and checkpoints speak of ``0.weight``, never of ``module.0.weight``."""
    found = of(runs, every_goal)[0]["exact", mount]
    assert found["names"] == ["0.weight", "2.weight"]
    assert found["rows"] == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert list(found["training"]["latents"]) == ["0.weight", "2.weight"]
    assert sorted(found["keys"]) == sorted(found["rows"])


def test_both_mounts_agree(runs):
    """The two mounts give the same weights under DDP too."""
    for goal in GOALS:
        found = of(runs, every_goal)[0]
        one, other = found[goal, "Pruner"]["final"], found[goal, "ParametrizedPruner"]["final"]
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_wrapping_after_the_pruner_was_built(runs):
    """The pruner may be built on the bare module; wrapping it later changes nothing."""
    one, two = (found["training"] for found in of(runs, wrapped_later))
    for part in ("control", "latents"):
        for name, value in one[part].items():
            assert torch.equal(value, two[part][name]), name
    for found in of(runs, wrapped_later):
        assert found["reports"][0] == found["reports"][1]
        plain, wrapped = found["final"]
        for name, value in wrapped.items():
            assert torch.equal(plain[name], value), name


def test_the_other_mount_wants_to_come_first(runs):
    """A wrapped model cannot be parametrized any more; it is refused with a sentence instead of failing in step two."""
    for found in of(runs, other_mount):
        assert found["said"] is not None
        assert "DistributedDataParallel" in found["said"]
        assert "pb.Pruner" in found["said"]
        assert found["keys"] == list(network().state_dict())


def test_unused_parameters(runs):
    """Parameters that a forward pass does not reach stay pruned and equal on both ranks."""
    (one, counts), (two, _) = of(runs, unused)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert counts == [256, 409, 320]


def test_ranks_may_have_different_numbers_of_threads():
    """Equal gradients give equal bits whatever the threads, as torch's optimizers do: DDP relies on nothing less."""

    def rank(threads):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 150))
        gradients = [torch.randn_like(p) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=0.01), threshold_lr=1e-3, shrink="power")
            for _ in range(3):
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        return pruner.r(), copy.deepcopy(model.state_dict())

    (one_r, one), (two_r, two) = rank(1), rank(2)
    assert torch.equal(one_r, two_r)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
