"""Batch norms that are estimated anew: what they become, what stays, and what is refused."""

from __future__ import annotations

import copy
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

import pareback as pb


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4)]
    return nn.Sequential(*layers)


def test_statistics_become_the_averages_over_the_batches() -> None:
    """Calculated by hand in float64: the mean of the batches' means, and of their unbiased variances."""
    model = network()
    batches = [torch.randn(16, 3, 8, 8) * (2 + i) + i for i in range(3)]
    assert pb.recalibrate(model, batches) == 1
    with torch.no_grad():
        seen = [model[0](x).double().transpose(0, 1).flatten(1) for x in batches]
    mean = torch.stack([x.mean(1) for x in seen]).mean(0)
    var = torch.stack([x.var(1) for x in seen]).mean(0)
    torch.testing.assert_close(model[1].running_mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[1].running_var.double(), var, rtol=1e-5, atol=1e-5)


def test_norms_that_lag_behind_their_weights_catch_up() -> None:
    """Weights four times as large and shifted give the same answers once the norms know of it, and others before."""
    torch.manual_seed(0)
    x = torch.randn(512, 1, 6, 6)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    with torch.no_grad():
        wanted = model(x)  # by the statistics of the batch itself
        model[0].weight.mul_(4.0)
        model[0].bias.add_(5.0)
        model.eval()
        assert (model(x) - wanted).abs().max() > 1.0
        pb.recalibrate(model, [(x, torch.zeros(512))])
        torch.testing.assert_close(model(x), wanted, rtol=1e-3, atol=1e-3)


def test_nothing_else_changes() -> None:
    """Weights, modes, momenta and gradients are as before; a norm without statistics is left alone."""
    model = network()
    model.insert(2, nn.BatchNorm2d(8, track_running_stats=False))
    model[3].eval()
    before = copy.deepcopy(model)
    assert pb.recalibrate(model, [torch.randn(4, 3, 8, 8)]) == 1
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model[1].momentum == before[1].momentum
    assert all(p.grad is None for p in model.parameters())
    for own, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(own, other)


def test_any_form_of_batch() -> None:
    """Inputs, pairs with targets, and mappings of keyword arguments."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.norm(image)

    x = torch.randn(32, 3) + 7.0
    models = [Named() for _ in range(4)]
    for model, batch in zip(models, [x, (x, torch.zeros(32)), [x], {"image": x}], strict=True):
        assert pb.recalibrate(model, [batch]) == 1
        torch.testing.assert_close(model.norm.running_mean, x.mean(0))
    assert pb.recalibrate(nn.Linear(2, 2), iter([])) == 0


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ([], ValueError, "There are no batches"),
        (torch.randn(4, 3, 8, 8), TypeError, "Write [x] for a single one"),
        (3, TypeError, "such as a data loader"),
        (["x"], TypeError, "A batch must be a tensor"),
        ([()], TypeError, "not an empty tuple"),
        ([torch.randn(1, 3, 3, 3)], ValueError, "leaves a short last one out with drop_last=True"),
        ([torch.full((4, 3, 8, 8), torch.nan)], ValueError, "1 of 1 batch norms would have statistics that are not"),
    ],
)
def test_what_cannot_be_used_changes_nothing(batches: object, error: type[Exception], words: str) -> None:
    model = network()
    model(torch.randn(4, 3, 8, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error) as caught:
        pb.recalibrate(model, batches)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model[1].momentum == 0.1


class Auxiliary(nn.Module):
    """A network with a second head, which runs while it trains alone, as Inception's does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.second = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        answer: Tensor = self.head(pixel_values)
        return answer + self.second(pixel_values) if self.training else answer


def test_norms_that_no_batch_reaches_keep_their_statistics() -> None:
    model = Auxiliary()
    model.second[1].running_mean.fill_(7.0)
    model.second[1].num_batches_tracked.fill_(5)
    assert pb.recalibrate(model, [torch.randn(8, 4)] * 2) == 1
    assert model.second[1].running_mean.tolist() == [7.0] * 3
    assert (int(model.second[1].num_batches_tracked), int(model.head[1].num_batches_tracked)) == (5, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hundreds_of_batches_count_alike_in_half_precision(dtype: torch.dtype) -> None:
    """Averaged in bfloat16 itself, later batches would move nothing any more."""
    model = nn.Sequential(nn.BatchNorm1d(2)).to(dtype)
    torch.manual_seed(0)
    batches = [torch.randn(32, 2) + number / 100 for number in range(400)]
    pb.recalibrate(model, [batch.to(dtype) for batch in batches])
    assert model[0].running_mean.dtype == dtype
    torch.testing.assert_close(model[0].running_mean.float(), torch.cat(batches).mean(0), rtol=0.01, atol=0.01)


def test_a_norm_that_is_called_twice_counts_both_times() -> None:
    norm = nn.BatchNorm1d(2)
    x = torch.randn(16, 2)
    assert pb.recalibrate(nn.Sequential(norm, nn.Linear(2, 2), norm), [x, x + 6.0]) == 1
    assert int(norm.num_batches_tracked) == 4


@pytest.mark.parametrize("batch", [({"pixel_values": torch.ones(4, 4)}, 1), UserDict(pixel_values=torch.ones(4, 4))])
def test_mappings_stand_alone_or_before_targets(batch: object) -> None:
    assert pb.recalibrate(Auxiliary(), [batch]) == 1


def test_tensors_of_mappings_are_moved_to_the_model() -> None:
    model = Auxiliary().to("meta")
    seen: list[str] = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].device.type))
    with pytest.raises(Exception):  # noqa: B017, PT011 (statistics without numbers cannot be looked at)
        pb.recalibrate(model, [{"pixel_values": torch.ones(4, 4)}])
    assert seen == ["meta"]


def test_a_batch_without_inputs_does_not_count() -> None:
    """A filter may have emptied it. It would stand for a mean of 0 and a variance of 1, which nobody has measured."""
    model, x = nn.Sequential(nn.BatchNorm1d(2)), torch.randn(16, 2) * 5 + 3
    assert pb.recalibrate(model, [x[:0], x, x[:0]]) == 1
    torch.testing.assert_close(model[0].running_mean, x.mean(0))
    torch.testing.assert_close(model[0].running_var, x.var(0))
    assert int(model[0].num_batches_tracked) == 1
    assert pb.recalibrate(model, [x[:0]]) == 0
    torch.testing.assert_close(model[0].running_mean, x.mean(0))
    assert not model[0]._forward_hooks
