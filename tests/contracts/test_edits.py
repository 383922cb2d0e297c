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


def scaled(weight):
    with torch.no_grad():
        weight.mul_(0.99)


def scaled_by_foreach(weight):
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.99)


def scaled_as_data(weight):
    weight.data.mul_(0.99)


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("decay", [scaled, scaled_by_foreach, scaled_as_data])
@pytest.mark.filterwarnings("ignore:Pruned weights are changed between steps through .data")
def test_decay_by_hand_takes_what_it_says(decay, shrink):
    """A loop that scales weights by 0.99 before each of 10 steps: survivors lose 9.6 %, and are not shrunk again."""
    model, optimizer, _ = pruned(shrink, lr=1e-12)
    train(model, optimizer, batches(1))
    before = copied(model)["0.weight"]
    for _ in range(10):
        decay(model[0].weight)
        still_step(model, optimizer)
    after = copied(model)["0.weight"]
    large = before.abs() > 0.8 * before.abs().max()
    torch.testing.assert_close(after[large], before[large] * 0.99**10, rtol=1e-3, atol=0)


def noisy(weight, seed):
    with torch.no_grad():
        weight.add_(1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def noisy_as_data(weight, seed):
    weight.data = weight.data + 1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))


def pulled_to_the_start(weight, seed):
    with torch.no_grad():
        weight.lerp_(network()[0].weight, 1e-3)


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("move", [noisy, noisy_as_data, pulled_to_the_start])
@pytest.mark.filterwarnings("ignore:Pruned weights are changed between steps through .data")
def test_a_move_of_all_weights_shrinks_none(move, shrink):
    """All zeros get a little in each of 50 steps: survivors stay, and so does what is behind zeros."""
    model, optimizer, pruner = pruned(shrink, lr=1e-12)
    train(model, optimizer, batches(1))
    weight, before, behind = model[0].weight, copied(model)["0.weight"], latents(pruner, model)["0.weight"]
    for seed in range(50):
        move(weight, seed)
        still_step(model, optimizer)
    after = latents(pruner, model)["0.weight"]
    large = before.abs() > 0.5 * before.abs().max()
    assert (weight[large] / before[large]).mean().item() == pytest.approx(1.0, abs=0.06)  # the pull's own share is 0.05
    assert after[before == 0].std().item() == pytest.approx(behind[before == 0].std().item(), rel=0.06)
    assert torch.corrcoef(torch.stack([after[before == 0], behind[before == 0]]))[0, 1] > 0.98


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["tiny", "usual"])
def test_weights_that_begin_anew_are_no_move(scale, shrink):
    """They are other ones however small they are: bit for bit the latent weights from then on."""
    model, optimizer, pruner = pruned(shrink, sparsity=0.9)
    train(model, optimizer, batches(5))
    other = {name: scale * value for name, value in copied(network(seed=7)).items()}
    model.load_state_dict(other)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), other)


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
def test_latent_weights_that_are_written_back_are_no_move(shrink):
    """Saved within latents() and loaded a few steps later they are what they were, and not twice that."""
    model, optimizer, pruner = pruned(shrink, sparsity=0.9, lr=1e-4)
    train(model, optimizer, batches(5))
    saved = latents(pruner, model)
    train(model, optimizer, batches(3, seed=2))
    model.load_state_dict(saved)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), saved)


def in_one_step(model, optimizer, pruner):
    return model, optimizer


def as_a_copy(model, optimizer, pruner):
    model, optimizer, _ = copy.deepcopy((model, optimizer, pruner))
    return model, optimizer


def with_more_to_train(model, optimizer, pruner):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return model, optimizer


def resumed(model, optimizer, pruner):
    """Go on elsewhere, the state loaded before the model."""
    other, other_optimizer, other_pruner = pruned("power", lr=1e-12, seed=3)
    other_pruner.load_state_dict(pruner.state_dict())
    other.load_state_dict(model.state_dict())
    return other, other_optimizer


def resumed_the_other_way_round(model, optimizer, pruner):
    other, other_optimizer, other_pruner = pruned("power", lr=1e-12, seed=3)
    other.load_state_dict(model.state_dict())
    other_pruner.load_state_dict(pruner.state_dict())
    return other, other_optimizer


@pytest.mark.parametrize(
    "then", [in_one_step, as_a_copy, with_more_to_train, resumed, resumed_the_other_way_round], ids=lambda f: f.__name__
)
def test_an_edit_of_survivors_is_remembered_until_the_next_step(then):
    """They are halved, and only then comes a copy, a group or a checkpoint: nowhere are they shrunk once more."""
    model, optimizer, pruner = pruned("power", lr=1e-12)
    train(model, optimizer, batches(5))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    halved = copied(model)
    model, optimizer = then(model, optimizer, pruner)
    still_step(model, optimizer)
    for name in PRUNED:
        kept = halved[name] != 0
        torch.testing.assert_close(model.get_parameter(name).detach()[kept], halved[name][kept], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("edited", PRUNED)
@pytest.mark.parametrize("order", [1, -1], ids=["as given", "the other way round"])
def test_an_edit_is_kept_beside_several_optimizers(edited, order):
    """The thresholds move in a step of one of them, and prune what another will step only later."""
    model = network()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-12) for layer in (model[0], model[2], model[4])]
    pb.Pruner(model, optimizers, pb.Budget(sparsity=0.5), ramp=0)
    train(model, optimizers, batches(5))
    with torch.no_grad():
        model.get_parameter(edited).mul_(0.5)
    halved = copied(model)[edited]
    for optimizer in optimizers[::order]:
        still_step(model, optimizer)
    kept = halved != 0
    torch.testing.assert_close(model.get_parameter(edited).detach()[kept], halved[kept], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_rows_that_begin_anew_in_a_part_that_steps_later(shrink):
    """The last optimizer moves the thresholds first: what was written elsewhere was added to the latent weights."""
    model = network()
    optimizers = [torch.optim.SGD(part, lr=1e-12) for part in (model[:2].parameters(), model[2:].parameters())]
    pruner = pb.Pruner(model, optimizers, pb.Budget(sparsity=0.5), ramp=0, shrink=shrink)
    train(model, optimizers, batches(5))
    before = latents(pruner, model)["0.weight"]
    with torch.no_grad():
        model[0].weight[:8] = 0.5
    for optimizer in optimizers[::-1]:
        still_step(model, optimizer)
    after = latents(pruner, model)["0.weight"]
    assert (after[:8] == 0.5).all()
    torch.testing.assert_close(after[8:], before[8:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("together", [700, 10**6], ids=["in pieces", "in one"])
def test_large_tensors_are_looked_at_in_pieces(monkeypatch, together):
    """A dozen copies of an embedding might not fit into memory. Tensors are judged as wholes whatever the pieces."""
    monkeypatch.setattr("pareback.pruning.edits._TOGETHER", together)
    model, optimizer, pruner = pruned("power", sparsity=0.5, lr=1e-12)
    train(model, optimizer, batches(5))
    before, other = latents(pruner, model), network(seed=7)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[2].weight.copy_(other[2].weight)
    halved = copied(model)["0.weight"]
    still_step(model, optimizer)
    after, kept = latents(pruner, model), halved != 0
    torch.testing.assert_close(model[0].weight.detach()[kept], halved[kept], rtol=1e-3, atol=1e-6)
    assert torch.equal(after["0.weight"][~kept], before["0.weight"][~kept])
    assert torch.equal(after["2.weight"], other[2].weight)


def test_a_clip_by_hand_leaves_survivors_at_the_bound():
    """As in a Wasserstein GAN: what is clipped stays at the bound, and everything else where it was."""
    model, optimizer, _ = pruned("power", lr=1e-12)
    train(model, optimizer, batches(1))
    weight, before = model[0].weight, copied(model)["0.weight"]
    bound = 0.9 * float(before.abs().max())
    for _ in range(50):
        with torch.no_grad():
            weight.clamp_(-bound, bound)
        still_step(model, optimizer)
    torch.testing.assert_close(weight.detach(), before.clamp(-bound, bound), rtol=1e-3, atol=1e-6)


def test_a_step_there_and_back_again_changes_nothing():
    """As in sharpness-aware training by hand: survivors come back but for rounding, a hundred times over."""
    model, optimizer, _ = pruned("power", lr=1e-12)
    train(model, optimizer, batches(1))
    weight, before = model[0].weight, copied(model)["0.weight"]
    for seed in range(100):
        away = 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.add_(away)
            weight.sub_(away)
        still_step(model, optimizer)
    torch.testing.assert_close(weight.detach(), before, rtol=1e-3, atol=1e-4)


def test_edits_without_a_trace_are_mentioned_once_they_recur():
    """``.data`` changes no version counter. One such edit is adopted; a loop of them is found and named."""
    model, optimizer, _ = pruned("power", lr=1e-12)

    def decayed(steps):
        for _ in range(steps):
            scaled_as_data(model[0].weight)
            still_step(model, optimizer)

    for _ in range(3):
        still_step(model, optimizer)
    decayed(1)
    for _ in range(4):
        still_step(model, optimizer)
    with pytest.warns(UserWarning, match="through .data, which leaves no trace") as told:
        decayed(40)
    assert len(told) == 1


def test_edits_without_a_trace_are_found_beside_those_with_one():
    """An embedding with max_norm is written to in every forward pass: nothing else was looked at."""
    model, optimizer, _ = pruned("power", lr=1e-12)
    train(model, optimizer, batches(1))
    before = copied(model)["0.weight"]

    def both_edited():
        for _ in range(100):
            scaled_as_data(model[0].weight)
            with torch.no_grad():
                model[2].weight.mul_(1.0)
            still_step(model, optimizer)

    with pytest.warns(UserWarning, match="through .data, which leaves no trace"):
        both_edited()
    assert float(model[0].weight.detach().norm() / before.norm()) == pytest.approx(0.99**100, rel=0.02)


def test_a_nan_is_no_edit():
    """It differs from itself: a training that diverged was said to be edited through .data."""
    model, optimizer, _ = pruned("power", lr=1e-12)
    model[0].weight.data[0, 0] = torch.nan
    for _ in range(40):
        still_step(model, optimizer)  # no warning
    assert int(model[0].weight.isnan().sum()) == 1


@pytest.mark.parametrize("sparsity", [0.02, 0.5, 0.95])
def test_dense_weights_are_adopted_at_any_sparsity(sparsity):
    """Other weights, which fill the zeros, become the latent ones bit for bit, however few zeros there are."""
    model, optimizer, pruner = pruned("power", sparsity=sparsity)
    train(model, optimizer, batches(5))
    other = copied(network(seed=7))
    model.load_state_dict(other)
    still_step(model, optimizer)
    assert_same(latents(pruner, model), other)


def test_an_earlier_checkpoint_is_not_shrunk_again():
    """Weights saved a few steps ago, loaded without the pruner's state: the model has them as they were saved."""
    model, optimizer, _ = pruned("power", lr=0.001)
    train(model, optimizer, batches(5))
    saved = copied(model)
    train(model, optimizer, batches(3, seed=2))
    model.load_state_dict(saved)
    still_step(model, optimizer)
    for name in PRUNED:
        kept = saved[name].abs() > 0.3 * saved[name].abs().max()
        torch.testing.assert_close(model.get_parameter(name).detach()[kept], saved[name][kept], rtol=1e-3, atol=0)


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
    """A checkpoint taken between an edit that fills zeros and the next step holds the edit."""
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
