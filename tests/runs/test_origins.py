"""A run is its recipe, its images and its teacher: these may move, others in their place are refused, and a mistake
costs nothing that was there."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_images import arrays, write_npz, write_tree

from pareback.cli import main
from pareback.curves.grid import Point
from pareback.curves.planning import tasks
from pareback.lab.data import tree
from pareback.lab.data.decoded import DecodedFolder
from pareback.lab.data.folder import Folder
from pareback.lab.data.sources import fingerprint
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.loop import Training
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train
from pareback.runs import store

pytestmark = pytest.mark.usefixtures("one_thread")

DIGITS = Recipe(data=DataRecipe(batch_size=256), goal=GoalRecipe("budget", sparsity=0.9), train=TrainRecipe(epochs=2))


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def stopped(recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for one step and stop."""
    call = TrainStep.__call__

    def acting(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", acting)
        with pytest.raises(Interrupted):
            train(recipe, out, quiet=True)


@pytest.fixture
def images(tmp_path: Path) -> Recipe:
    """A recipe for images in a file."""
    path = write_npz(tmp_path / "a.npz", **arrays(train=64, test=8))
    return Recipe(data=DataRecipe("npz", path=str(path), batch_size=16), train=TrainRecipe(epochs=2, device="cpu"))


@pytest.fixture
def others(tmp_path: Path) -> str:
    """The same images with other labels."""
    changed = arrays(train=64, test=8)
    changed["train_y"] = np.roll(changed["train_y"], 1)
    return str(write_npz(tmp_path / "b.npz", **changed))


# -- nothing is lost by a mistake --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mistake",
    [
        ["--model.name", "torchvision/resnet19"],
        ["--data.kind", "npz", "--data.path", "typo.npz"],
        ["--data.batch_size", "5000"],
        ["--goal.kind", "budget", "--goal.bytes", "1"],
        ["--teacher.run", "nobody"],
    ],
)
def test_force_with_a_mistake_leaves_the_old_run(mistake: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(DIGITS, out, quiet=True)
    before = content(out)
    assert main(["train", "--out", str(out), "--force", "--quiet", *mistake]) != 0
    assert content(out) == before


def test_force_replaces_the_old_run(tmp_path: Path) -> None:
    train(override(DIGITS, {"train.ema": 0.9}), tmp_path, quiet=True)
    (tmp_path / "notes.txt").write_text("mine")
    train(override(DIGITS, {"seed": 5}), tmp_path, quiet=True, force=True)
    train(override(DIGITS, {"seed": 5}), tmp_path / "fresh", quiet=True)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "fresh" / "model.safetensors").read_bytes()
    assert not (tmp_path / "model-ema.safetensors").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_does_not_teach_itself(tmp_path: Path) -> None:
    """It would have to be thrown away and learned from at once."""
    train(DIGITS, tmp_path, quiet=True)
    before = content(tmp_path)
    again = override(DIGITS, {"teacher.run": str(tmp_path)})
    with pytest.raises(ValueError, match=r"is the folder of this run itself\. Give another one with --out"):
        train(again, tmp_path, quiet=True, force=True)
    assert content(tmp_path) == before


# -- a run that was killed before its first step -----------------------------------------------------------------------


def test_killed_while_it_starts_it_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe is there before data and network are; with a mistake in them it is gone again."""

    def killed(*_: object) -> None:
        raise SystemExit  # what is not an Exception stands for what no program hears of

    with monkeypatch.context() as patched:
        patched.setattr(Training, "__init__", killed)
        with pytest.raises(SystemExit):
            train(DIGITS, tmp_path / "run", quiet=True)
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    train(DIGITS, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run")["model.safetensors"] == content(tmp_path / "whole")["model.safetensors"]


def test_nothing_to_resume_says_how_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path / "none")]) != 0
    assert "Give the folder of one, or begin it without --resume." in capsys.readouterr().err


# -- images ------------------------------------------------------------------------------------------------------------


def test_other_images_are_another_run(images: Recipe, others: str, tmp_path: Path) -> None:
    """A finished run is not passed off as theirs. A copy elsewhere is the same run."""
    result = train(images, tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match=r"holds another run, finished: data\.path=.*b\.npz holds other images"):
        train(override(images, {"data.path": others}), tmp_path / "run", quiet=True)
    copy = shutil.copy(str(images.data.path), tmp_path / "copy.npz")
    assert train(override(images, {"data.path": str(copy)}), tmp_path / "run", quiet=True) == result


def test_other_images_in_the_same_place_are_another_run(images: Recipe, others: str, tmp_path: Path) -> None:
    """A finished run is not passed off as theirs; where its images are gone there are no others."""
    place = Path(str(images.data.path))
    result = train(images, tmp_path / "run", quiet=True)
    assert train(images, tmp_path / "run", quiet=True) == result
    shutil.copy(others, place)
    with pytest.raises(ValueError, match=r"finished: data\.path=.*a\.npz holds other images than it was begun with"):
        train(images, tmp_path / "run", quiet=True)
    place.unlink()
    assert train(images, tmp_path / "run", quiet=True) == result


@pytest.mark.parametrize("more", [{}, {"data.memory": True}, {"data.corrupt": "skip"}], ids=str)
def test_exchanged_photographs_are_noticed_without_decoding_any(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, run = write_tree(tmp_path / "tree"), tmp_path / "run"
    if "data.corrupt" in more:
        (here / "train" / "cat" / "0.png").write_bytes(b"no image")
    data = DataRecipe("folder", path=str(here), batch_size=4, image_size=8, workers=0)
    recipe = override(Recipe(data=data, train=TrainRecipe(epochs=1, device="cpu")), more)
    result = train(recipe, run, quiet=True)
    monkeypatch.setattr(DecodedFolder, "__init__", lambda *_, **__: pytest.fail("images were decoded"))
    assert train(recipe, run, quiet=True) == result
    shutil.copy(here / "train" / "cat" / "1.png", here / "train" / "dog" / "0.png")
    with pytest.raises(ValueError, match=r"tree holds other images than it was begun with\. Give another folder with"):
        train(recipe, run, quiet=True)


def test_a_run_goes_on_with_its_own_images(
    images: Recipe, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(images, tmp_path / "run", monkeypatch)
    with pytest.raises(ValueError, match=r"cannot go on: data\.path=.*b\.npz holds other images than it was begun"):
        train(override(images, {"data.path": others}), tmp_path / "run", quiet=True, resume=True)
    copy = shutil.move(str(images.data.path), tmp_path / "elsewhere.npz")
    moved = override(images, {"data.path": str(copy)})
    train(moved, tmp_path / "run", quiet=True, resume=True)
    train(moved, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run")["model.safetensors"] == content(tmp_path / "whole")["model.safetensors"]


def test_folders_are_told_apart_by_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie does not matter. All sizes count, and every byte of a few images."""
    one, two = write_tree(tmp_path / "one"), tmp_path / "two"
    shutil.copytree(one, two)
    image = two / "train" / "cat" / "0.png"
    whole = image.read_bytes()
    assert Folder(one).fingerprint == Folder(two).fingerprint
    image.write_bytes(whole[:-1] + b"?")
    assert Folder(one).fingerprint != Folder(two).fingerprint
    image.write_bytes(whole)
    monkeypatch.setattr(tree, "_READ", 1)
    assert Folder(one).fingerprint == Folder(two).fingerprint
    (two / "val" / "dog" / "2.png").write_bytes(whole + b"?")
    assert Folder(one).fingerprint != Folder(two).fingerprint
    (two / "val" / "dog" / "2.png").unlink()
    assert Folder(one).fingerprint != Folder(two).fingerprint


def test_other_images_under_the_same_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run does not go on with them, and evaluate says so. Runs from before contents were noted go by names."""
    here, run = write_tree(tmp_path / "tree"), tmp_path / "run"
    data = DataRecipe("folder", path=str(here), batch_size=4, image_size=8, workers=0)
    recipe = Recipe(data=data, train=TrainRecipe(epochs=1, device="cpu"))
    stopped(recipe, run, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "fingerprint", property(by_names_alone, lambda *_: None), raising=False)
        stopped(recipe, tmp_path / "old", monkeypatch)
    shutil.copy(here / "train" / "cat" / "1.png", here / "train" / "dog" / "0.png")
    with pytest.raises(ValueError, match=r"cannot go on: data\.path=.*tree holds other images than it was begun with"):
        train(recipe, run, quiet=True, resume=True)
    train(recipe, tmp_path / "old", quiet=True, resume=True)
    train(recipe, tmp_path / "new", quiet=True)
    shutil.copy(here / "val" / "cat" / "1.png", here / "val" / "dog" / "0.png")
    assert main(["evaluate", str(tmp_path / "new")]) == 0
    assert "They are not those that the run was measured on." in capsys.readouterr().out


def by_names_alone(folder: Folder) -> str:
    """Return the fingerprint that releases before contents were looked at noted."""
    images = (*folder._train, *folder._val, *folder._test)
    return fingerprint((), (image.removeprefix(str(folder._path)) for image, _ in images))


def test_a_table_keeps_to_its_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that are there are of the data that is given, or it says that they are not."""
    short = ["--device", "cpu", "--epochs", "1", "--width", "1", "--quiet", "--only", "dense"]
    places = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    first = write_npz(tmp_path / "first.npz", **arrays(train=128, test=16))
    second = write_npz(tmp_path / "second.npz", **arrays(train=144, test=16))
    assert main(["reproduce", "table2", "--data.path", str(first), *places, *short]) == 0
    assert main(["reproduce", "table2", "--data.path", str(second), *places, *short]) != 0
    assert "holds other images than it was begun with. Give another folder with --out." in capsys.readouterr().err
    copy = shutil.copy(first, tmp_path / "copy.npz")
    assert main(["reproduce", "table2", "--data.path", str(copy), *places, *short]) == 0


# -- teachers ----------------------------------------------------------------------------------------------------------


def test_another_teacher_of_the_same_name_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights say which one it is, so that its folder may be moved, and another one not put in its place."""
    teachers = [tmp_path / place / "dense" for place in ("here", "there")]
    for seed, teacher in enumerate(teachers):
        train(override(DIGITS, {"goal.kind": "dense", "goal.sparsity": None, "seed": seed}), teacher, quiet=True)
    taught, other = (override(DIGITS, {"teacher.run": str(teacher)}) for teacher in teachers)
    result = train(taught, tmp_path / "done", quiet=True)
    stopped(taught, tmp_path / "half", monkeypatch)
    with pytest.raises(ValueError, match=r"holds another run, finished: teacher\.run=.*dense holds other weights"):
        train(other, tmp_path / "done", quiet=True)
    with pytest.raises(ValueError, match=r"cannot go on: teacher\.run=.*dense holds other weights"):
        train(other, tmp_path / "half", quiet=True, resume=True)
    kept = shutil.copytree(teachers[0], tmp_path / "kept")
    anew = override(DIGITS, {"goal.kind": "dense", "goal.sparsity": None, "seed": 2})
    train(anew, teachers[0], quiet=True, force=True)
    with pytest.raises(ValueError, match=r"holds another run, finished: teacher\.run=.*dense holds other weights"):
        train(taught, tmp_path / "done", quiet=True)
    shutil.move(kept, tmp_path / "renamed")
    moved = override(DIGITS, {"teacher.run": str(tmp_path / "renamed")})
    assert train(moved, tmp_path / "done", quiet=True) == result
    train(moved, tmp_path / "half", quiet=True, resume=True)
    assert content(tmp_path / "half")["model.safetensors"] == content(tmp_path / "done")["model.safetensors"]


def test_a_curve_is_not_made_of_other_images(images: Recipe, others: str, tmp_path: Path) -> None:
    """Its store goes by recipes, which do not say where images lie."""
    train(images, store.folder(tmp_path / "runs", images), quiet=True)
    asked = [Point("dense", "", images), Point("dense", "", override(images, {"data.path": others}))]
    done, blocked = tasks(asked, tmp_path / "runs")
    assert (done.standing, blocked.standing) == ("done", "blocked")
    assert "holds another run: data.path=" in blocked.problem


def test_runs_without_a_recipe_are_called_after_their_data(
    images: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else two data sets would meet in one folder, under the digits' name."""
    monkeypatch.chdir(tmp_path)
    given = ["train", "--data.kind", "npz", "--data.path", str(images.data.path), "--data.batch_size", "16"]
    short = ["--train.epochs", "1", "--train.device", "cpu", "--quiet"]
    assert main([*given, *short]) == 0
    assert capsys.readouterr().out.startswith("a: ")
    assert main([*given, *short, "--name", "mine", "--seed", "3"]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a-0", "mine-3"]


# -- weights to start from -------------------------------------------------------------------------------------------


def test_other_weights_to_start_from_are_another_run(tmp_path: Path) -> None:
    """A file that was written anew under the same name; before, the finished run of the old ones was the answer."""
    starts = [tmp_path / place / "dense" for place in ("here", "there")]
    for seed, start in enumerate(starts):
        train(override(DIGITS, {"goal.kind": "dense", "goal.sparsity": None, "seed": seed}), start, quiet=True)
    file = shutil.copy(starts[0] / "model.safetensors", tmp_path / "start.safetensors")
    for place in (starts[0], Path(file)):
        begun = override(DIGITS, {"model.pretrained": str(place), "train.epochs": 1})
        out = tmp_path / f"from-{place.name}"
        done = train(begun, out, quiet=True)
        assert train(begun, out, quiet=True) == done
        model = place / "model.safetensors" if place.is_dir() else place
        before = model.read_bytes()
        shutil.copy(starts[1] / "model.safetensors", model)
        with pytest.raises(
            ValueError, match=r"finished: model\.pretrained=.* holds other weights than it was begun with"
        ):
            train(begun, out, quiet=True)
        model.write_bytes(before)
        moved = Path(shutil.move(place, tmp_path / f"moved-{place.name}"))
        assert train(override(begun, {"model.pretrained": str(moved)}), out, quiet=True) == done
        shutil.move(moved, place)


@pytest.mark.parametrize("kind", ["digits", "folder"])
def test_images_that_the_start_has_seen_are_no_measure(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that it did not hold out is in its weights. It is not where it held out as much, or saw other images."""
    data = DataRecipe(batch_size=256)
    if kind == "folder":
        place = str(write_tree(tmp_path / "tree", train=10))
        data = DataRecipe(kind="folder", path=place, batch_size=4, image_size=8, workers=0)
    recipe = Recipe(data=data, train=TrainRecipe(epochs=1, device="cpu"))
    for share in (0.0, 0.2):
        train(override(recipe, {"data.val_share": share}), tmp_path / f"{share}", quiet=True)

    def said(start: Path, **changes: Any) -> str:
        caplog.clear()
        begun = override(recipe, {"model.pretrained": str(start), "data.val_share": 0.2, **changes})
        train(begun, tmp_path / "run", quiet=True, force=True)
        return caplog.text

    for start in (tmp_path / "0.0", tmp_path / "0.0" / "model.safetensors"):
        assert f"{start} learned from images that are held out here (data.val_share is 0 there and 0.2 h" in said(start)
    assert not said(tmp_path / "0.2")
    assert not said(tmp_path / "0.2", **{"data.val_share": 0.1})
    assert not said(tmp_path / "0.0", **{"data.val_share": 0.0})
    if kind == "folder":
        assert not said(tmp_path / "0.0", **{"data.path": str(write_tree(tmp_path / "other", train=11))})
