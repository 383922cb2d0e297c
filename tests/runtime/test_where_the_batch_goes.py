"""A batch that becomes an image's height, width or channels: the engine answers as eager does, for every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pareback as pb
from pareback.runtime.native import bindings

pytestmark = [
    pytest.mark.skipif(not bindings.available(), reason="the engine was not built"),
    pytest.mark.usefixtures("one_thread"),
]


class Turned(nn.Module):
    """Two convolutions over what ``turn`` makes of the input."""

    def __init__(self, turn: Callable[[Tensor], Tensor], channels: int, relu: bool = True) -> None:
        super().__init__()
        self.turn = turn
        self.first, self.second = nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.between = nn.ReLU() if relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(self.turn(x))))


TURNS: dict[str, tuple[Callable[[Tensor], Tensor], int, tuple[int, ...]]] = {
    "height": (lambda x: x.permute(1, 0, 2)[None], 4, (4, 9)),
    "height of one channel": (lambda x: x[None, None], 1, (12,)),
    "width": (lambda x: x.permute(1, 2, 0, 3).reshape(1, 3, 12, -1), 3, (3, 12, 5)),
    "width alone": (lambda x: x.permute(1, 2, 0)[None], 4, (4, 9)),
    "several images of one": (lambda x: x.reshape(-1, 3, 6, 5), 3, (6, 6, 5)),
    "as it is": (lambda x: x, 3, (3, 8, 8)),
}


def compiled(name: str, sparsity: float) -> tuple[nn.Module, pb.Engine, tuple[int, ...]]:
    torch.manual_seed(0)
    turn, channels, shape = TURNS[name]
    model = Turned(turn, channels).eval()
    pb.prune_(model, pb.Budget(sparsity=sparsity), include="*.weight")
    return model, pb.compile(model, torch.randn(2, *shape), threads=1), shape


@pytest.mark.parametrize("name", TURNS)
def test_every_batch_is_right(name: str) -> None:
    """It was right for one example and wrong by up to 1e28 for others, where sizes were taken for those of one."""
    model, engine, shape = compiled(name, 0.8)
    for batch in (1, 2, 3, 4, 7, 16, 17, 33):
        engine.prefers_dense[batch] = False  # whichever is faster, the engine's own way is looked at
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.permutations([0, 1, 2, 3]), st.sampled_from([3, 4, 6]), st.lists(st.integers(1, 9), min_size=2, max_size=3))
def test_any_order_of_dimensions(order: list[int], channels: int, batches: list[int]) -> None:
    """Wherever the batch goes among an image's four dimensions, if the model can be exported at all."""
    torch.manual_seed(0)
    sizes = [7, 6, 5]
    place = order.index(0)
    turned = [[None, *sizes][i] for i in order]
    if place == 1:  # the batch cannot be the channels of fixed weights
        return
    model = Turned(lambda x: x.permute(*order), int(turned[1] or 0)).eval()
    example = torch.randn(2, *sizes)
    engine = pb.compile(model, example, threads=1)
    for batch in batches:
        engine.prefers_dense[batch] = False
        x = torch.randn(batch, *sizes)
        with torch.no_grad():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)
