"""Parameter groups: every tensor's threshold follows the learning rate of its own group, and its schedule."""

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import assert_same, backward, batches, copied, network, train

import pareback as pb

KINDS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def grouped(model, kind, first, second, **rest):
    return kind([{"params": model[:2].parameters(), **first}, {"params": model[2:].parameters(), **second}], **rest)


@EITHER_MOUNT
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("still", [0, 1])
def test_a_group_at_rest_keeps_its_threshold(kind, still, mount):
    """Under lr = 0 a tensor's weights and threshold stay to the bit, while the other group's go on."""
    model = network()
    rates = [{"lr": 1e-2}, {"lr": 1e-2}]
    rates[still] = {"lr": 0.0}
    optimizer = grouped(model, KINDS[kind], *rates)
    pruner = mount(model, optimizer, pb.Unconstrained(weight=5.0))
    before, weights = pruner.r(), [p.detach().clone() for p in pruner.parameters]
    train(model, optimizer, batches(10))
    after = pruner.r()
    assert after[still] == before[still]
    assert torch.equal(pruner.parameters[still], weights[still])
    assert after[1 - still] != before[1 - still]


@EITHER_MOUNT
def test_a_threshold_moves_in_proportion_to_its_groups_rate(mount):
    """Doubling one group's lr doubles that tensor's first move and leaves the other's alone."""

    def moves(first, second):
        model = network(dtype=torch.float64)
        optimizer = grouped(model, torch.optim.SGD, {"lr": first}, {"lr": second})
        pruner = mount(model, optimizer, pb.Unconstrained(weight=1.0))
        before = pruner.r()
        train(model, optimizer, batches(1, dtype=torch.float64))
        return pruner.r() - before

    plain, doubled = moves(0.1, 0.1), moves(0.1, 0.2)
    torch.testing.assert_close(doubled, plain * torch.tensor([1.0, 2.0], dtype=torch.float64), rtol=1e-9, atol=0)
    torch.testing.assert_close(moves(0.3, 0.1)[0], 3 * plain[0], rtol=1e-9, atol=0)


def test_the_first_move_is_the_one_on_paper():
    """SGD moves r by −0.01·lr·(∂L/∂r + λ·∂L_s/∂r), each written out here from the weights."""
    model = network(dtype=torch.float64)
    optimizer = grouped(model, torch.optim.SGD, {"lr": 0.1}, {"lr": 0.4, "weight_decay": 0.5})
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=3.0))
    latents = [value.clone() for value in pruner.state_dict()["latents"].values()]
    r = pruner.r().requires_grad_()
    backward(model, batches(1, dtype=torch.float64)[0])
    task = [((w.detach() - v) * w.grad).sum() for w, v in zip(pruner.parameters, latents, strict=True)]
    share = torch.tensor([v.numel() for v in latents], dtype=torch.float64)
    density = (share / share.sum() * (1 - torch.erf(r / 2**0.5))).sum()
    (goal,) = torch.autograd.grad(3.0 * density, r)
    rates = torch.tensor([0.1, 0.4], dtype=torch.float64)
    wanted = -0.01 * rates * (torch.stack(task) / r.detach() + goal)
    optimizer.step()
    torch.testing.assert_close(pruner.r() - r.detach(), wanted, rtol=1e-9, atol=0)


@EITHER_MOUNT
def test_weight_decay_acts_on_latent_weights(mount):
    """Decay shrinks pruned and surviving weights alike, by its own group's factor."""
    model = network()
    optimizer = grouped(model, torch.optim.AdamW, {"weight_decay": 0.0}, {"weight_decay": 0.25}, lr=0.5)
    pruner = mount(model, optimizer, pb.Fixed(sparsity=0.5))
    before = [value.clone() for value in pruner.state_dict()["latents"].values()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = list(pruner.state_dict()["latents"].values())
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1] * (1 - 0.5 * 0.25))
    assert pruner.counts() == [640, 1024]


@EITHER_MOUNT
@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_follow_a_scheduler(kind, mount):
    """Once a schedule has taken lr to zero, thresholds stand still; before that they move less and less."""
    model = network()
    optimizer = grouped(model, KINDS[kind], {"lr": 4e-3}, {"lr": 2e-3})
    pruner = mount(model, optimizer, pb.Unconstrained(weight=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / 8))
    trace = [pruner.r()]
    for batch in batches(12):
        train(model, optimizer, [batch])
        scheduler.step()
        trace.append(pruner.r())
    moves = torch.stack(trace).diff(dim=0).abs()
    assert moves[:8].amin() > 0
    assert moves[8:].amax() == 0
    assert (moves[7] < 0.3 * moves[0]).all()


@EITHER_MOUNT
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_as_learning_rate(kind, mount):
    """lr may be a tensor: same thresholds as the number, and changing it in place is followed."""

    def run(tensor):
        model = network()
        rate = torch.tensor(2.0**-7) if tensor else 2.0**-7
        optimizer = KINDS[kind](model.parameters(), lr=rate)
        pruner = mount(model, optimizer, pb.Unconstrained(weight=1.0))
        train(model, optimizer, batches(5))
        middle = pruner.r()
        if tensor:
            rate.fill_(0.0)
        else:
            optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, batches(5))
        assert torch.equal(pruner.r(), middle)
        return middle

    torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=0)


def test_a_tensor_of_one_element_as_learning_rate():
    """Optimizers accept lr of shape (1,) too."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor([1e-3]))
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=5)
    train(model, optimizer, batches(5))
    assert pruner.finish().pruned_nonzeros == 665


def test_the_order_of_groups_does_not_matter():
    """The same tensors at the same rates end the same, whichever group comes first."""

    def run(backwards):
        model = network()
        groups = [
            {"params": [model[0].weight], "lr": 0.1, "momentum": 0.9},
            {"params": [model[0].bias, model[2].bias, *model[4].parameters()], "lr": 0.05, "momentum": 0.0},
            {"params": [model[2].weight], "lr": 0.02, "momentum": 0.5, "weight_decay": 0.01},
        ]
        optimizer = torch.optim.SGD(groups[::-1] if backwards else groups)
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
        train(model, optimizer, batches(20))
        return pruner.r(), copied(model)

    (r, weights), (other_r, other) = run(False), run(True)
    assert torch.equal(r, other_r)
    assert_same(other, weights)


def test_a_group_added_later():
    """``add_param_group`` after construction is nothing to the pruner: the new tensors are trained, not pruned."""
    model = network()
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    train(model, optimizer, batches(3))
    head = model[4].weight.detach().clone()
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
    train(model, optimizer, batches(3))
    assert not torch.equal(model[4].weight, head)
    assert pruner.counts() == [256, 409]


def test_rates_survive_loading_the_optimizers_state():
    """``optimizer.load_state_dict`` replaces the groups; the thresholds follow the new ones."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = pruner.r()
    train(model, optimizer, batches(3))
    assert torch.equal(pruner.r(), before)


@EITHER_MOUNT
def test_maximising_pulls_thresholds_the_other_way(mount):
    """Maximising −L is minimising L, for the thresholds as for the weights."""

    def run(maximize):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=maximize)
        pruner = mount(model, optimizer, pb.Unconstrained(weight=0.1), threshold_lr=1.0)
        for x, y in batches(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (-loss if maximize else loss).backward()
            optimizer.step()
        return pruner.r()

    torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=0)


def test_a_group_without_a_learning_rate_is_refused_at_once():
    """An optimizer that sets its own step size (lr=None, as Adafactor may) is refused with a sentence, not mid-run."""
    model = network()
    before = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr"):
        pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    assert_same(copied(model), before)
