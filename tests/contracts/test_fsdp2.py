"""FSDP2 (``fully_shard``): sharded training gives what one process gives, and counts are those of whole tensors."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import batches, in_two_processes, of
from torch import nn

import pareback as pb

if dist.is_available():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
]

WORLD = 2
GOALS = {
    "exact": (pb.Budget(sparsity=0.8), {}),
    "exact-hard": (pb.Budget(params=0.3), {"shrink": "hard"}),
    "squared": (pb.Budget(sparsity=0.8, enforce="squared", weight=1.0), {}),
    "search": (pb.Fixed(sparsity=0.8), {}),
    "gaussian": (pb.Fixed(sparsity=0.8, bound="gaussian"), {}),
    "unconstrained": (pb.Unconstrained(weight=1.0), {}),
    "no-straight-through": (pb.Budget(sparsity=0.8), {"straight_through": False}),
}
#: Rows: 33 and 25 do not divide by two, and of the single row of the last one rank has nothing.
NAMES = ["0.weight", "2.weight", "4.weight"]


def network(seed=0):
    """Return a network whose pruned tensors shard unevenly, with a tensor of one row."""
    torch.manual_seed(seed)
    body = [nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 25), nn.Tanh(), nn.Linear(25, 1, bias=False)]
    return nn.Sequential(*body, nn.Linear(1, 4))


def sharded(seed=0):
    model = network(seed)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build(model, goal="exact", optimizer=None):
    wanted, options = GOALS[goal]
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optimizer, pb.Pruner(model, optimizer, wanted, total_steps=20, include=NAMES, **options)


def steps(model, optimizers, data, rank=None):
    """Train on this rank's half of each batch, or on all of it."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for x, y in data:
        if rank is not None:
            x, y = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def weights(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def latents(pruner):
    return {name: whole(value) for name, value in pruner.state_dict()["latents"].items()}


def plain_numbers(report):
    return {row.name: (row.nonzeros, row.params, row.pruned) for row in report.rows}


def observed(model, pruner):
    """What a user can see of a run, in whole tensors."""
    return {
        "r": pruner.r(),
        "weights": weights(model),
        "latents": latents(pruner),
        "counts": pruner.counts(),
        "metrics": pruner.metrics(),
        "inspect": plain_numbers(pb.inspect(model)),
        "inspect with pruner": plain_numbers(pb.inspect(model, pruner)),
    }


def _one_process(goal):
    model = network()
    optimizer, pruner = build(model, goal)
    found = {"start": observed(model, pruner)}
    steps(model, optimizer, batches(20, size=32))
    found["trained"] = observed(model, pruner)
    report = pruner.finish()
    found["final"] = {"weights": weights(model), "counts": pruner.counts(), "report": plain_numbers(report)}
    return found


def every_goal(rank, folder):
    found = {}
    for goal in GOALS:
        model = sharded(seed=0)
        optimizer, pruner = build(model, goal)
        found[goal] = {"start": observed(model, pruner)}
        steps(model, optimizer, batches(20, size=32), rank)
        found[goal]["trained"] = observed(model, pruner)
        found[goal]["local"] = {n: tuple(p.to_local().shape) for n, p in model.named_parameters()}
        report = pruner.finish()
        found[goal]["final"] = {"weights": weights(model), "counts": pruner.counts(), "report": plain_numbers(report)}
    return found


def resumed(rank, folder):
    """Resuming, with a file per rank and with a distributed checkpoint."""
    found, data = {}, batches(20, size=32)
    model = sharded()
    optimizer, pruner = build(model, "exact", torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, optimizer, data[:10], rank)
    torch.save([model.state_dict(), pruner.state_dict()], f"{folder}/own-{rank}.pt")
    dcp.save({"model": model.state_dict(), "pruner": pruner.state_dict()}, checkpoint_id=f"{folder}/dcp")
    found["saved"] = observed(model, pruner)
    steps(model, optimizer, data[10:], rank)
    found["straight"] = observed(model, pruner)
    for how in ("own file", "distributed checkpoint"):
        other = sharded(seed=8)
        other_optimizer, other_pruner = build(other, "exact", torch.optim.SGD(other.parameters(), lr=0.1))
        if how == "own file":
            model_state, pruner_state = torch.load(f"{folder}/own-{rank}.pt", weights_only=True)
        else:
            states = {"model": other.state_dict(), "pruner": copy.deepcopy(other_pruner.state_dict())}
            dcp.load(states, checkpoint_id=f"{folder}/dcp")
            model_state, pruner_state = states["model"], states["pruner"]
        other.load_state_dict(model_state)
        other_pruner.load_state_dict(pruner_state)
        found[how, "loaded"] = observed(other, other_pruner)
        steps(other, other_optimizer, data[10:], rank)
        found[how, "resumed"] = observed(other, other_pruner)
    return found


def collectives(rank, folder):
    """One small collective per step, beside those of FSDP itself."""
    model = sharded()
    optimizer, pruner = build(model)
    steps(model, optimizer, batches(2, size=32), rank)
    pruner._step.controller.may_look = lambda: False  # as it is on a GPU
    calls = []
    names = ("all_gather_into_tensor", "all_reduce", "all_gather", "broadcast")
    originals = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, lambda *a, _n=name, **k: (calls.append((_n, a[0].numel())), originals[_n](*a, **k))[1])
    try:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


def two_optimizers(rank, folder):
    """Two optimizers, stepped in the given order or the other, or the first only now and then."""
    found, data = {}, batches(20, size=32)
    for order in ("given", "swapped", "lazy"):
        model = sharded()
        first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2:].parameters(), lr=0.1)
        pruner = pb.Pruner(model, [first, second], pb.Budget(sparsity=0.8), total_steps=20, include=NAMES)
        for number, batch in enumerate(data):
            turns = {"given": [first, second], "swapped": [second, first], "lazy": [first, second][number % 4 > 0 :]}
            steps(model, turns[order], [batch], rank)
        found[order] = observed(model, pruner)
    return found


def copies(rank, folder):
    """A copy of the weights, pruned like the model, in training and after."""
    found, model = {}, sharded()
    optimizer, pruner = build(model)
    steps(model, optimizer, batches(20, size=32), rank)
    for when in ("in training", "finished"):
        average = sharded(seed=5)
        if when == "finished":
            pruner.finish()
        pruner.prune_(average)
        found[when] = weights(average), weights(model)
    return found


def mixed_precision(rank, folder):
    """A step given a closure, clipping, and a model kept in float32 that computes in bfloat16."""
    model = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
    optimizer, pruner = build(model)
    for x, y in batches(20, size=32):
        x, y = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        optimizer.step(closure)
    return int(pruner.metrics()["step"]), pruner.finish().pruned_nonzeros


def hybrid(rank, folder):
    """Replicated over one dimension of the mesh and sharded over the other (HSDP)."""
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")))
    optimizer, pruner = build(model)
    steps(model, optimizer, batches(20, size=32), rank)
    return observed(model, pruner), pruner.finish().pruned_nonzeros


def scaled_by_hand(model, optimizer):
    """Let survivors lose a hundredth before each of ten steps that change nothing by themselves."""
    before = weights(model)["0.weight"]
    for _ in range(10):
        with torch.no_grad():
            model[0].weight.to_local().mul_(0.99)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return before, weights(model)["0.weight"]


def edited(rank, folder):
    """Weights that are scaled by hand, whose shards alone know of it."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), ramp=0, include=NAMES)
    return scaled_by_hand(model, optimizer)


def once(rank, folder):
    """Pruned once, and planned."""
    model = sharded()
    planned = pb.plan(model, pb.Budget(sparsity=0.8), include=NAMES)
    report = pb.prune_(model, pb.Budget(sparsity=0.8), include=NAMES)
    return [t.nonzeros for t in planned.tensors], plain_numbers(report), weights(model)


def refusals(rank, folder):
    """What cannot be done, and what is said about it."""
    options = {"include": NAMES, "example_inputs": torch.zeros(1, 20)}
    wrong = {
        "flops budget": lambda m, o: pb.Pruner(m, o, pb.Budget(flops=0.5), 20, **options),
        "flops penalty": lambda m, o: pb.Pruner(m, o, pb.Unconstrained(cost="flops"), **options),
        "other mount": lambda m, o: pb.ParametrizedPruner(m, o, pb.Fixed(sparsity=0.5), include=NAMES),
        "unreachable": lambda m, o: pb.Pruner(m, o, pb.Budget(params=3), 20, include=NAMES),
    }
    said = dict.fromkeys([*wrong, "nan"], "nothing")
    for name, make in wrong.items():
        model = sharded()
        before = weights(model)
        keys = list(model.state_dict())
        try:
            make(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            said[name] = str(error)
        assert list(model.state_dict()) == keys, name
        assert all(torch.equal(before[n], value) for n, value in weights(model).items()), name
    # A NaN in the shard of one rank must be refused on all: a rank that went on would wait for ever.
    model = sharded()
    if rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] = torch.nan
    try:
        build(model)
    except ValueError as error:
        said["nan"] = str(error)
    return said


@pytest.fixture(scope="module")
def runs():
    return in_two_processes(
        every_goal, resumed, collectives, two_optimizers, copies, mixed_precision, hybrid, edited, once, refusals
    )


def test_the_shards_are_uneven(runs):
    """The fixture is what it says: unequal shards, and an empty one on the second rank."""
    one, two = (found["exact"]["local"] for found in of(runs, every_goal))
    assert (one["0.weight"], two["0.weight"]) == ((17, 20), (16, 20))
    assert (one["4.weight"], two["4.weight"]) == ((1, 25), (0, 25))


@pytest.mark.parametrize("when", ["start", "trained"])
@pytest.mark.parametrize("goal", GOALS)
def test_sharded_training_equals_one_process(runs, goal, when):
    """With the same global batches, thresholds and weights after 20 steps are those of one process to rounding."""
    alone = _one_process(goal)[when]
    for found in of(runs, every_goal):
        seen = found[goal][when]
        torch.testing.assert_close(seen["r"], alone["r"], rtol=2e-4, atol=2e-5)
        for name, value in alone["latents"].items():
            torch.testing.assert_close(seen["latents"][name], value, rtol=1e-4, atol=2e-5)
        for name in NAMES:  # a weight next to its threshold may fall on the other side
            differs = (seen["weights"][name] != 0) != (alone["weights"][name] != 0)
            assert differs.sum() <= 2


@pytest.mark.parametrize("when", ["start", "trained"])
@pytest.mark.parametrize("goal", GOALS)
def test_every_rank_sees_the_whole(runs, goal, when):
    """Thresholds, counts, metrics and reports are the same on every rank, and are those of the whole tensors."""
    for found in of(runs, every_goal):
        seen = found[goal][when]
        real = [int(seen["weights"][name].count_nonzero()) for name in NAMES]
        sizes = [seen["weights"][name].numel() for name in NAMES]
        assert seen["counts"] == real
        assert [seen["inspect"][name][0] for name in NAMES] == real
        assert [seen["inspect with pruner"][name][0] for name in NAMES] == real
        assert [seen["inspect"][name][1] for name in NAMES] == sizes
        # Metrics talk to no other process, as one rank may log alone: their counts are those last exchanged, in a step.
        late = 1e-6 if when == "start" else 0.1
        assert seen["metrics"]["tensor_sparsity"].tolist() == pytest.approx(
            [1 - n / size for n, size in zip(real, sizes, strict=True)], abs=late
        )
        assert seen["metrics"]["sparsity"].item() == pytest.approx(1 - sum(real) / sum(sizes), abs=min(late, 0.02))
    one, two = (found[goal][when] for found in of(runs, every_goal))
    assert torch.equal(one["r"], two["r"])
    for name, value in one["metrics"].items():
        assert torch.equal(value, two["metrics"][name]), name
    assert one["inspect"] == two["inspect"]


@pytest.mark.parametrize("goal", GOALS)
def test_finish_counts_whole_tensors(runs, goal):
    """``finish()`` meets the count over all shards to the weight, and returns the same report on every rank."""
    one, two = (found[goal]["final"] for found in of(runs, every_goal))
    real = [int(one["weights"][name].count_nonzero()) for name in NAMES]
    assert one["counts"] == two["counts"] == real
    assert one["report"] == two["report"]
    assert [one["report"][name][0] for name in NAMES] == real
    if goal in ("exact", "no-straight-through"):
        assert sum(real) == 302  # a fifth of 660 + 825 + 25 weights
    if goal == "exact-hard":
        assert sum(real) + 66 == 472  # 1510 weights and 66 biases and head; three tenths of 1576 is 472.8
    if goal == "search":
        assert real == [132, 165, 5]
    assert all(n >= 1 for n in real)


@pytest.mark.parametrize("how", ["own file", "distributed checkpoint"])
def test_checkpoints_round_trip(runs, how):
    """A state saved by each rank, or by ``torch.distributed.checkpoint``, loads and goes on bit for bit."""
    for found in of(runs, resumed):
        for saved, loaded in (("saved", (how, "loaded")), ("straight", (how, "resumed"))):
            a, b = found[saved], found[loaded]
            assert torch.equal(a["r"], b["r"])
            assert a["counts"] == b["counts"]
            for part in ("weights", "latents", "metrics"):
                for name, value in a[part].items():
                    assert torch.equal(b[part][name], value), (loaded, part, name)


def test_a_step_costs_one_small_collective(runs):
    """However many tensors: one exchange of a few numbers each per step."""
    for calls in of(runs, collectives):
        assert len(calls) == 1
        assert calls[0][1] <= WORLD * 5 * len(NAMES)


@pytest.mark.parametrize("order", ["given", "swapped", "lazy"])
def test_two_optimizers(runs, order):
    """Each optimizer owns a part of the sharded model, stepped in either order or now and then; as on one process."""
    model = network()
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    pruner = pb.Pruner(model, [first, second], pb.Budget(sparsity=0.8), total_steps=20, include=NAMES)
    for number, batch in enumerate(batches(20, size=32)):
        turns = {"given": [first, second], "swapped": [second, first], "lazy": [first, second][number % 4 > 0 :]}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The optimizers have taken" if order == "lazy" else "none")
            steps(model, turns[order], [batch])
    for found in of(runs, two_optimizers):
        seen = found[order]
        torch.testing.assert_close(seen["r"], pruner.r(), rtol=2e-4, atol=2e-5)
        assert seen["counts"] == [int(seen["weights"][name].count_nonzero()) for name in NAMES]


@pytest.mark.parametrize("when", ["in training", "finished"])
def test_a_copy_is_pruned_to_the_same_counts(runs, when):
    """``pruner.prune_`` of a sharded copy leaves exactly the model's non-zeros in every tensor."""
    for found in of(runs, copies):
        copied, model = found[when]
        for name in NAMES:
            assert copied[name].count_nonzero() == model[name].count_nonzero(), name


def test_mixed_precision_closures_and_clipping(runs):
    """FSDP2's bfloat16 compute, a closure and gradient clipping together end on the budget."""
    assert of(runs, mixed_precision) == [(20, 302), (20, 302)]


def test_hybrid_sharding(runs):
    """Replicas of a sharded model (HSDP) stay identical and meet the budget."""
    (one, nonzeros), (two, others) = of(runs, hybrid)
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name
    assert torch.equal(one["r"], two["r"])
    assert nonzeros == others == 302


def test_decay_by_hand_takes_what_it_says(runs):
    """Survivors of a sharded model lose 9.6 % in ten steps, and are not shrunk again in each."""
    for before, after in of(runs, edited):
        large = before.abs() > 0.8 * before.abs().max()
        torch.testing.assert_close(after[large], before[large] * 0.99**10, rtol=1e-3, atol=0)


def test_pruning_once(runs):
    """``pb.plan`` and ``pb.prune_`` speak of whole tensors on every rank."""
    for planned, report, pruned in of(runs, once):
        real = [int(pruned[name].count_nonzero()) for name in NAMES]
        assert sum(real) == 302
        assert planned == real
        assert [report[name][0] for name in NAMES] == real


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("flops budget", "FLOPs"),
        ("flops penalty", "FLOPs"),
        ("other mount", "pb.Pruner"),
        ("unreachable", "The budget allows"),
        ("nan", "NaN"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(runs, what, words):
    """A sentence on every rank, the model untouched, and no rank left waiting for another."""
    for said in of(runs, refusals):
        assert words in said[what]
