"""Averages of the weights (EMA, SWA) end exactly as sparse as the model they follow."""

import copy

import pytest
import torch
from networks import PRUNED, assert_same, backward, batches, copied, network, nonzeros, train
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import pareback as pb

GOALS = {
    "exact": pb.Budget(sparsity=0.9),
    "squared": pb.Budget(sparsity=0.8, enforce="squared"),
    "search": pb.Fixed(sparsity=0.8),
    "gaussian": pb.Fixed(sparsity=0.8, bound="gaussian"),
    "unconstrained": pb.Unconstrained(weight=5.0),
}
AVERAGES = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "own": {"avg_fn": lambda average, new, count: 0.9 * average + 0.1 * new},
}


def follow(model, optimizer, pruner, ema, data):
    for batch in data:
        train(model, optimizer, [batch])
        with pruner.latents():
            ema.update_parameters(model)


@pytest.mark.parametrize(
    ("goal", "shrink", "average"),
    [
        *((goal, "power", "ema") for goal in GOALS),
        *((goal, "hard", "mean") for goal in GOALS),
        ("exact", "power", "own"),
    ],
)
@pytest.mark.parametrize("when", ["before finish", "after finish"])
def test_the_average_is_as_sparse_as_the_model(when, goal, shrink, average):
    """Averaged under ``latents()`` and cut by ``prune_``, every tensor has the model's non-zeros to the weight."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = pb.Pruner(model, optimizer, GOALS[goal], total_steps=20, shrink=shrink)
    with pruner.latents():
        ema = AveragedModel(model, **AVERAGES[average])
    follow(model, optimizer, pruner, ema, batches(20))
    assert nonzeros(ema.module) == [1280, 2048]
    if when == "after finish":
        pruner.finish()
    assert pruner.prune_(ema.module) is ema.module
    assert nonzeros(ema.module) == nonzeros(model) == pruner.counts()
    assert max(pruner.metrics()["tensor_sparsity"].tolist()) > 0.2


def test_an_average_of_pruned_weights_would_be_denser():
    """Why ``latents()`` is there: masks differ from step to step, and their union is what a plain average keeps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
    ema = AveragedModel(model)
    for batch in batches(20):
        train(model, optimizer, [batch])
        ema.update_parameters(model)
    assert all(average > own for average, own in zip(nonzeros(ema.module), nonzeros(model), strict=True))


def test_pruning_the_average_keeps_its_largest_weights():
    """``prune_`` keeps the average's own largest weights, and touches neither the model nor the tensors left dense."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
    with pruner.latents():
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    follow(model, optimizer, pruner, ema, batches(10))
    before, average = copied(model), copied(ema.module)
    pruner.prune_(ema.module)
    assert_same(copied(model), before)
    for name, value in ema.module.state_dict().items():
        kept = value != 0
        assert torch.equal(value[kept], average[name][kept])
        if name in PRUNED:
            assert average[name][kept].abs().min() >= average[name][~kept].abs().max()
        else:
            assert torch.equal(value, average[name])


def test_latents_are_left_behind_exactly():
    """``with latents()`` is no step: weights, thresholds and what comes after are the same bits with it and without."""

    def run(look):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
        for batch in batches(20):
            train(model, optimizer, [batch])
            if look:
                before = copied(model)
                with pruner.latents():
                    assert nonzeros(model) == [1280, 2048]
                assert_same(copied(model), before)
        pruner.finish()
        return copied(model)

    assert_same(run(True), run(False))


def test_an_error_while_latents_are_out():
    """An exception inside the block still leaves a pruned model."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.8))
    before = copied(model)
    with pytest.raises(KeyError), pruner.latents():
        raise KeyError
    assert_same(copied(model), before)


def test_looking_twice_at_once():
    """A helper that opens ``latents()`` inside another block does not close it for the outer one."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.8))
    with pruner.latents():
        with pruner.latents():
            pass
        assert nonzeros(model) == [1280, 2048]
    assert nonzeros(model) == [256, 409]


def test_edits_made_to_latents_are_kept():
    """What is written while the latents are out is the model's from then on."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Budget(sparsity=0.8), ramp=0)
    with pruner.latents(), torch.no_grad():
        model[0].weight[:5] = 1.0
    with pruner.latents():
        assert (model[0].weight[:5] == 1.0).all()


def test_finished_pruners_have_no_latents():
    """After ``finish()`` the latent weights are gone, and asking for them says so."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.8))
    pruner.finish()
    with pytest.raises(RuntimeError, match="finished"), pruner.latents():
        pass


def test_swa_with_batch_norm():
    """The SWA recipe from the manual, with its schedule and ``update_bn``, on a network with batch norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 32),
        torch.nn.Linear(32, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40)
    swa, schedule = AveragedModel(model, use_buffers=True), SWALR(optimizer, swa_lr=0.05)
    data = batches(40)
    for number, batch in enumerate(data):
        train(model, optimizer, [batch])
        if number >= 20:
            with pruner.latents():
                swa.update_parameters(model)
            schedule.step()
    report = pruner.finish()
    pruner.prune_(swa.module)
    update_bn(data, swa)
    names = pruner.names
    assert nonzeros(swa.module, names) == nonzeros(model, names)
    assert report.pruned_nonzeros == 332
    assert backward(swa, batches(1, seed=5, size=256)[0]).isfinite()


def test_an_average_with_fewer_weights_than_allowed_stays():
    """An average that is sparser already is left as it is: pruning never fills anything in."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.5), shrink="hard")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[10:] = 0.0
    before = copied(other)
    pruner.prune_(other)
    assert torch.equal(other[0].weight, before["0.weight"])


def test_another_model_is_refused():
    """A model without the pruned tensors is refused by name, and so is one whose tensors have other shapes."""
    model = network()
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(sparsity=0.8))
    ema = AveragedModel(model)
    with pytest.raises(ValueError, match=r"'0\.weight', '2\.weight'"):
        pruner.prune_(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="copy of the pruned model"):
        pruner.prune_(ema)  # its names begin with "module.": ema.module is meant
    other = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 40))
    with pytest.raises(ValueError, match=r"2\.weight"):
        pruner.prune_(other)
