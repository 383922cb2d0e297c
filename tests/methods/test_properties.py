"""Each method's defining property, on a training of sixty steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from method_training import STEPS, begun, network, train
from torch import Tensor, nn

import pareback as pb
from pareback.methods import ACDC, GMP, ST3, Feather, OneShot, RigL
from pareback.shrink import shrink


def support(model: nn.Module, pruner: Any) -> Tensor:
    """Which pruned weights are non-zero, of all tensors in one vector."""
    return torch.cat([(model.get_parameter(name) != 0).flatten() for name in pruner.names])


def supports(goal: pb.Goal, steps: int = STEPS) -> list[Tensor]:
    """The non-zeros after every step."""
    model, optimizer, pruner = begun(goal)
    found = [support(model, pruner)]
    for step in range(steps):
        train(model, optimizer, step, step + 1)
        found.append(support(model, pruner))
    return found


# -- GMP -------------------------------------------------------------------------------------------------------------


def test_what_gmp_pruned_never_returns() -> None:
    """Each step's non-zeros are among those of the step before; after three quarters nothing changes any more."""
    found = supports(GMP(sparsity=0.8, every=5))
    assert all(not bool((later & ~earlier).any()) for earlier, later in itertools.pairwise(found))
    assert all(torch.equal(found[46], later) for later in found[46:])


def test_gmp_follows_the_cubic_every_so_many_steps() -> None:
    """3 of 60 steps dense; then 3328·(1 − 0.8·(1 − (1 − u)³)) weights, new ones every fifth step."""
    kept = [int(one.sum()) for one in supports(GMP(sparsity=0.8, every=5))]
    expected = [3328 - 0.8 * 3328 * (1 - (1 - u) ** 3) for u in ((step - 3) / 42 for step in range(3, 45, 5))]
    assert kept[:4] == [3328] * 4
    assert [kept[step + 1] for step in range(3, 45, 5)] == [int(e + 1e-6) for e in expected]
    assert all(kept[step] == kept[step + 1] for step in range(5, 8))


def test_gmp_keeps_the_largest_of_all_tensors_together() -> None:
    """The smallest weight that stays is larger than the largest that goes, whichever tensor they are in."""
    model, optimizer, pruner = begun(GMP(sparsity=0.5, begin=0.1, end=0.1))
    train(model, optimizer, 0, 6)
    before = torch.cat([model.get_parameter(name).detach().flatten().abs() for name in pruner.names])
    train(model, optimizer, 6, 7)
    now = support(model, pruner)
    assert float(before[now].min()) > float(before[~now].max())


# -- RigL ------------------------------------------------------------------------------------------------------------


def test_rigl_keeps_every_tensors_count_from_the_first_forward_pass() -> None:
    """ERK's count in each tensor, before the first step and after every one."""
    goal = RigL(sparsity=0.8, every=5)
    model, optimizer, pruner = begun(goal)
    counts = goal.counts([(64, 20), (32, 64)])
    assert sum(counts) == 665
    for step in range(STEPS):
        assert pruner.counts() == counts
        train(model, optimizer, step, step + 1)


def test_rigl_grows_where_the_dense_gradient_is_largest_and_drops_the_smallest() -> None:
    """As many as the cosine says, each from zero."""
    goal = RigL(sparsity=0.8, every=5)
    model, optimizer, pruner = begun(goal)
    train(model, optimizer, 0, 5)
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(5))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    weights = {name: model.get_parameter(name).detach().clone() for name in pruner.names}
    grads = {name: model.get_parameter(name).grad.abs().clone() for name in pruner.names}
    optimizer.step()
    fraction = 0.15 * (1 + torch.cos(torch.tensor(torch.pi * 5 / 45)))
    for name, weight in weights.items():
        was, now = weight != 0, model.get_parameter(name) != 0
        places = int(fraction * int(was.sum()))
        smallest = torch.where(was, weight.abs(), torch.inf).flatten().topk(places, largest=False).indices
        left = was.flatten().index_fill(0, smallest, False)
        grown = torch.where(left, -1.0, grads[name].flatten()).topk(places).indices
        assert torch.equal(now.flatten(), left.index_fill(0, grown, True))
        fresh = now & ~was
        assert int(fresh.sum()) > 0
        # From zero, one step of SGD with a momentum that was zero, too.
        moved = model.get_parameter(name)[fresh].abs()
        assert torch.allclose(moved, 0.1 * grads[name][fresh], rtol=1e-4)


def test_rigls_masks_rest_after_three_quarters() -> None:
    """The last change is before step 45."""
    found = supports(RigL(sparsity=0.8, every=5))
    changed = [step for step, (a, b) in enumerate(itertools.pairwise(found)) if not torch.equal(a, b)]
    assert changed == list(range(5, 45, 5))


def test_erk_gives_small_tensors_more() -> None:
    """In proportion to the sum of dimensions over their product; the whole is the sparsity's."""
    shapes = [(64, 64, 3, 3), (128, 64, 3, 3), (10, 640)]
    densities = RigL(sparsity=0.9).densities(shapes)
    raw = [(64 + 64 + 6) / (64 * 64 * 9), (128 + 64 + 6) / (128 * 64 * 9), 650 / 6400]
    assert [d / densities[0] for d in densities[:2]] == pytest.approx([r / raw[0] for r in raw[:2]])
    sizes = [36864, 73728, 6400]
    assert sum(d * n for d, n in zip(densities, sizes, strict=True)) == pytest.approx(0.1 * sum(sizes))


# -- AC/DC -----------------------------------------------------------------------------------------------------------


def test_acdcs_dense_phases_reach_every_weight() -> None:
    """Sparse and dense in turn: 80 % zeros in one, none in the next; what was zero moves again."""
    goal = ACDC(sparsity=0.8, phase=0.1)
    kept = [int(one.sum()) for one in supports(goal)][1:]
    assert [step for step, _ in goal.phases(STEPS)] == [0, 6, 14, 22, 29, 37, 45, 51]
    assert [sparse for _, sparse in goal.phases(STEPS)] == [False, True] * 4
    starts = [step for step, _ in goal.phases(STEPS)] + [STEPS]
    for (first, sparse), last in zip(goal.phases(STEPS), starts[1:], strict=True):
        for step in range(first, last):
            assert (kept[step] == 665) if sparse else (kept[step] > 3300)


def test_acdc_ends_as_its_last_phase_began() -> None:
    """From step 51 the same weights stay."""
    found = supports(ACDC(sparsity=0.8))
    assert all(torch.equal(found[52], later) for later in found[52:])


# -- one-shot --------------------------------------------------------------------------------------------------------


def test_one_shot_is_dense_until_it_cuts_once() -> None:
    """The plain training to the bit for half of the steps; then the largest weights of that moment stay."""
    model, optimizer, pruner = begun(OneShot(sparsity=0.8))
    train(model, optimizer, 0, 30)
    plain = network()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 0, 30)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    magnitudes = torch.cat([plain.get_parameter(name).detach().flatten().abs() for name in pruner.names])
    train(model, optimizer, 30, STEPS)
    now = support(model, pruner)
    assert set(magnitudes.topk(665).indices.tolist()) == set(now.nonzero()[:, 0].tolist())


def test_one_shot_cuts_a_trained_model_at_once() -> None:
    """Before the first step."""
    _, _, pruner = begun(OneShot(sparsity=0.8, when=0.0))
    assert sum(pruner.counts()) == 665


# -- one level for all tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ST3, Feather])
def test_one_magnitude_serves_all_tensors_and_the_ramp_is_followed(method: Any) -> None:
    """All thresholds are the same to rounding, and the sparsity is the cubic's to a few weights."""
    model, optimizer, pruner = begun(method(sparsity=0.8))
    for step in range(STEPS):
        train(model, optimizer, step, step + 1)
        thresholds = pruner.thresholds()
        assert float(thresholds.max() - thresholds.min()) <= 1e-5 * float(thresholds.max())
        share = 1 - (1 - min(1.0, (step + 1) / 30)) ** 3
        assert sum(pruner.counts()) == pytest.approx(3328 * (1 - 0.8 * share), abs=30)


@pytest.mark.parametrize(("method", "exponent"), [(ST3, 1.0), (Feather, 3.0)])
def test_survivors_are_shrunk_and_the_pruned_go_on_learning(method: Any, exponent: float) -> None:
    """|w| − t, and the cube root of |w|³ − t³; latents of pruned weights move with the gradient and may return."""
    model, optimizer, pruner = begun(method(sparsity=0.8))
    train(model, optimizer, 0, 40)
    latents = {name: value.clone() for name, value in pruner.latent_tensors().items()}
    for name, threshold in zip(pruner.names, pruner.thresholds(), strict=True):
        assert torch.equal(model.get_parameter(name), shrink(latents[name], threshold, exponent))
    gone = ~support(model, pruner)
    train(model, optimizer, 40, STEPS)
    later = torch.cat([value.flatten() for value in pruner.latent_tensors().values()])
    before = torch.cat([value.flatten() for value in latents.values()])
    assert float((later != before)[gone].float().mean()) > 0.9
    assert bool((support(model, pruner) & gone).any())


def test_feather_halves_the_gradient_of_pruned_weights_above_95_percent() -> None:
    """And only there; who asks for another share gets it."""
    shares = [begun(Feather(sparsity=s))[2]._straight_through for s in (0.9, 0.95, 0.98)]
    assert shares == [1.0, 1.0, 0.5]
    assert begun(Feather(sparsity=0.98), straight_through=True)[2]._straight_through == 1.0
