"""A teacher: what it adds to the loss, that it only teaches, and what it is worth to a very sparse network."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_images import arrays, write_npz

from pareback.errors import InvalidValue
from pareback.lab.data.sources import open_source
from pareback.lab.models.build import build
from pareback.lab.recipe.reading import override, to_yaml
from pareback.lab.recipe.schema import (
    DataRecipe,
    GoalRecipe,
    OptimizerRecipe,
    Recipe,
    TeacherRecipe,
    TrainRecipe,
)
from pareback.lab.teacher import Teacher, distance
from pareback.lab.trainer import train
from pareback.reproduce.paper import Experiment, PaperRow
from pareback.reproduce.runner import RowPlan, reproduce
from pareback.runs.export import export_path, network_of
from pareback.runs.folder import difference, result_of
from pareback.runs.record import read_record, write_record

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = Recipe(
    name="dense", data=DataRecipe(batch_size=64), optimizer=OptimizerRecipe(lr=0.05), train=TrainRecipe(epochs=12)
)
NAMES = ["ant", "bee", "cat", "dog"]
SPARSE = override(DENSE, {"name": "sparse", "goal.kind": "budget", "goal.sparsity": 0.99})


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet-300-100 on the digits, nothing pruned."""
    out = tmp_path_factory.mktemp("runs") / "dense-0"
    train(DENSE, out, quiet=True)
    return out


def test_the_distance_by_hand() -> None:
    """T²·Σ p·log(p/q) of the softened answers, averaged over images, in float64."""
    logits, answers, t = [[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], [[2.0, 0.0, 0.0], [1.0, 1.0, -4.0]], 2.0
    total = 0.0
    for mine, theirs in zip(logits, answers, strict=True):
        q, p = ([math.exp(x / t) / sum(math.exp(y / t) for y in row) for x in row] for row in (mine, theirs))
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = distance(torch.tensor(logits), torch.tensor(answers), t)
    assert float(found) == pytest.approx(t * t * total / 2, rel=1e-6)


def test_its_share_of_the_loss() -> None:
    """A weight of 0.75 leaves a quarter to the labels; a network that answers alike has nothing more to learn."""
    teacher = Teacher(TeacherRecipe("run", weight=0.75, temperature=1.0), torch.nn.Identity())
    logits = torch.tensor([[1.0, 2.0]])
    assert float(teacher.loss(torch.tensor(2.0), logits, logits)) == pytest.approx(0.5)
    other = torch.tensor([[2.0, 1.0]])
    expected = 0.5 + 0.75 * float(distance(logits, other, 1.0))
    assert float(teacher.loss(torch.tensor(2.0), logits, other)) == pytest.approx(expected)


@pytest.mark.slow
def test_a_very_sparse_network_learns_more_from_it(dense: Path, tmp_path: Path) -> None:
    """502 of 50,200 weights: over three seeds it ends above what labels alone teach, and the teacher is not changed."""
    before = load_file(dense / "model.safetensors")
    found = {"alone": 0.0, "taught": 0.0}
    for seed in range(3):
        for name in found:
            changes = {"seed": seed, **({"teacher.run": str(dense)} if name == "taught" else {})}
            result = train(override(SPARSE, changes), tmp_path / f"{name}-{seed}", quiet=True)
            assert result["pruned_nonzeros"] == 502
            found[name] += result["accuracy"] / 3
    assert found["taught"] > found["alone"] + 4.0  # measured: 70.3 and 81.9
    after = load_file(dense / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_does_not_disturb_what_chance_decides(dense: Path, tmp_path: Path) -> None:
    """With hardly any weight the training is, to rounding, the one without: the same images in the same order."""
    short = override(DENSE, {"train.epochs": 1, "name": "short"})
    train(short, tmp_path / "alone", quiet=True)
    train(override(short, {"teacher.run": str(dense), "teacher.weight": 1e-9}), tmp_path / "taught", quiet=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "taught"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher.run": "nowhere"}, "holds no finished run"),
        ({"teacher.weight": 1.5}, "teacher.weight=1.5 must be above 0 and below 1"),
        ({"teacher.temperature": 0.0}, "teacher.temperature=0.0 must be above 0"),
        ({"data.kind": "mnist5000"}, "tells 10 classes from images of (1, 8, 8); here there are 10 of (1, 28, 28)"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    changes: dict[str, object], message: str, dense: Path, tmp_path: Path
) -> None:
    """Before anything is trained, and without leaving a folder behind."""
    recipe = override(SPARSE, {"teacher.run": str(dense), **changes})
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        train(recipe, tmp_path / "out", quiet=True)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_same_run_in_another_folder_is_the_same_teacher(dense: Path, tmp_path: Path) -> None:
    """Records keep its name and no path of the machine; with and without a teacher are two recipes."""
    out = tmp_path / "sparse-0"
    recipe = override(SPARSE, {"teacher.run": str(dense), "train.epochs": 1})
    train(recipe, out, quiet=True)
    write_record(read_record(out), tmp_path / "row.json")
    assert read_record(tmp_path / "row.json").result["recipe"]["teacher"]["run"] == "dense-0"
    moved = override(recipe, {"teacher.run": "/elsewhere/dense-0"})
    assert difference(recipe, moved) == ""
    assert "teacher.run" in difference(recipe, override(SPARSE, {"train.epochs": 1}))
    assert result_of(out)["recipe"]["goal"]["sparsity"] == GoalRecipe("budget", sparsity=0.99).sparsity


def test_rows_of_a_table_may_be_taught_by_another_row(tmp_path: Path) -> None:
    """The dense row is trained first, and its network of the same seed teaches the next."""
    for recipe in (override(DENSE, {"train.epochs": 1}), override(SPARSE, {"train.epochs": 1})):
        (tmp_path / f"{recipe.name}.yaml").write_text(to_yaml(recipe))
    rows = (PaperRow("dense", "dense"), PaperRow("taught", "taught", of="sparse", teacher="dense"))
    plan = RowPlan(tmp_path / "out", tmp_path / "runs", recipes=tmp_path, seeds=(3,), device="cpu", quiet=True)
    reproduce(Experiment("small", "Small", "Two rows.", rows, plots=False), plan)
    record = read_record(tmp_path / "out" / "rows" / "taught-3.json")
    assert record.result["recipe"]["teacher"]["run"] == "dense-3"


def test_the_network_it_starts_from_can_teach(dense: Path, tmp_path: Path) -> None:
    """It stays as it was, however far the other has come: bit for bit what naming its run gives."""
    changes = {"model.pretrained": str(dense), "train.epochs": 2, "optimizer.lr": 0.01}
    copied = tmp_path / "dense.safetensors"
    copied.write_bytes((dense / "model.safetensors").read_bytes())
    ways = {
        "named": {"teacher.run": str(dense)},
        "start": {"teacher.run": "start"},
        "file": {"teacher.run": "start", "model.pretrained": str(copied)},
        "alone": {},
    }
    for name, way in ways.items():
        train(override(SPARSE, {**changes, **way}), tmp_path / name, quiet=True)
    named, start, file, alone = (load_file(tmp_path / name / "model.safetensors") for name in ways)
    assert all(torch.equal(named[key], start[key]) and torch.equal(named[key], file[key]) for key in named)
    assert not all(torch.equal(named[key], alone[key]) for key in named)


def test_a_start_that_cannot_teach_is_refused(dense: Path, tmp_path: Path) -> None:
    """Without weights to start from, or with those of other classes, whose answers would be a fresh head's."""
    with pytest.raises(InvalidValue, match="Write model.pretrained=FILE or a run's folder"):
        train(override(SPARSE, {"teacher.run": "start"}), tmp_path / "fresh", quiet=True)
    weights = load_file(dense / "model.safetensors")
    head = [name for name, value in weights.items() if len(value) == 10]
    save_file({name: value for name, value in weights.items() if name not in head}, tmp_path / "backbone.safetensors")
    save_file(weights | {name: weights[name][:7].clone() for name in head}, tmp_path / "seven.safetensors")
    for name in ("seven", "backbone"):
        changes = {"teacher.run": "start", "model.pretrained": str(tmp_path / f"{name}.safetensors")}
        with pytest.raises(InvalidValue, match="does not tell these classes apart, and the head begins anew"):
            train(override(SPARSE, changes), tmp_path / name, quiet=True)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A run on images whose classes have names, and its recipe."""
    folder = tmp_path_factory.mktemp("named")
    file = write_npz(folder / "own.npz", classes=np.array(NAMES))
    recipe = Recipe(data=DataRecipe("npz", path=str(file), batch_size=10), train=TrainRecipe(epochs=1, device="cpu"))
    train(recipe, folder / "run", quiet=True)
    return recipe, folder / "run"


def with_classes(recipe: Recipe, names: list[str], folder: Path) -> Recipe:
    file = write_npz(folder / f"{'-'.join(names)}.npz", classes=np.array(names))
    return override(recipe, {"data.path": str(file)})


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["ant", "cat", "bee", "dog"], "the same classes in another order: the first that differs is 'bee' there and "),
        (["ant", "bee", "cat", "elk"], "other classes: the first that differs is 'dog' there and 'elk' here. Give a "),
    ],
)
def test_a_teacher_of_other_classes_is_refused(
    names: list[str], says: str, named: tuple[Recipe, Path], tmp_path: Path
) -> None:
    """As many of them are not enough: it would teach wrong labels. A run that does not know their names teaches."""
    recipe, run = named
    train(override(recipe, {"teacher.run": str(run)}), tmp_path / "same", quiet=True)
    taught = with_classes(recipe, names, tmp_path)
    with pytest.raises(InvalidValue, match=f"would teach wrong labels: it is for {says}"):
        train(override(taught, {"teacher.run": str(run)}), tmp_path / "other", quiet=True)
    old = Path(shutil.copytree(run, tmp_path / "old"))
    result = json.loads((old / "result.json").read_text())
    (old / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k != "class_names"}))
    train(override(taught, {"teacher.run": str(old)}), tmp_path / "unknown", quiet=True)


def test_a_teacher_sees_images_as_in_its_own_training(named: tuple[Recipe, Path], tmp_path: Path) -> None:
    """Sets in memory are normalised each with its own statistics: darker images must not look darker still to it."""
    recipe, run = named
    dark = write_npz(tmp_path / "dark.npz", classes=np.array(NAMES), train_x=arrays()["train_x"] // 4)
    taught = override(recipe, {"data.path": str(dark), "teacher.run": str(run)})
    source, own = (open_source(each.data, torch.device("cpu")) for each in (taught, recipe))
    assert source.mean[0] < 0.3 * own.mean[0]  # type: ignore[attr-defined]
    teacher = Teacher.of(taught, source, lambda net: net)
    assert teacher is not None
    net = network_of(run).eval()
    for (seen, _), (images, _) in zip(source.test_batches(batch=4), own.test_batches(batch=4), strict=True):
        assert torch.allclose(teacher.answers(seen), net(images), atol=1e-4)
    same = Teacher.of(override(recipe, {"teacher.run": str(run)}), own, lambda net: net)
    assert same is not None
    assert torch.equal(same.answers(images), net(images))


def test_a_damaged_result_does_not_hide_the_order_of_the_classes(named: tuple[Recipe, Path], tmp_path: Path) -> None:
    """Without a result the file knows its classes; a result that cannot be read is no start, and nothing to export."""
    recipe, run = named
    lost = Path(shutil.copytree(run, tmp_path / "lost"))
    (lost / "result.json").unlink()
    head = [name for name, value in load_file(run / "model.safetensors").items() if len(value) == 4]
    for place in (lost, lost / "model.safetensors"):
        turned = override(recipe, {"model.pretrained": str(place)}).model
        begun = build(turned, 4, (3, 8, 8), NAMES[::-1]).state_dict()
        assert all(torch.equal(begun[n], load_file(run / "model.safetensors")[n].flip(0)) for n in head)
    cut = Path(shutil.copytree(run, tmp_path / "cut"))
    (cut / "result.json").write_text((run / "result.json").read_text()[:300])
    for place in (cut, cut / "model.safetensors"):
        with pytest.raises(InvalidValue, match="result.json' is damaged"):
            build(override(recipe, {"model.pretrained": str(place)}).model, 4, (3, 8, 8), NAMES)
        with pytest.raises(InvalidValue, match="result.json' is damaged"):
            export_path(place, "pare", tmp_path / "out.pare", None)


def test_a_head_is_not_taken_for_other_classes(
    named: tuple[Recipe, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In another order its rows are moved, for other names it begins anew; so they are of copies and exported files."""
    recipe, run = named
    weights = load_file(run / "model.safetensors")
    head = sorted(name for name, value in weights.items() if len(value) == 4)
    copied = Path(shutil.copy(run / "model.safetensors", tmp_path / "copied.safetensors"))
    packed = export_path(run, "pare", tmp_path / "packed.pare", None)
    plain = export_path(packed, "safetensors", tmp_path / "plain.safetensors", None)
    torch.save(weights, tmp_path / "nameless.pt")

    def begun(place: Path | str, names: list[str]) -> dict[str, torch.Tensor]:
        caplog.clear()
        torch.manual_seed(0)
        return build(override(recipe, {"model.pretrained": str(place)}).model, 4, (3, 8, 8), names).state_dict()

    def same(found: dict[str, torch.Tensor], rows: list[int]) -> set[bool]:
        return {torch.equal(found[name], weights[name][rows]) for name in head}

    for place in (run, run / "model.safetensors", copied, packed, plain):
        assert same(begun(place, NAMES), [0, 1, 2, 3]) == {True}
        assert not caplog.messages
        moved = begun(place, ["ant", "cat", "dog", "bee"])
        assert same(moved, [0, 2, 3, 1]) == {True}
        assert "in another order" in caplog.text
        assert "are put into this order." in caplog.text
        fresh = begun(place, ["ant", "bee", "cat", "elk"])
        assert same(fresh, [0, 1, 2, 3]) == {False}
        assert "'dog' there and 'elk' here" in caplog.text
        assert f"{head[1]!r}, {head[0]!r} begin anew." in caplog.text
        assert all(torch.equal(found[n], weights[n]) for found in (moved, fresh) for n in weights if n not in head)
    assert same(begun(tmp_path / "nameless.pt", ["ant", "bee", "cat", "elk"]), [0, 1, 2, 3]) == {True}


def test_a_start_of_other_classes_cannot_teach(
    named: tuple[Recipe, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In another order they can be put right, which is said once for the network and its teacher."""
    recipe, run = named
    start = override(recipe, {"model.pretrained": str(run), "teacher.run": "start"})
    with caplog.at_level("WARNING"):
        train(with_classes(start, ["dog", "cat", "bee", "ant"], tmp_path), tmp_path / "moved", quiet=True)
    assert caplog.text.count("are put into this order.") == 1
    with pytest.raises(InvalidValue, match="does not tell these classes apart, and the head begins anew"):
        train(with_classes(start, ["ant", "bee", "cat", "elk"], tmp_path), tmp_path / "other", quiet=True)


def test_another_run_called_start_is_not_the_same(dense: Path) -> None:
    """Places may move; the network a training starts from is no place."""
    recipe = override(SPARSE, {"model.pretrained": str(dense), "teacher.run": "start"})
    assert "teacher.run" in difference(recipe, override(recipe, {"teacher.run": str(dense)}))
