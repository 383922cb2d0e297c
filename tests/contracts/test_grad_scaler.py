"""GradScaler: skipped steps leave no trace, and scaled gradients pull on thresholds as unscaled ones do."""

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import assert_same, batches, copied, network, nonzeros

import pareback as pb

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
}
GOALS = {
    "exact": pb.Budget(sparsity=0.8),
    "squared": pb.Budget(sparsity=0.8, enforce="squared"),
    "search": pb.Fixed(sparsity=0.8),
    "gaussian": pb.Fixed(sparsity=0.8, bound="gaussian"),
    "unconstrained": pb.Unconstrained(weight=1.0),
}


def scaled_backward(model, batch, scaler, dtype):
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
    scaler.scale(loss).backward()


def control(pruner):
    return {name: value.clone() for name, value in pruner.state_dict()["control"].items()}


@pytest.mark.parametrize(
    ("name", "goal", "mount"),
    [
        *((name, goal, pb.Pruner) for name in OPTIMIZERS for goal in GOALS),
        *((name, "exact", pb.ParametrizedPruner) for name in OPTIMIZERS),
    ],
)
def test_skipped_step_leaves_no_trace(name, goal, mount):
    """An overflow skips the step: weights, thresholds and step counter are as before, and the model is still sparse."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    pruner = mount(model, optimizer, GOALS[goal], total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in batches(12):
        scaled_backward(model, batch, scaler, torch.float16)
        scaler.step(optimizer)
        scaler.update()
    weights, before, counts = copied(model), control(pruner), pruner.counts()
    assert max(pruner.metrics()["tensor_sparsity"]) > 0.2

    for poison in (torch.inf, torch.nan):
        scaled_backward(model, batches(1)[0], scaler, torch.float16)
        pruner.parameters[0].grad[0, 0] = poison
        pruner.parameters[1].grad.fill_(poison)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < scale  # it was skipped

        assert_same(copied(model), weights)
        assert_same(control(pruner), before)
        assert pruner.counts() == counts


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_a_search_that_cannot_be_met_rests_in_a_skipped_step(shrink):
    """Equal weights leave a fixed sparsity out of reach, so the search is never done; a skipped step does not go on."""
    model = network()
    with torch.no_grad():
        for name in ("0.weight", "2.weight"):
            model.get_parameter(name).mul_(20).round_().div_(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.5), shrink=shrink)
    weights, before = copied(model), control(pruner)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaled_backward(model, batches(1)[0], scaler, torch.bfloat16)
    model[0].weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    assert_same(copied(model), weights)
    assert_same(control(pruner), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_skipped_step(name):
    """A run with a skipped step ends where the run without that batch ends, bit for bit."""

    def run(overflow_at):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, backoff_factor=1 - 2**-40)
        for number, batch in enumerate(batches(20)):
            if number == overflow_at:
                scaled_backward(model, batches(1, seed=9)[0], scaler, torch.bfloat16)
                model[0].weight.grad[3] = torch.inf
                scaler.step(optimizer)
                scaler.update()
            scaled_backward(model, batch, scaler, torch.bfloat16)
            scaler.step(optimizer)
            scaler.update()
        pruner.finish()
        return copied(model)

    assert_same(run(overflow_at=7), run(overflow_at=None))


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize("goal", ["exact", "squared", "unconstrained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaling_does_not_change_the_thresholds(name, goal, mount):
    """Scaling by a power of two is exact in bfloat16, so thresholds and weights equal those of unscaled training."""

    def run(scale):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        pruner = mount(model, optimizer, GOALS[goal], total_steps=24)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for batch in batches(24):
            scaled_backward(model, batch, scaler, torch.bfloat16)
            scaler.step(optimizer)
            scaler.update()
        return pruner.r(), copied(model)

    (plain_r, plain), (scaled_r, scaled) = run(1.0), run(2.0**12)
    assert torch.equal(scaled_r, plain_r)
    assert_same(scaled, plain)
    assert plain_r.std() > 0  # the task's gradient did tell the tensors apart


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unscaling_first_for_clipping(name):
    """``scaler.unscale_`` before clipping, as the AMP manual has it: the pull is not unscaled a second time."""

    def run(scale):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for batch in batches(10):
            scaled_backward(model, batch, scaler, torch.bfloat16)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return pruner.r()

    assert torch.equal(run(2.0**10), run(1.0))


def test_float16_training_lands_on_the_budget():
    """The usual float16 recipe, starting from a scale that overflows, ends on the budget to the weight."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    skipped = 0
    for batch in batches(60):
        if int(pruner.metrics()["step"]) == 40:
            break
        scale = scaler.get_scale()
        scaled_backward(model, batch, scaler, torch.float16)
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
    assert skipped > 3
    assert int(pruner.metrics()["step"]) == 40
    pruner.finish()
    assert sum(nonzeros(model)) == 332  # of 3328 weights, 332.8 are allowed


def test_one_of_two_scaled_optimizers_skips():
    """Two fused optimizers under one scaler: where one overflows, its weights stay and the other's move."""
    model = network()
    first = torch.optim.AdamW(model[:2].parameters(), lr=3e-3, fused=True)
    second = torch.optim.AdamW(model[2:].parameters(), lr=3e-3, fused=True)
    pruner = pb.Pruner(model, [first, second], pb.Budget(sparsity=0.8), total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, batch in enumerate(batches(30)):
        scaled_backward(model, batch, scaler, torch.bfloat16)
        weights = copied(model)
        if number == 25:
            model[0].weight.grad[0, 0] = torch.inf
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        if number == 25:
            with pruner.latents():
                assert torch.isfinite(model[0].weight).all()
            moved = {name: not torch.equal(value, weights[name]) for name, value in model.state_dict().items()}
            assert moved["2.weight"]
            assert not moved["0.bias"]
    assert torch.isfinite(pruner.r()).all()
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.8, abs=0.01)
