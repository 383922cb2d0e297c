"""Group and instance norms in lanes: against float64 wherever lanes end, far from zero, on threads, and from a file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_toys import distance, error, errors, kinds, pruned
from forgery import sealed, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pareback as pb
from pareback.artifact.contents import ENGINE
from pareback.runtime import Engine
from pareback.runtime import compile as compiled
from pareback.runtime.graph.fuse import fused
from pareback.runtime.graph.ops import Activation, Add, GroupNorm
from pareback.runtime.native.bindings import NativeGroupNorm
from pareback.runtime.stages.images import FROM_THE_START, ImageStage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]

BATCHES = (1, 2, 3, 7, 16, 33)
SIZES = [(13, 7), (33, 70), (16, 16), (1, 2)]


def lively(model: nn.Module) -> nn.Module:
    """Give group norms something to do."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.InstanceNorm2d) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.5)
    return model.eval()


def passed_on(channels: int, *norm: nn.Module) -> nn.Sequential:
    """A convolution that changes nothing, so that all that is lost is lost by what follows."""
    layer = nn.Conv2d(channels, channels, 1, bias=False)
    layer.weight.copy_(torch.eye(channels)[:, :, None, None])
    return nn.Sequential(layer, *norm)


def image_stage(engine: Engine) -> ImageStage:
    (stage,) = (one for one in engine.stages if isinstance(one, ImageStage))
    return stage


def norms_of(engine: Engine) -> list[GroupNorm]:
    return [one for one in image_stage(engine).chain.operations if isinstance(one, GroupNorm)]


def in_every_way(engine: Engine, x: Tensor) -> list[Tensor]:
    """One by one, and all together from the start: several images in the lanes."""
    found = []
    for way in (None, FROM_THE_START):
        image_stage(engine).together_after[len(x)] = way
        found.append(engine.run_sparse(x))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_between_convolutions_that_look_beyond_tiles(groups: int, size: tuple[int, int]) -> None:
    """What lies outside images neither counts nor is anything but zero afterwards: the next layer reads it."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(groups, 8), nn.SiLU(), nn.Conv2d(8, 5, 3, padding=1)
    )
    model = lively(pruned(model, 0.5))
    engine = compiled(model, torch.randn(2, 3, *size), threads=1)
    assert kinds(engine) == ["images"], engine.report()
    for batch in BATCHES:
        x = torch.randn(batch, 3, *size)
        for found in in_every_way(engine, x):
            assert error(found, model, x) < 1e-6


@pytest.mark.parametrize("away", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("groups", [1, 32, 64])
def test_as_exact_as_pytorch_far_from_zero(groups: int, away: float) -> None:
    """At most twice its error, in images that fill no lanes evenly."""
    model = lively(passed_on(64, nn.GroupNorm(groups, 64)))
    for size in ((13, 7), (33, 70)):
        engine = compiled(model, torch.randn(2, 64, *size), threads=1)
        for batch in (1, 3, 17):
            x = torch.randn(batch, 64, *size) + away
            for found in in_every_way(engine, x):
                own, pytorchs = errors(found, model, x)
                assert own <= 2 * pytorchs
                assert own < 2e-7


def test_channels_of_a_group_that_lie_far_apart() -> None:
    """The distance between them is part of the deviation, and a flat channel has none of its own."""
    model = passed_on(8, nn.GroupNorm(2, 8)).eval()
    apart = torch.tensor([0.0, 50.0, -300.0, 7.0, 1000.0, 1000.0, 1000.0, 1000.0]).view(1, 8, 1, 1)
    x = torch.randn(3, 8, 19, 11) * torch.tensor([1.0, 0, 2, 1, 0.01, 0.02, 0, 0.01]).view(1, 8, 1, 1) + apart
    engine = compiled(model, x, threads=1)
    for found in in_every_way(engine, x):
        own, pytorchs = errors(found, model, x)
        assert own <= 2 * pytorchs


def test_flat_images() -> None:
    """Without any deviation eps alone divides: nothing but the shift is left."""
    model = lively(passed_on(4, nn.GroupNorm(2, 4)))
    x = torch.full((2, 4, 9, 9), 1000.1)
    engine = compiled(model, x, threads=1)
    shift = model[1].bias.view(1, 4, 1, 1)  # type: ignore[index, union-attr, operator]
    for found in in_every_way(engine, x):
        assert torch.equal(found, shift.expand_as(x))


def test_long_rows() -> None:
    """A hundred thousand numbers in a lane: sums in float32 alone would show."""
    model = lively(passed_on(2, nn.GroupNorm(1, 2)))
    x = torch.randn(16, 2, 64, 1500) * 3 + 20
    engine = compiled(model, x, threads=1)
    for found in in_every_way(engine, x):
        own, pytorchs = errors(found, model, x)
        assert own <= 2 * pytorchs


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 20), st.integers(2, 20)),
    st.sampled_from([(1, 6), (2, 6), (3, 6), (6, 6), (5, 5), (32, 64)]),
    st.sampled_from([1, 2, 3, 5, 8, 16, 33]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "relu", "gelu", "leaky_relu"]),
    st.sampled_from([0, 1, 2]),
)
def test_any_norm(
    size: tuple[int, int],
    grouped: tuple[int, int],
    batch: int,
    affine: bool,
    added: bool,
    activation: str | None,
    padding: int,
) -> None:
    """With a sum and an activation after it or without."""
    groups, channels = grouped
    torch.manual_seed(0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, channels, 1)
            self.norm = nn.GroupNorm(groups, channels, affine=affine, eps=1e-3)
            self.last = nn.Conv2d(channels, 4, 1 + 2 * padding, padding=padding)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.norm(x) + x if added else self.norm(x)
            return self.last(getattr(F, activation)(y) if activation else y)  # type: ignore[no-any-return]

    model = lively(pruned(Normed(), 0.8))
    x = torch.randn(batch, 3, *size)
    engine = compiled(model, x, threads=1)
    assert kinds(engine) == ["images"]
    for found in in_every_way(engine, x):
        assert error(found, model, x) < 1e-6


def test_an_image_that_overflows_leaves_others_alone() -> None:
    """Its own groups become NaN, as in eager; those of images in the lanes beside it do not."""
    model = passed_on(4, nn.GroupNorm(2, 4)).eval()
    layer = nn.Conv2d(4, 4, 1, bias=False)
    layer.weight.copy_(torch.eye(4)[:, :, None, None] * 1e38)
    model = nn.Sequential(layer, model[1])
    x = torch.randn(4, 4, 6, 5) * 1e-30
    x[2, 1, 3, 3] = 1e10  # infinity behind the convolution
    engine = compiled(model, x[:2], threads=1)
    wanted = copy.deepcopy(model).double()(x.double())
    for found in in_every_way(engine, x):
        assert torch.equal(found.isnan(), model(x).isnan())
        assert bool(found[2, :2].isnan().all())
        assert distance(found[[0, 1, 3]], wanted[[0, 1, 3]]) < 1e-6


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_instance_norms(tracks: bool, affine: bool) -> None:
    """A group for every channel; with running statistics, a scale and a shift that the convolution takes in."""
    norm = nn.InstanceNorm2d(8, affine=affine, track_running_stats=tracks)
    if tracks:
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    model = lively(pruned(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3)), 0.5))
    engine = compiled(model, torch.randn(2, 3, 13, 9), threads=1)
    assert kinds(engine) == ["images"]
    assert len(norms_of(engine)) == (0 if tracks else 1)
    for batch in (1, 3, 16):
        x = torch.randn(batch, 3, 13, 9)
        for found in in_every_way(engine, x):
            assert error(found, model, x) < 1e-6


class Block(nn.Module):
    """A bottleneck, normed by groups."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, inner, 1, bias=False),
                nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
                nn.Conv2d(inner, outputs, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.GroupNorm(4, inner), nn.GroupNorm(4, inner), nn.GroupNorm(4, outputs)])
        same = inputs == outputs and stride == 1
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(4, outputs))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if number < 2 else y
        return F.relu(y + self.shortcut(x))


class Means(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def network() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    body = [Block(16, 8, 32, 1), Block(32, 8, 32, 1), Block(32, 16, 64, 2), Block(64, 16, 64, 1)]
    return lively(pruned(nn.Sequential(*stem, *body, Means(), nn.Linear(64, 5)), 0.3, gain=2.0))


def test_nothing_of_a_residual_network_is_left_to_pytorch() -> None:
    """One stage; sums and ReLUs are done by the norms before them, and the report counts those."""
    torch.manual_seed(0)
    model = network()
    one = compiled(model, torch.randn(1, 3, 70, 33), threads=1)
    report = one.report()
    assert kinds(one) == ["images"]
    assert (report.left, report.group_norms, report.norms) == ((), 15, 0)
    assert str(report).startswith("16 layers, 15 group norms in the engine, ")
    assert not any(isinstance(step, Add | Activation) for step in image_stage(one).chain.operations)
    for engine in (one, one.with_threads(2)):
        for batch in BATCHES:
            x = torch.randn(batch, 3, 70, 33)
            own, pytorchs = errors(engine.run_sparse(x), model, x)
            assert own <= 2 * pytorchs + 1e-7


@pytest.mark.parametrize("groups", [1, 2, 16, 64])
def test_threads_change_no_bit(groups: int) -> None:
    """Few groups are shared out by channels and many by groups, with the same sums."""
    model = lively(passed_on(64, nn.GroupNorm(groups, 64), nn.ReLU()))
    x = torch.randn(1, 64, 120, 130)  # large enough to be worth several threads
    one = compiled(model, x, threads=1)
    wanted = one.run_sparse(x)
    assert error(wanted, model, x) < 2e-7
    for threads in (2, 3):
        engine = one.with_threads(threads)
        for _ in range(5):
            assert torch.equal(engine.run_sparse(x), wanted)


def _twice(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    return m.last(m.norm(x) * 1 + F.silu(m.norm(x)) + x)  # type: ignore[no-any-return]


def _returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    x = m.first(x)
    y = m.norm(x)
    return x, y, m.last(F.relu(y))


def _doubled(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.first(x))
    return m.last(y + y)  # type: ignore[no-any-return]


def _changed(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    y = m.norm(x)
    x.clamp_(min=0.1)
    return m.last(F.relu(y) + x)  # type: ignore[no-any-return]


def _by_itself(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.norm(m.first(x)))


@pytest.mark.parametrize("compute", [_twice, _returned, _doubled, _changed, _by_itself])
def test_what_others_read_is_not_written_over(compute: Callable[..., Any]) -> None:
    """Norms write where they read, unless somebody else needs that."""

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Any:
            return compute(self, x)

    model = lively(pruned(Of(), 0.7))
    engine = compiled(model, torch.randn(2, 3, 11, 9), threads=1)
    for batch in (1, 3, 16):
        x = torch.randn(batch, 3, 11, 9)
        found, wanted = engine.run_sparse(x), copy.deepcopy(model).double()(x.double())
        many = isinstance(found, tuple)
        for one, other in zip(found if many else [found], wanted if many else [wanted], strict=True):
            assert distance(one, other) < 1e-6


def test_where_it_writes() -> None:
    """Over what it reads if nobody else does, and tiles have the same halo."""
    alone = lively(passed_on(8, nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)))
    beyond = lively(passed_on(8, nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)))
    for model, over in ((alone, True), (beyond, False)):
        engine = compiled(model, torch.randn(1, 8, 12, 12), threads=1)
        parts = image_stage(engine).whole.program(1, 1).native.parts
        (step,) = (part.operation for part in parts if isinstance(part.operation, NativeGroupNorm))
        assert (step.in_ == step.out) == over


def test_fused() -> None:
    """A sum and then an activation; of two norms the later one adds the other."""
    ones, zeros = torch.ones(4), torch.zeros(4)
    norms = [GroupNorm(f"n{i}", f"x{i}", 2, ones, zeros, 1e-5) for i in (1, 2)]
    found = fused([*norms, Add("sum", "n1", "n2"), Activation("y", "sum", "relu")], ["y"])
    assert [(one.out, one.reads) for one in found] == [("n1", ["x1"]), ("y", ["x2", "n1"])]
    assert isinstance(found[1], GroupNorm)
    assert found[1].activation == "relu"
    values = {"x1": torch.randn(2, 4, 3, 3), "x2": torch.randn(2, 4, 3, 3)}
    wanted = F.relu(F.group_norm(values["x1"], 2) + F.group_norm(values["x2"], 2))
    values["n1"] = found[0].in_torch()(values)
    torch.testing.assert_close(found[1].in_torch()(values), wanted)


@pytest.mark.parametrize(
    ("model", "shape", "why"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8)), (6,), "it is not over images"),
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8)), (3, 9), "it is not over images"),
    ],
)
def test_norms_over_other_shapes_are_pytorchs(model: nn.Module, shape: tuple[int, ...], why: str) -> None:
    model = lively(model)
    x = torch.randn(3, *shape)
    engine = compiled(model, x, threads=1)
    assert ("aten.group_norm.default", why) in engine.report().left
    assert error(engine.run_sparse(x), model, x) < 1e-6


# -- files -----------------------------------------------------------------------------------------------------------


def forged(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a file says of the group norms of its stages, and make the checksums right."""
    header, data = split(path.read_bytes())
    said = json.loads(header["__metadata__"][ENGINE])
    for operation in (one for stage in said["stages"] for one in stage["operations"] if one.get("op") == "GroupNorm"):
        change(operation)
    header["__metadata__"][ENGINE] = json.dumps(said)
    path.write_bytes(sealed(header, data, path))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loaded_engine_has_the_same_bits(threads: int, tmp_path: Path) -> None:
    """By its stages and by PyTorch."""
    engine = compiled(network(), torch.randn(2, 3, 33, 30), threads=threads)
    inputs = [torch.randn(batch, 3, 33, 30) for batch in (1, 2, 5)]
    wanted = [(engine(x), engine.run_sparse(x)) for x in inputs]
    engine.save(tmp_path / "model.pbe")
    loaded = pb.load_engine(tmp_path / "model.pbe", threads=threads)
    assert loaded.report().group_norms == 15
    for x, (either, sparse) in zip(inputs, wanted, strict=True):
        assert torch.equal(loaded(x), either)
        assert torch.equal(loaded.run_sparse(x), sparse)


FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "groups": (lambda norm: norm.update(groups=3), "cannot be divided into its groups"),
    "more groups than channels": (lambda norm: norm.update(groups=16), "cannot be divided into its groups"),
    "no groups": (lambda norm: norm.update(groups=0), "a number is not one that can be there"),
    "half a group": (lambda norm: norm.update(groups=2.0), "a number is not one that can be there"),
    "scale": (lambda norm: norm["scale"].update(shape=[4, 2]), "not a number for each channel"),
    "another's scale": (lambda norm: norm.update(scale=norm["shift"] | {"shape": [1]}), "each channel|does not"),
    "residual": (lambda norm: norm.update(residual="x"), "a residual has another size|reads what"),
    "eps": (lambda norm: norm.update(eps=float("inf")), "a number is none"),
    "activation": (lambda norm: norm.update(activation="softmax"), "an activation is of no known kind"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    """With right checksums: the kernel would read or write beyond its memory."""
    change, says = FORGERIES[name]
    model = lively(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    path = tmp_path / "model.pbe"
    compiled(model, torch.randn(1, 3, 9, 9), threads=1).save(path)
    pb.load_engine(path)
    forged(path, change)
    with pytest.raises(pb.BadFile, match=f"cannot be read: .*({says})"):
        pb.load_engine(path)
