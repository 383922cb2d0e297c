"""Engines as files: the same bits after a load, another machine, forged descriptions, and what cannot be saved."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import sealed, split
from torch import Tensor, nn

import pareback as pb
from pareback.artifact.contents import ENGINE
from pareback.cli import main
from pareback.runtime.native import bindings
from pareback.runtime.saved import operators, reading, writing
from pareback.runtime.saved.describe import describe_engine
from pareback.runtime.stages.images import ImageStage

pytestmark = pytest.mark.skipif(not bindings.available(), reason="the engine was not built")


def thinned(model: nn.Module, share: float = 0.3) -> nn.Module:
    """The model with so many of its weights left."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= torch.rand_like(parameter) < share
    return model.eval()


class Residual(nn.Module):
    """Every kind of operation over images: norms, pools, gates, channels, upsampling, a head, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.groups, self.norm = nn.GroupNorm(2, 8), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 5, 3, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        y = torch.relu(x + self.two(self.one(x)))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = nn.functional.max_pool2d(torch.relu(self.groups(y * gate) + x), 2)
        y = nn.functional.interpolate(nn.functional.avg_pool2d(y, 2), scale_factor=2.0, mode="bilinear")
        y = self.last(torch.relu(self.norm(torch.cat([y, torch.relu(y)], 1))))
        return {"image": y, "classes": self.head(y.mean((2, 3)))}


class Sequences(nn.Module):
    """An embedding, an LSTM and a linear layer: most of it PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        found = self.lstm(self.embedding(tokens))[0]
        return self.out(found), found.float().softmax(-1).amax(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "images": (Residual, lambda batch: torch.randn(batch, 3, 12, 12)),
    "rows": (
        lambda: nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 30), nn.ELU(), nn.Linear(30, 7)),
        lambda batch: torch.randn(batch, 40),
    ),
    "tokens": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        ),
        lambda batch: torch.randn(batch, 20, 32),
    ),
    "sequences": (Sequences, lambda batch: torch.randint(20, (batch, 5))),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one engine finds is not on the machine for the next."""
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pbe"


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same structure and the same bits."""
    (a, how), (b, also) = (torch.utils._pytree.tree_flatten(result) for result in (one, other))
    return how == also and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_loaded_engine_is_the_saved_one_to_the_bit(kind: str, threads: int, path: Path) -> None:
    """For every batch tuned, by the stages and by PyTorch; and nothing is measured again."""
    torch.manual_seed(0)
    build, batch = MODELS[kind]
    engine = pb.compile(thinned(build()), batch(2), threads=threads)
    inputs = [batch(size) for size in (1, 2, 5)]
    saved = [(engine(x), engine.run_sparse(x)) for x in inputs]
    engine.save(path)
    loaded = pb.load_engine(path, threads=threads)
    assert loaded.prefers_dense == engine.prefers_dense
    assert [stage.decisions().keys() for stage in loaded.stages] == [
        stage.decisions().keys() for stage in engine.stages
    ]
    loaded.is_faster_dense = lambda inputs: pytest.fail("measured again")  # type: ignore[method-assign]
    for x, (result, sparse) in zip(inputs, saved, strict=True):
        assert same(loaded(x), result)
        assert same(loaded.run_sparse(x), sparse)
    assert loaded._plan.tuner.used.items() <= engine._plan.tuner.used.items()


def test_where_images_begin_to_go_together_is_remembered(path: Path) -> None:
    """One by one, all together, or from a value on: the same bits after a load."""
    torch.manual_seed(0)
    engine, x = pb.compile(thinned(Residual()), torch.randn(1, 3, 12, 12), threads=1), torch.randn(5, 3, 12, 12)
    stage = next(one for one in engine.stages if isinstance(one, ImageStage))
    for way in (None, "", *stage.places()):
        stage.together_after[5] = way
        wanted = engine.run_sparse(x)
        engine.save(path)
        loaded = pb.load_engine(path, threads=1)
        found = next(one for one in loaded.stages if isinstance(one, ImageStage))
        assert found.together_after[5] == way
        assert same(loaded.run_sparse(x), wanted)


def test_another_batch_is_tuned_at_its_first_call(path: Path) -> None:
    """As with an engine that was just compiled; and what is then saved has it."""
    torch.manual_seed(0)
    model = thinned(Residual())
    pb.compile(model, torch.randn(1, 3, 12, 12), threads=1).save(path)
    loaded, x = pb.load_engine(path), torch.randn(7, 3, 12, 12)
    with torch.no_grad():
        assert torch.allclose(loaded(x)["image"], model(x)["image"], atol=1e-5)
    assert set(loaded.prefers_dense) == {1, 7}
    loaded.save(path)
    assert set(pb.load_engine(path).prefers_dense) == {1, 7}


def test_one_file_serves_several_numbers_of_threads(path: Path) -> None:
    """Those of with_threads are saved beside it; by default it has torch's number, or the one it was saved with."""
    torch.manual_seed(0)
    engine, x = pb.compile(thinned(Residual()), torch.randn(2, 3, 12, 12), threads=2), torch.randn(2, 3, 12, 12)
    other = engine.with_threads(3)
    results = engine(x), other(x)
    engine.save(path)
    assert describe_engine(path).tuned == ((2, (2,)), (3, (2,)))
    assert pb.load_engine(path).report().threads == 2
    assert pb.load_engine(path, threads=1).report().threads == 1
    assert same(pb.load_engine(path)(x), results[0])
    assert same(pb.load_engine(path, threads=3)(x), results[1])
    assert same(pb.load_engine(path).with_threads(3)(x), results[1])


def test_what_is_decided_by_hand_is_saved(path: Path) -> None:
    """And what one of two engines for as many threads finds is in the file, whichever of them is saved."""
    torch.manual_seed(0)
    engine = pb.compile(thinned(Residual()), torch.randn(1, 3, 12, 12), threads=1)
    twin = engine.with_threads(1)
    engine(torch.randn(2, 3, 12, 12))
    twin(torch.randn(4, 3, 12, 12))
    engine.prefers_dense = {**engine.prefers_dense, 1: True}
    engine.save(path)
    assert set(pb.load_engine(path).prefers_dense) == {1, 2, 4}
    assert pb.load_engine(path).prefers_dense[1]


def test_weights_that_change_later_are_not_in_the_file(path: Path) -> None:
    """The engine has had its own since it was compiled."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ELU(), nn.Linear(5, 2))
    engine, x = pb.compile(model, torch.randn(1, 6), threads=1), torch.randn(1, 6)
    with torch.no_grad():
        model[0].weight.zero_()
    engine.save(path)
    assert same(pb.load_engine(path)(x), engine(x))


def test_calls_by_name_and_mistakes_are_as_before(path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, img: Tensor, tab: Tensor, scale: float = 2.0, *, mode: Any = ...) -> Tensor:
            return self.one(img) * scale + self.two(tab)

    a, b = torch.randn(2, 4), torch.randn(2, 5)
    engine = pb.compile(Named(), {"tab": b, "img": a}, threads=1)
    engine.save(path)
    loaded = pb.load_engine(path)
    assert same(loaded(a, tab=b), engine(a, b))
    with pytest.raises(ValueError, match="tab has shape"):
        loaded(a, torch.randn(2, 6))
    with pytest.raises(TypeError, match="called like the model's forward"):
        loaded(a, tabs=b)


def test_a_batch_of_none_and_nan_are_pytorchs(path: Path) -> None:
    """As of any engine; a stage is never asked for no rows, which once read memory that is not there."""
    torch.manual_seed(0)
    model = thinned(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 7)))
    engine = pb.compile(model, torch.randn(1, 40), threads=1)
    assert engine.run_sparse(torch.randn(0, 40)).shape == (0, 7)
    engine.save(path)
    loaded = pb.load_engine(path)
    assert loaded(torch.randn(0, 40)).shape == (0, 7)
    assert loaded(torch.full((2, 40), torch.nan)).isnan().any()


# ---------------------------------------------------------------- other machines and files


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"processor": "a Z80"}, "on 'a Z80'"),
        ({"register_bits": 8}, "with registers of 8 bits"),
        ({"pareback": "0.0"}, "by pareback 0.0"),
    ],
)
def test_on_another_processor_it_is_tuned_anew(changed: dict[str, Any], says: str, path: Path) -> None:
    """Nothing that was measured elsewhere counts, and the results are right all the same."""
    torch.manual_seed(0)
    model, x = thinned(Residual()), torch.randn(1, 3, 12, 12)
    pb.compile(model, x, threads=1).save(path)
    forged(path, lambda said: said["made_by"].update(changed))
    with pytest.warns(UserWarning, match=f"was tuned {says}: it is tuned anew here"):
        loaded = pb.load_engine(path)
    assert loaded.prefers_dense == {}
    with torch.no_grad():
        assert torch.allclose(loaded(x)["classes"], model(x)["classes"], atol=1e-5)
    assert not describe_engine(path).ready
    loaded.save(path)
    with warnings.catch_warnings(action="error"):
        assert same(pb.load_engine(path)(x), loaded(x))


def test_choices_that_no_layer_allows_are_passed_over(path: Path) -> None:
    """A file may say of a layer whatever it likes: it is tuned again where that could not be."""
    torch.manual_seed(0)
    model, x = thinned(Residual()), torch.randn(1, 3, 12, 12)
    pb.compile(model, x, threads=1).save(path)
    forged(path, lambda said: said.update(tuned={key: [0, 7, 7, 999, 3] for key in said["tuned"]}))
    with torch.no_grad():
        assert torch.allclose(pb.load_engine(path)(x)["image"], model(x)["image"], atol=1e-5)


def test_files_of_other_kinds(path: Path, tmp_path: Path) -> None:
    pb.save(nn.Linear(3, 2), path)
    with pytest.raises(pb.BadFile, match="it is no engine: engine.save or pareback compile writes one"):
        pb.load_engine(path)
    pb.compile(nn.Linear(3, 2), torch.randn(1, 3), threads=1).save(path)
    with pytest.raises(pb.BadFile, match="read it with pb.load_engine"):
        pb.load(path)
    forged(path, lambda said: said.update(version=99))
    with pytest.raises(pb.BadFile, match="its engine has the version 99, and this pareback knows 1; compile the model"):
        pb.load_engine(path)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        pb.load_engine(tmp_path / "none.pbe")


# ---------------------------------------------------------------- what cannot be saved


def test_an_operator_that_is_not_on_the_list_is_named(path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.linear(x))

    engine = pb.compile(Odd(), torch.randn(1, 4), threads=1)
    with pytest.raises(
        ValueError, match="PyTorch runs 'aten.special_bessel_j0.default', which .* cannot name. Save the"
    ):
        engine.save(path)
    assert not path.exists()


def test_a_result_of_a_class_of_its_own_is_refused(path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x).max(1)  # a named tuple of torch's

    engine = pb.compile(Pair(), torch.randn(1, 4), threads=1)
    with pytest.raises(ValueError, match="what the model returns has a torch.*tuples, lists and dicts alone"):
        engine.save(path)


def test_no_operator_on_the_list_reads_files_or_runs_code() -> None:
    """Every name is a function of torch's or Python's, and none that deals with more than numbers."""
    named = [operators.operator_named(f"aten.{name}") for name in operators._ATEN]
    assert sum(one is None for one in named) < 5  # of another version of torch
    words = ("file", "storage", "resize", "set_", "as_strided", "pin_memory", "cuda", "empty", "unsafe_index", "rand")
    assert [name for name in operators._ATEN if any(word in name for word in words)] == []
    assert operators.operator_named("aten.from_file.default") is None
    assert operators.operator_named("builtins.eval") is None
    assert operators.operator_named(["aten.relu.default"]) is None


# ---------------------------------------------------------------- forgery


def forged(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a file says of its engine, and make the checksums right."""
    header, data = split(path.read_bytes())
    said = json.loads(header["__metadata__"][ENGINE])
    change(said)
    header["__metadata__"][ENGINE] = json.dumps(said)
    path.write_bytes(sealed(header, data, path))


def operation(said: Any, kind: str) -> Any:
    """The first operation of a kind in a stage."""
    return next(one for stage in said["stages"] for one in stage["operations"] if one.get("op") == kind)


def within(said: Any) -> Any:
    """The sizes of a value that its stage keeps to itself."""
    stage = next(one for one in said["stages"] if one["kind"] == "images")
    made = [one["out"] for one in stage["operations"]]
    return next(said["shapes"][name] for name in made if name not in stage["outputs"])


Forgery = tuple[str, Callable[[Any], object], str]
OF_IMAGES: dict[str, Forgery] = {
    "channels": ("images", lambda said: taps(said)[0].update(shape=[8, 1, 3, 9]), "channels"),
    "size": ("images", lambda said: said["shapes"].update(x=[[1, 0], 3, 900, 900]), "another size"),
    "batch": ("images", lambda said: said["shapes"].update(x=[5, 3, 12, 12]), "does not begin with the batch"),
    "batch inside": ("images", lambda said: within(said).__setitem__(0, 5), "of several batches"),
    "padding": ("images", lambda said: taps(said).__setitem__(2, 3), "another size|residual"),
    "picks": ("images", lambda said: operation(said, "Channels")["picks"][0].__setitem__(1, 999), "no such channel"),
    "residual": ("images", lambda said: operation(said, "Convolution").update(residual="x"), "residual|reads"),
    "order": ("images", lambda said: said["stages"][0]["operations"].reverse(), "reads what there is not"),
    "window": ("images", lambda said: operation(said, "MaxPool").update(padding=2), "more around it|another size"),
    "gate": ("images", lambda said: operation(said, "Gate").update(other=operation(said, "Gate")["x"]), "means"),
    "kind": ("images", lambda said: said["stages"][0].update(kind="rows"), "no linear layers|several places"),
}
OF_OTHERS: dict[str, Forgery] = {
    "operator": ("rows", lambda said: call(said).update(call="os.system"), "an operator that is not on the list"),
    "features": ("rows", lambda said: operation(said, "Linear")["taps"][0].update(shape=[40, 60, 1, 1]), "sizes"),
    "tokens": ("tokens", lambda said: said["stages"][-1]["encoder"].update(tokens=9999), "tokens have other sizes"),
    "heads": ("tokens", lambda said: operation(said, "Attention")["key"].__setitem__(1, 90), "beyond their channels"),
    "scale": ("tokens", lambda said: operation(said, "Attention").update(scale=-1.0), "scaled by nothing"),
    "tensor": ("rows", lambda said: operation(said, "Linear")["bias"].update(tensor="none"), "does not hold"),
    "deep": ("rows", lambda said: said.update(outputs=json.loads("[" * 40 + "]" * 40)), "too deep"),
}
FORGERIES = OF_IMAGES | OF_OTHERS


def taps(said: Any) -> Any:
    return operation(said, "Convolution")["taps"]


def call(said: Any) -> Any:
    return next(one for stage in said["stages"] for one in stage["operations"] if "call" in one)


@pytest.mark.parametrize("name", FORGERIES)
def test_what_does_not_fit_together_is_refused(name: str, path: Path) -> None:
    """With right checksums: the kernels would read and write beyond their memory, or something would be run."""
    kind, change, says = FORGERIES[name]
    torch.manual_seed(0)
    build, batch = MODELS[kind]
    pb.compile(thinned(build()), batch(1), threads=1).save(path)
    forged(path, change)
    with pytest.raises(pb.BadFile, match=f"cannot be read: .*({says})"):
        pb.load_engine(path, threads=1)


def places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from places(value)


@pytest.mark.parametrize("kind", ["images", "rows", "tokens"])
def test_entries_exchanged_for_others(kind: str, path: Path) -> None:
    """200 descriptions with an entry in the place of another of its type: refused, or an engine that can be called."""
    torch.manual_seed(0)
    build, batch = MODELS[kind]
    pb.compile(thinned(build()), batch(1), threads=1).save(path)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0

    def change(said: Any) -> None:
        holder, key = draw.choice(list(places(said)))
        like = [(a, b) for a, b in places(said) if type(a[b]) is type(holder[key])]
        other, another = draw.choice(like)
        holder[key] = json.loads(json.dumps(other[another]))

    for _ in range(200):
        path.write_bytes(whole)
        forged(path, change)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                loaded = pb.load_engine(path, threads=1)
        except pb.BadFile:
            refused += 1
            continue
        plan = loaded._plan
        inputs = [torch.zeros(plan.shapes.of(name, 2)).to(plan.dtypes[name]) for name in plan.inputs]
        try:
            loaded.run_sparse(*inputs)
        except (RuntimeError, TypeError, ValueError, IndexError):  # PyTorch's own operators, told nonsense
            continue
    assert refused > 50


def test_flipped_bits_are_noticed(path: Path) -> None:
    """A checksum for the description and for every tensor."""
    pb.compile(thinned(nn.Linear(30, 20)), torch.randn(1, 30), threads=1).save(path)
    content, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        bad = bytearray(content)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            pb.load_engine(path)
        except pb.BadFile:
            continue
        assert reading.read_plan(path)  # spaces that fill up the header, or letters of a hexadecimal digit


# ---------------------------------------------------------------- the command


def test_nothing_is_exported_to_load_an_engine(path: Path) -> None:
    """What capturing a model takes to import, for a second, stays out of a process that only loads."""
    pb.compile(thinned(nn.Linear(30, 20)), torch.randn(1, 30), threads=1).save(path)
    code = (
        "import sys, torch, pareback as pb\n"
        f"print(pb.load_engine({str(path)!r})(torch.ones(1, 30)).shape)\n"
        "print(sorted(name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.splitlines() == ["torch.Size([1, 20])", "[]"]


def test_versions_are_those_of_this_process() -> None:
    assert writing.made_by()["pareback"] == pb.__version__


def test_inspect_says_what_an_engine_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pb.compile(thinned(nn.Sequential(nn.Linear(30, 20), nn.ELU())), torch.randn(4, 30), threads=1).save(path)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "engine:   1 layer for input batch×30; PyTorch runs aten.elu.default" in shown
    assert "tuned:    1 thread, batch 4" in shown
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["tuned"] == {"1": [4]}
    assert main(["bench", str(path)]) == 2
    assert "is a compiled engine" in capsys.readouterr().err
