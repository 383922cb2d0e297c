"""Layers computed a strip of rows at a time, on changing grids and onto their residuals, give the model's results."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from engine_toys import engines, errors, pruned
from torch import Tensor, nn

from pareback.runtime import Engine
from pareback.runtime import compile as compiled
from pareback.runtime.graph.operation import Operation
from pareback.runtime.graph.ops import Add, Affine, Convolution, Regrid, Taps
from pareback.runtime.lower.layout import LaneGrid, Layout
from pareback.runtime.lower.strips import runs, strips
from pareback.runtime.lower.tiling import tiled
from pareback.runtime.native.bindings import NativeConv, NativePart
from pareback.runtime.stages.images import ImageStage

pytestmark = pytest.mark.slow


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 beside a shortcut, as residual networks for large images have it."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Conv2d(inputs, inner, 1)
        self.middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1)
        self.after = nn.Conv2d(inner, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(F.relu(self.middle(F.relu(self.before(x)))))
        return F.relu(y + self.shortcut(x))


def _network(blocks: int = 1) -> nn.Module:
    stem = [nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    body = [Bottleneck(16, 8, 40, 1), *(Bottleneck(40, 8, 40, 1) for _ in range(blocks)), Bottleneck(40, 16, 48, 2)]
    more = [Bottleneck(48, 16, 48, 1), Bottleneck(48, 24, 64, 2), Bottleneck(64, 24, 64, 1)]
    return pruned(nn.Sequential(*stem, *body, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)), 0.3)


def _image_stage(engine: Engine) -> ImageStage:
    return next(stage for stage in engine.stages if isinstance(stage, ImageStage))


def _parts(engine: Engine) -> list[NativePart]:
    return _image_stage(engine).whole.program(1, 1).native.parts


@pytest.mark.parametrize("size", [(56, 56), (33, 70)])
def test_bottlenecks(size: tuple[int, int]) -> None:
    model = _network()
    for engine in engines(model, torch.randn(1, 3, *size)):
        for batch in (1, 2, 3, 17):
            x = torch.randn(batch, 3, *size)
            for _ in range(2):  # what an arena held before must not matter
                error, own = errors(engine.run_sparse(x), model, x)
                assert error < max(2 * own, 1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_by_one_together_or_together_from_somewhere_on(threads: int) -> None:
    """Sixteen images in lanes, then the rest: from the start, after each place where that may begin, or never."""
    model = _network()
    engine = compiled(model, torch.randn(1, 3, 56, 56), threads=threads)
    stage = _image_stage(engine)
    places = stage.places()
    assert len(places) > 2
    for batch, ways in ((33, [None, "", *places]), (2, [None, "", places[-1]])):
        x = torch.randn(batch, 3, 56, 56)
        for way in ways:
            stage.together_after[batch] = way
            for _ in range(2):  # what an arena held before must not matter
                error, own = errors(engine.run_sparse(x), model, x)
                assert error < max(2 * own, 1e-6)
            assert stage.together_after[batch] == way
            by_value = stage.seconds_by_value({stage.chain.inputs[0]: x}, batch, threads)
            assert {o.out for o in stage.chain.operations if isinstance(o, Convolution)} <= by_value.keys()


def test_a_value_that_is_also_a_result_may_be_where_images_begin_to_go_together() -> None:
    """And a second input may be read before, after or on both sides of it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
            self.third = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            seen = F.relu(self.first(x))
            small = F.relu(self.second(seen))
            return seen, F.relu(self.third(small) + y)

    model = pruned(Model(), 0.3)
    inputs = torch.randn(5, 3, 14, 14), torch.randn(5, 8, 7, 7)
    engine = compiled(model, inputs, threads=1)
    stage = _image_stage(engine)
    assert stage.places()
    for place in stage.places():
        stage.together_after[5] = place
        for found, wanted in zip(engine.run_sparse(*inputs), model(*inputs), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)


def test_a_place_where_images_cannot_begin_to_go_together_is_not_believed() -> None:
    """A file may say so: inside a residual block, or a name that nothing has."""
    model, x = _network(), torch.randn(3, 3, 28, 28)
    engine = compiled(model, x, threads=1)
    stage = _image_stage(engine)
    inside = next(o.out for o in stage.chain.operations if isinstance(o, Convolution) and o.out not in stage.places())
    for wrong in (inside, "nothing"):
        stage.together_after[3] = wrong
        error, own = errors(engine.run_sparse(x), model, x)
        assert error < max(2 * own, 1e-6)
        assert stage.together_after[3] != wrong


def test_large_images_are_computed_in_strips_and_their_residuals_overwritten() -> None:
    parts = _parts(compiled(_network(), torch.randn(1, 3, 224, 224), threads=1))
    assert any(part.strips > 1 for part in parts)
    convolutions = [p.operation for p in parts if isinstance(p.operation, NativeConv) and p.operation.residual >= 0]
    assert any(conv.residual == conv.out for conv in convolutions)


def test_an_image_that_fits_badly_later_is_moved_to_another_grid() -> None:
    # 56 = 4 × 14 and 28 = 4 × 7, while 14 and 7 do not divide by 4.
    weight = torch.ones(64, 64, 3, 3)
    shapes = {"x": (64, 56, 56), "a": (64, 56, 56), "b": (64, 28, 28), "c": (64, 14, 14), "d": (64, 7, 7)}
    names = list(shapes)
    operations: list[Operation] = [
        Convolution(after, before, Taps(weight, stride=1 if after == "a" else 2, padding=1), torch.zeros(64))
        for before, after in itertools.pairwise(names)
    ]
    tiling = tiled(operations, shapes, 1)
    assert any(isinstance(o, Regrid) for o in tiling.operations)
    layout = tiling.layouts["a"]
    assert layout.tile_height * layout.grid.down == 56
    assert layout.tile_width * layout.grid.across == 56


@pytest.mark.parametrize("halo", [0, 1])
def test_a_layout_finds_its_pixels_in_another(halo: int) -> None:
    one = Layout(2, 14, 11, LaneGrid(1, 4, 4), 4, 3, 1)
    other = Layout(2, 14, 11, LaneGrid(1, 8, 2), 2, 6, halo)
    image = torch.arange(14 * 11, dtype=torch.float32)
    plane = torch.zeros(one.rows * one.row_step * 16)
    plane[one.places()[0].long()] = image
    index = other.places_in(one).long()
    moved = torch.where(index < 0, 0.0, plane[index.clamp(min=0)])
    direct = other.pixels(14 * 11, 11).long()
    assert torch.equal(moved, torch.where(direct < 0, 0.0, image[direct.clamp(min=0)]))


def test_runs_end_where_neighbouring_rows_are_read() -> None:
    one, three = Taps(torch.ones(4, 4, 1, 1)), Taps(torch.ones(4, 4, 3, 3), padding=1)
    zero = torch.zeros(4)
    operations: list[Operation] = [
        Convolution("a", "x", three, zero),
        Convolution("b", "a", one, zero, residual="x"),
        Affine("c", "b", zero, zero),
        Convolution("d", "c", three, zero),
        Add("e", "d", "a"),
    ]
    layouts = {name: Layout(4, 8, 8, LaneGrid(1, 4, 4), 2, 2, 1) for name in "xabcde"}
    assert [[o.out for o in run] for run in runs(operations, layouts)] == [["a", "b", "c"], ["d", "e"]]


def test_a_convolution_that_makes_the_image_smaller_begins_a_run() -> None:
    zero = torch.zeros(4)
    operations: list[Operation] = [
        Convolution("a", "x", Taps(torch.ones(4, 4, 1, 1)), zero),
        Convolution("b", "a", Taps(torch.ones(4, 4, 1, 1), stride=2), zero),
    ]
    layouts = {name: Layout(4, 8, 8, LaneGrid(1, 4, 4), 2, 2, 0) for name in "xa"}
    layouts["b"] = Layout(4, 4, 4, LaneGrid(1, 4, 4), 1, 1, 0)
    assert [len(run) for run in runs(operations, layouts)] == [1, 1]


@pytest.mark.parametrize("rows", range(1, 30))
@pytest.mark.parametrize("heights", [[1], [2], [1, 2, 4], [7, 1], [3, 2], []])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_strips_cover_all_rows_and_have_room_for_their_tiles(rows: int, heights: list[int], threads: int) -> None:
    heights = [height for height in heights if height <= rows]
    for row_bytes in (1, 2**14, 2**17, 2**20):
        cut = strips(rows, heights, row_bytes, threads)
        assert [first for first, _ in cut] == [0, *(last for _, last in cut[:-1])]
        assert cut[-1][1] == rows
        assert all(last - first >= max(heights, default=1) for first, last in cut)
        assert all(first % height == 0 for first, _ in cut for height in heights)


def test_memory_is_not_used_again_within_a_run() -> None:
    """What one operation of a run reads must stay until its last strip is done."""
    model = pruned(nn.Sequential(*(nn.Conv2d(32, 32, 1) for _ in range(4))), 0.3)
    x = torch.randn(1, 32, 96, 96)
    engine = compiled(model, x, threads=1)
    parts = _parts(engine)
    assert max(part.strips for part in parts) > 1
    error, own = errors(engine.run_sparse(x), model, x)
    assert error < max(2 * own, 1e-6)
