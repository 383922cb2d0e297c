"""DistributedDataParallel: replicas stay identical bit for bit, the budget is met, and names have no prefix."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import batches, network

import pareback as pb

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

WORLD = 2


def spawn(work, *args):
    """Run ``work(rank, *args)`` in two gloo processes and return what they return."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (work, folder, args), nprocs=WORLD)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def _process(rank, work, folder, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


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


def _contract(rank):
    """Everything that one model can show, in one start of the processes."""
    found = {}
    for goal in GOALS:
        for mount in (pb.Pruner, pb.ParametrizedPruner):
            model = network(seed=rank)  # DDP makes the replicas equal
            replica = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(replica.parameters(), lr=3e-3)
            pruner = mount(replica, optimizer, GOALS[goal], total_steps=25)
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


@pytest.fixture(scope="module")
def runs():
    return spawn(_contract)


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
@pytest.mark.parametrize("goal", GOALS)
def test_replicas_are_identical(runs, goal, mount):
    """Weights, latent weights, thresholds and masks agree on both ranks to the last bit, during training and after."""
    one, two = (found[goal, mount] for found in runs)
    for part in ("control", "latents"):
        for name, value in one["training"][part].items():
            assert torch.equal(value, two["training"][part][name]), name
    for name, value in one["final"].items():
        assert torch.equal(value, two["final"][name]), name
    assert one["counts"] == two["counts"]


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
def test_the_budget_is_met(runs, mount):
    """An exact budget and a fixed sparsity hold to the weight, as on one process."""
    for found in runs:
        assert found["exact", mount]["nonzeros"] == 332
        assert found["search", mount]["counts"] == [128, 204]


@pytest.mark.parametrize("mount", ["Pruner", "ParametrizedPruner"])
def test_names_have_no_prefix(runs, mount):
    """Patterns, reports and checkpoints speak of ``0.weight``, never of ``module.0.weight``."""
    found = runs[0]["exact", mount]
    assert found["names"] == ["0.weight", "2.weight"]
    assert found["rows"] == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert list(found["training"]["latents"]) == ["0.weight", "2.weight"]
    assert sorted(found["keys"]) == sorted(found["rows"])


def test_both_mounts_agree(runs):
    """The two mounts give the same weights under DDP too."""
    for goal in GOALS:
        one, other = runs[0][goal, "Pruner"]["final"], runs[0][goal, "ParametrizedPruner"]["final"]
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def _more(rank):
    """Whatever else a user of DDP does."""
    found = {}

    # A pruner built on the module before it is wrapped, and a state moved from a wrapped run to a plain one.
    model = network(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    steps(replica, optimizer, 20, rank)
    found["wrapped later"] = copy.deepcopy(pruner.state_dict())
    plain = network(seed=3)
    other = pb.Pruner(plain, torch.optim.SGD(plain.parameters(), lr=0.1), pb.Budget(sparsity=0.8), total_steps=20)
    other.load_state_dict(pruner.state_dict())
    plain.load_state_dict(model.state_dict())
    assert other.finish().as_dict() == pruner.finish().as_dict()
    found["moved"] = [copy.deepcopy(m.state_dict()) for m in (plain, model)]

    # Pruned weights have no gradient (no straight-through), and some parameters are not reached at all.
    model = network(seed=0)
    model.spare = nn.Linear(40, 40)
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    pruner = pb.Pruner(replica, optimizer, pb.Fixed(sparsity=0.8), straight_through=False)
    steps(replica, optimizer, 5, rank)
    found["unused"] = [copy.deepcopy(model.state_dict()), pruner.counts()]

    # Ranks that do not have the same number of threads add up in another order.
    torch.set_num_threads(1 + rank)
    found["threads"] = {}
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4)).to(
            dtype
        )
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
        pruner = pb.Pruner(replica, optimizer, pb.Budget(sparsity=0.9), total_steps=12)
        for x, y in batches(12, size=32, dtype=dtype):
            optimizer.zero_grad()
            F.cross_entropy(replica(x.chunk(WORLD)[rank]).float(), y.chunk(WORLD)[rank]).backward()
            optimizer.step()
        found["threads"][dtype] = copy.deepcopy(model.state_dict()), pruner.r()
        pruner.finish()
    return found


@pytest.fixture(scope="module")
def more():
    return spawn(_more)


def test_wrapping_after_the_pruner_was_built(more):
    """The pruner may be built on the bare module; wrapping it later changes nothing."""
    one, two = (found["wrapped later"] for found in more)
    for part in ("control", "latents"):
        for name, value in one[part].items():
            assert torch.equal(value, two[part][name]), name
    for plain, wrapped in (found["moved"] for found in more):
        for name, value in wrapped.items():
            assert torch.equal(plain[name], value), name


def test_unused_parameters(more):
    """Parameters that a forward pass does not reach stay pruned and equal on both ranks."""
    (one, counts), (two, _) = (found["unused"] for found in more)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert counts == [256, 409, 320]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_ranks_with_different_numbers_of_threads(more, dtype):
    """Replicas stay identical even where ranks add up in a different order: a plain DDP model would, too."""
    (one, one_r), (two, two_r) = (found["threads"][dtype] for found in more)
    assert torch.equal(one_r, two_r)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
