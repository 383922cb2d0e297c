"""Weights changed between steps by somebody else (loading, `.data`, in place) are the model's, and are not lost."""

import copy

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import PRUNED, assert_same, backward, batches, copied, network, nonzeros, train
from torch import nn

import pareback as pb


def pruned(shrink="power", sparsity=0.5, lr=0.1, seed=0):
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=sparsity), ramp=0, shrink=shrink)
    return model, optimizer, pruner


def still_step(model, optimizer):
    """Take a step that changes nothing by itself."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def latents(pruner, model):
    with pruner.latents():
        return copied(model)


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_loading_in_mid_training_is_not_lost(shrink):
    """``model.load_state_dict`` between two steps: the next step starts from the loaded weights, all of them."""
    model, optimizer, pruner = pruned(shrink)
    train(model, optimizer, batches(10))
    other = copied(network(seed=7))
    model.load_state_dict(other)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), other)
    assert sum(nonzeros(model)) < 0.7 * 3328
    for batch in batches(10):
        train(model, optimizer, [batch])
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.5, abs=0.02)
    assert pruner.finish().pruned_nonzeros == 1664


def test_loading_just_before_finish_is_not_lost():
    """Weights loaded after the last step are the ones that ``finish()`` cuts to the budget."""
    model, optimizer, pruner = pruned("hard")
    train(model, optimizer, batches(5))
    other = copied(network(seed=7))
    model.load_state_dict(other)
    with pytest.warns(UserWarning, match="1,664 of 3,328 non-zero weights in one shot"):
        pruner.finish()
    for name in PRUNED:
        kept = model.get_parameter(name) != 0
        assert torch.equal(model.get_parameter(name)[kept], other[name][kept])
    assert sum(nonzeros(model)) == 1664


EDITS = {
    "data": lambda w: w.data.__setitem__(slice(0, 8), 0.5),
    "data swapped": lambda w: setattr(w, "data", torch.cat([torch.full_like(w[:8], 0.5), w.data[8:]])),
    "in place": lambda w: w.detach()[:8].fill_(0.5),
    "numpy": lambda w: w.detach().numpy().__setitem__(slice(0, 8), 0.5),
    "copy": lambda w: w.detach().copy_(torch.cat([torch.full_like(w[:8], 0.5), w.detach()[8:]])),
}


@pytest.mark.parametrize("shrink", ["hard", "power"])
@pytest.mark.parametrize("how", EDITS)
def test_edits_are_taken_over_and_the_rest_is_kept(how, shrink):
    """Eight rows are overwritten, in ways the version counter sees or not: they stay, and so do all other latents."""
    model, optimizer, pruner = pruned(shrink)
    train(model, optimizer, batches(5))
    before = latents(pruner, model)
    weight = model[0].weight
    version = weight._version
    EDITS[how](weight)
    if how in ("data", "numpy"):
        assert weight._version == version
    still_step(model, optimizer)
    after = latents(pruner, model)
    assert (after["0.weight"][:8] == 0.5).all()
    assert torch.equal(after["0.weight"][8:], before["0.weight"][8:])
    assert torch.equal(after["2.weight"], before["2.weight"])


@pytest.mark.parametrize("ask", ["latents", "finish", "prune_"])
def test_an_edit_since_the_last_step_is_seen_by_whoever_asks(ask):
    """An edit is part of the model at once, without a step in between."""
    model, optimizer, pruner = pruned("hard")
    train(model, optimizer, batches(3))
    model[0].weight.data[:8] = 0.5
    survivors = model[2].weight[:4] != 0
    model[2].weight.data[:4] = 0.0
    if ask == "latents":
        assert (latents(pruner, model)["0.weight"][:8] == 0.5).all()
    elif ask == "finish":
        pruner.finish()
        assert (model[0].weight[:8] == 0.5).all()
        assert (model[2].weight[:4][survivors] == 0.0).all()
    else:
        with pruner.latents():
            average = copy.deepcopy(model)
        pruner.prune_(average)
        assert nonzeros(average) == nonzeros(model)


def test_zeroed_rows_stay_zero_where_they_survived():
    """Zeroing rows by hand removes the survivors in them; what had been pruned there keeps its latent weight."""
    model, optimizer, pruner = pruned("hard")
    train(model, optimizer, batches(5))
    before, survivors = latents(pruner, model), model[0].weight.detach() != 0
    with torch.no_grad():
        model[0].weight[:8] = 0.0
    still_step(model, optimizer)
    after = latents(pruner, model)["0.weight"]
    rows = torch.zeros_like(survivors)
    rows[:8] = True
    assert (after[rows & survivors] == 0).all()
    assert torch.equal(after[~(rows & survivors)], before["0.weight"][~(rows & survivors)])


def test_no_negative_zeros_are_left():
    """Pruned weights are plain zeros, so that comparing and compressing bytes works."""
    model, optimizer, _ = pruned("power")
    train(model, optimizer, batches(5))
    for name in PRUNED:
        weight = model.get_parameter(name)
        assert not torch.signbit(weight[weight == 0]).any()


def test_a_nan_is_shown_and_not_spread():
    """A NaN written into one weight stays that one weight's; thresholds of all tensors stay finite."""
    model, optimizer, pruner = pruned("power")
    train(model, optimizer, batches(5))
    model[0].weight.data[3, 4] = torch.nan
    still_step(model, optimizer)
    assert torch.isnan(model[0].weight).sum() == 1
    assert torch.isfinite(pruner.r()).all()
    assert torch.isfinite(model[2].weight).all()
    model[0].weight.data[3, 4] = 0.1
    train(model, optimizer, batches(3))
    assert torch.isfinite(model[0].weight).all()
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_casting_the_model_keeps_the_latent_weights(shrink, dtype):
    """``model.double()`` or ``.bfloat16()`` in mid-training casts the latents too: survivors are not shrunk twice."""
    model, optimizer, pruner = pruned(shrink)
    train(model, optimizer, batches(5))
    before = {name: value.to(dtype) for name, value in latents(pruner, model).items()}
    model.to(dtype)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), before)
    train(model, optimizer, batches(5, dtype=dtype))
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.5, abs=0.02)
    assert pruner.finish().pruned_nonzeros == 1664


def test_another_memory_format_keeps_the_latent_weights():
    """``model.to(memory_format=channels_last)`` after construction changes strides and no values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 32, 3), nn.Flatten(), nn.Linear(32 * 4 * 4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), ramp=0)
    before = latents(pruner, model)
    model.to(memory_format=torch.channels_last)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), before)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        assert nonzeros(model, pruner.names) == pruner.counts()


@EITHER_MOUNT
@pytest.mark.parametrize("first", ["model", "pruner"])
@pytest.mark.parametrize(
    "goal", [pb.Budget(sparsity=0.8), pb.Fixed(sparsity=0.8, bound="gaussian"), pb.Unconstrained()]
)
def test_the_order_of_loading_does_not_matter(goal, first, mount):
    """Model then pruner or pruner then model: both go on exactly as the run that was saved."""

    def build(seed):
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, mount(model, optimizer, goal, total_steps=40, shrink="power")

    model, optimizer, pruner = build(0)
    train(model, optimizer, batches(20))
    saved_model, saved_pruner = copied(model), copy.deepcopy(pruner.state_dict())

    other, other_optimizer, other_pruner = build(5)
    steps = [lambda: other.load_state_dict(saved_model), lambda: other_pruner.load_state_dict(saved_pruner)]
    for load in steps if first == "model" else steps[::-1]:
        load()
    assert_same(copied(other), saved_model)
    train(model, optimizer, batches(20))
    train(other, other_optimizer, batches(20))
    assert_same(copied(other), copied(model))
    assert torch.equal(other_pruner.r(), pruner.r())


@pytest.mark.parametrize("shrink", ["hard", "power"])
@pytest.mark.parametrize(
    "goal",
    [
        pb.Budget(sparsity=0.8),
        pb.Budget(sparsity=0.3),
        pb.Fixed(sparsity=0.8),
        pb.Fixed(sparsity=0.8, bound="gaussian"),
        pb.Unconstrained(weight=0.1),
    ],
    ids=["exact", "exact-30", "search", "gaussian", "unconstrained"],
)
def test_a_model_loaded_before_the_pruner_is_built(goal, shrink):
    """The commonest script: build and load the model, then build the pruner (which prunes) and load its state."""

    def build(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, pb.Pruner(model, optimizer, goal, ramp=0, shrink=shrink)

    model = network()
    optimizer, pruner = build(model)
    train(model, optimizer, batches(20))
    saved_model, saved_pruner = copied(model), copy.deepcopy(pruner.state_dict())

    other = network(seed=5)
    other.load_state_dict(saved_model)
    other_optimizer, other_pruner = build(other)
    other_pruner.load_state_dict(saved_pruner)
    assert_same(copied(other), saved_model)
    assert_same(latents(other_pruner, other), latents(pruner, model))
    train(model, optimizer, batches(5))
    train(other, other_optimizer, batches(5))
    assert_same(copied(other), copied(model))


def test_rolling_back_to_a_checkpoint():
    """Restoring model, optimizer and pruner in place after a bad stretch repeats the run bit for bit."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=40)
    train(model, optimizer, batches(20))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), pruner.state_dict()])
    train(model, optimizer, batches(20, seed=2))
    wanted = {**copied(model), "r": pruner.r()}
    for thing, state in zip([model, optimizer, pruner], saved, strict=True):
        thing.load_state_dict(state)
    assert int(pruner.metrics()["step"]) == 20
    train(model, optimizer, batches(20, seed=2))
    assert_same({**copied(model), "r": pruner.r()}, wanted)


def test_saving_right_after_an_edit():
    """A checkpoint taken between an edit and the next step holds the edit."""
    model, optimizer, pruner = pruned("power")
    train(model, optimizer, batches(5))
    model[0].weight.data[:8] = 0.5
    saved_model, saved_pruner = copied(model), copy.deepcopy(pruner.state_dict())
    other, other_optimizer, other_pruner = pruned("power", seed=3)
    other_pruner.load_state_dict(saved_pruner)
    other.load_state_dict(saved_model)
    backward(model, batches(1)[0])
    backward(other, batches(1)[0])
    optimizer.step()
    other_optimizer.step()
    assert_same(copied(other), copied(model))
