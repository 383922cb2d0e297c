"""``pareback evaluate``: accuracy, each class and a picture, on a run's own images and on others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupted import stopped
from PIL import Image
from tiny_images import arrays, write_npz, write_tree

from pareback.cli import main
from pareback.lab.evaluation import Evaluation, evaluate_run, said, shown
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.trainer import train
from pareback.page.confusion import plot_confusion
from pareback.runs.export import network_of
from pareback.runs.folder import result_of

pytestmark = pytest.mark.usefixtures("one_thread")

TREE: dict[str, Any] = {
    "data.kind": "folder",
    "data.image_size": 8,
    "data.workers": 0,
    "data.batch_size": 6,
    "data.val_share": 0.25,
    "model.name": "conv",
    "goal.kind": "budget",
    "goal.sparsity": 0.9,
    "train.epochs": 2,
    "train.ema": 0.5,
    "train.device": "cpu",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("data") / "tree", train=12, test=4, classes=("ant", "bee", "cow"))


@pytest.fixture(scope="module")
def trained(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(override(Recipe(), {**TREE, "data.path": str(tree)}), out, quiet=True)
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.startswith("pareback: error: ")
    assert said.count("\n") == 1
    return said


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["evaluate", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- a run's own images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "figure"), [("last", "test_accuracy"), ("best", "best"), ("ema", "ema_test_accuracy")]
)
def test_it_repeats_what_the_run_says(run: Path, capsys: pytest.CaptureFixture[str], model: str, figure: str) -> None:
    """Of each of its models, on the test images; the confusion adds up to them."""
    found = asked(capsys, str(run), "--model", model)
    result = result_of(run)
    said = result["best"]["test_accuracy"] if figure == "best" else result[figure]
    assert found["accuracy"] == pytest.approx(said)
    assert (found["part"], found["count"], found["same_images"], found["finished"]) == ("test", 12, True, True)
    assert [sum(row) for row in found["confusion"]] == [4, 4, 4]
    assert [one["name"] for one in found["classes"]] == ["ant", "bee", "cow"]
    for label, one in enumerate(found["classes"]):
        assert one["correct"] == found["confusion"][label][label]
        assert one["recall"] == pytest.approx(25.0 * one["correct"])
    name = "confusion.png" if model == "last" else f"confusion-{model}.png"
    assert found["picture"] == str(run / name)
    with Image.open(run / name) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 400
    if model == "last":
        assert found["loss"] == pytest.approx(result["test_loss"], rel=1e-5)


def test_it_says_it_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run)]) == 0
    said = capsys.readouterr().out
    assert "class  images  right %  answers right %" in said
    assert f"{result_of(run)['test_accuracy']:.2f} % of 12 test images of " in said
    assert "(standard error " in said
    assert f"wrote {run / 'confusion.png'}" in said


def test_images_that_were_held_out_serve_where_there_are_no_others(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(tree, tmp_path / "bare"))
    shutil.rmtree(bare / "val")
    result = train(override(Recipe(), {**TREE, "data.path": str(bare)}), tmp_path / "run", quiet=True)
    found = asked(capsys, str(tmp_path / "run"))
    assert (found["part"], found["count"]) == ("val", 9)
    assert found["accuracy"] == pytest.approx(result["val_accuracy"])


@pytest.mark.slow
def test_sets_in_memory_are_measured_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digits, and with bf16: the precision is the run's."""
    changes = {"data.batch_size": 128, "train.epochs": 2, "train.device": "cpu", "train.precision": "bf16"}
    result = train(override(Recipe(), changes), tmp_path / "run", quiet=True)
    found = asked(capsys, str(tmp_path / "run"))
    assert found["accuracy"] == pytest.approx(result["accuracy"])
    assert (found["count"], found["images"]) == (450, "digits")


# -- other images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["val", "test", "."])
def test_another_tree_may_have_its_classes_anywhere(
    run: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """In val/, in test/ or at its top: the same photographs give the same answers, and none to train on are needed."""
    other = tmp_path / "other"
    shutil.copytree(tree / "val", other / place, dirs_exist_ok=True)
    own, found = asked(capsys, str(run)), asked(capsys, str(run), "--data.path", str(other))
    assert found["confusion"] == own["confusion"]
    assert found["loss"] == pytest.approx(own["loss"])
    assert found["same_images"] is None
    assert Path(found["picture"]).name == "confusion-other.png"


def test_images_in_memory_are_scaled_as_in_the_training(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same photographs elsewhere have the same loss, to the bit, as only the same crops of them do."""
    recipe = override(Recipe(), {**TREE, "data.path": str(tree), "data.memory": True, "train.epochs": 1})
    result = train(recipe, tmp_path / "run", quiet=True)
    shutil.copytree(tree / "val", tmp_path / "other")
    own, found = (
        asked(capsys, str(tmp_path / "run"), *more) for more in ([], ["--data.path", str(tmp_path / "other")])
    )
    assert own["loss"] == found["loss"] == pytest.approx(result["test_loss"], rel=1e-5)


def test_classes_keep_their_labels_where_some_have_no_images(
    run: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree of cows alone: they are the third class, not the first."""
    shutil.copytree(tree / "val" / "cow", tmp_path / "cows" / "cow")
    own, found = asked(capsys, str(run)), asked(capsys, str(run), "--data.path", str(tmp_path / "cows"))
    assert found["confusion"] == [[0, 0, 0], [0, 0, 0], own["confusion"][2]]
    assert found["classes"][0]["recall"] is None


def test_a_class_that_the_run_does_not_know_is_named(
    run: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(tree / "val", tmp_path / "other"))
    (other / "bee").rename(other / "wasp")
    said = fails(capsys, "evaluate", str(run), "--data.path", str(other))
    assert "has folders that are no classes of the run: 'wasp'. Its classes are 'ant', 'bee', 'cow'." in said


def test_corrupt_images_are_named_here_too(
    run: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(tree / "val", tmp_path / "other"))
    (other / "bee" / "0.png").write_bytes(b"")
    assert "1 of 12 images of" in fails(capsys, "evaluate", str(run), "--data.path", str(other))
    skipping = [str(run), "--data.path", str(other), "--data.corrupt", "skip"]
    found = asked(capsys, *skipping)
    assert (found["count"], found["skipped_images"]) == (11, ["bee/0.png"])
    assert main(["evaluate", *skipping]) == 0
    assert "1 image left out that cannot be read; --json names them." in capsys.readouterr().out


def test_it_says_which_folder_of_another_tree_was_taken(
    run: Path, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(capsys, str(run), "--data.path", str(tree))["images"] == str(tree / "val")
    assert asked(capsys, str(run), "--data.path", str(tree / "val"))["images"] == str(tree / "val")


def test_other_images_are_not_called_the_test(run: Path, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may be those that the run was trained on."""
    assert main(["evaluate", str(run), "--data.path", str(tree / "train")]) == 0
    assert f" images of {tree / 'train'} are right" in (said := capsys.readouterr().out)
    assert "test images" not in said


def test_other_files_are_normalised_as_the_run_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose training images are much darker: the network still sees what it learned from."""
    file = write_npz(tmp_path / "a.npz")
    changes = {"data.kind": "npz", "data.path": str(file), "data.batch_size": 10, "train.epochs": 1}
    train(override(Recipe(), {**changes, "train.device": "cpu"}), tmp_path / "run", quiet=True)
    darker = write_npz(tmp_path / "b.npz", train_x=arrays()["train_x"] // 4)
    own = asked(capsys, str(tmp_path / "run"))
    found = asked(capsys, str(tmp_path / "run"), "--data.path", str(darker))
    assert found["confusion"] == own["confusion"]
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-4)
    assert (own["same_images"], found["same_images"]) == (True, False)
    renamed = write_npz(tmp_path / "c.npz", classes=np.array(["a", "b", "c", "d"]))
    said = fails(capsys, "evaluate", str(tmp_path / "run"), "--data.path", str(renamed))
    assert "are not of the same classes" in said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    del result["normalisation"]  # as releases before this one wrote it
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    said = fails(capsys, "evaluate", str(tmp_path / "run"), "--data.path", str(darker))
    assert "does not say what its images were normalised with" in said
    assert asked(capsys, str(tmp_path / "run"))["confusion"] == own["confusion"]


def test_a_set_that_comes_with_a_package_is_at_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own images were measured, and said to be those of the path."""
    train(override(Recipe(), {"train.epochs": 1, "train.device": "cpu"}), tmp_path / "run", quiet=True)
    said = fails(capsys, "evaluate", str(tmp_path / "run"), "--data.path", str(tmp_path))
    assert "--data.path has no effect with data.kind=digits, whose images come with a package. Drop it." in said


def test_the_test_images_of_a_file_are_measured_where_others_were_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data.val_share a training does not use them; given the file, evaluate does, not a share of its others."""
    file = write_npz(tmp_path / "a.npz", **arrays(train=40, test=12))
    changes = {"data.kind": "npz", "data.path": str(file), "data.batch_size": 10, "train.epochs": 1}
    train(override(Recipe(), {**changes, "data.val_share": 0.2, "train.device": "cpu"}), tmp_path / "run", quiet=True)
    own = asked(capsys, str(tmp_path / "run"))
    assert (own["count"], own["part"]) == (8, "val")
    found = asked(capsys, str(tmp_path / "run"), "--data.path", str(file))
    assert (found["count"], found["part"], found["same_images"]) == (12, "test", False)
    labels = arrays(train=40, test=12)["test_y"]
    assert [sum(row) for row in found["confusion"]] == np.bincount(labels).tolist()
    net = network_of(tmp_path / "run").eval()
    seen = result_of(tmp_path / "run")["normalisation"]
    pixels = torch.from_numpy(arrays(train=40, test=12)["test_x"]).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(seen[name]).view(-1, 1, 1) for name in ("mean", "std"))
    answers = net((pixels - mean) / std).argmax(1)
    assert found["accuracy"] == pytest.approx(100.0 * float((answers == torch.from_numpy(labels)).float().mean()))


# -- what is not finished, or not a run ------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_is_measured_and_said_to_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    (run / "model.safetensors").unlink()
    assert main(["evaluate", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"The run in '{run}' is not finished: these are the weights of its last checkpoint" in said
    assert f"Go on with: pareback train --resume {run}" in said
    assert asked(capsys, str(run))["finished"] is False
    assert "is not finished. Drop --model" in fails(capsys, "evaluate", str(run), "--model", "best")
    assert asked(capsys, str(run))["same_images"] is True
    saved = (run / "checkpoint.pt").read_bytes()
    (run / "checkpoint.pt").write_bytes(saved[: len(saved) // 2] + b"damaged" + saved[len(saved) // 2 + 7 :])
    assert main(["evaluate", str(run)]) == 1
    assert "checkpoint.pt' is damaged" in capsys.readouterr().err
    (run / "checkpoint.pt").unlink()
    assert "was interrupted before its first checkpoint" in fails(capsys, "evaluate", str(run))


def test_a_run_that_was_interrupted_knows_its_images_and_classes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A renamed class would move the labels of all others; classes of another tree go by their names, too."""
    here, run = Path(shutil.copytree(tree, tmp_path / "tree")), tmp_path / "run"
    stopped(override(Recipe(), {**TREE, "data.path": str(here)}), run, monkeypatch, steps=2)
    own = asked(capsys, str(run))
    shutil.rmtree(here / "val" / "ant")
    fewer = asked(capsys, str(run), "--data.path", str(here))
    assert fewer["confusion"] == [[0, 0, 0], *own["confusion"][1:]]
    shutil.copytree(tree / "val" / "ant", here / "val" / "ant")
    shutil.copy(here / "val" / "ant" / "1.png", here / "val" / "ant" / "0.png")
    assert main(["evaluate", str(run)]) == 0
    assert "They are not those that the run was measured on." in capsys.readouterr().out
    for part in ("train", "val"):
        (here / part / "ant").rename(here / part / "zebra")
    said = fails(capsys, "evaluate", str(run))
    assert "The images and the run are not of the same classes: only one of them has 'ant', 'zebra'." in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "'nowhere' holds no run. Give the folder of one."),
        ([], "RUN is missing."),
        (["RUN", "--model", "worst"], "invalid choice: 'worst'"),
        (["RUN", "--data.workers", "-2"], "--data.workers -2 must be at least 0."),
        (["RUN", "--out", "no/where.png"], "There is no folder 'no'. Make it first."),
        (["RUN", "--out", "RUN/model.safetensors"], "belongs to the run in that folder."),
        (["RUN", "--data.path", "nowhere"], "There is no folder nowhere"),
        (["RUN", "--train.device", "tpu"], "tpu"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert says in fails(capsys, "evaluate", *(word.replace("RUN", str(run)) for word in argv))


def test_a_model_that_was_not_kept_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model-best.safetensors").unlink()
    said = fails(capsys, "evaluate", str(run), "--model", "best")
    assert "kept no best model. Train it with data.val_share=0.1 on a folder of images, or drop --model." in said


def test_damaged_weights_are_not_believed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "model-best.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert "is not the file that" in fails(capsys, "evaluate", str(run), "--model", "best")


@pytest.mark.parametrize(
    ("field", "value"),
    [("class_names", ["ant"]), ("class_names", "abc"), ("normalisation", {"mean": [1]}), ("normalisation", [1, 2])],
)
def test_a_result_that_was_tampered_with_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, field: value}))
    assert "its classes or its normalisation cannot be read" in fails(capsys, "evaluate", str(run))


def test_a_new_training_drops_the_old_picture(run: Path, tree: Path) -> None:
    """It would be of another network."""
    evaluate_run(run)
    (run / "confusion.png").write_bytes(b"old")
    train(override(Recipe(), {**TREE, "data.path": str(tree), "seed": 1}), run, quiet=True, force=True)
    assert not (run / "confusion.png").exists()


# -- counting and drawing --------------------------------------------------------------------------------------------


def evaluation(confusion: list[list[int]]) -> Evaluation:
    names = tuple(f"class {number}" for number in range(len(confusion)))
    rows = tuple(map(tuple, confusion))
    return Evaluation(Path("run"), "last", "tree", "test", True, "", 1.0, names, rows)


def test_figures_are_those_of_the_matrix() -> None:
    """By hand: 7 of 10 right; of the second class 3 of 4, and 3 of the 5 times it was answered."""
    found = evaluation([[4, 2, 0], [0, 3, 1], [0, 0, 0]])
    assert (found.accuracy, found.count) == (70.0, 10)
    assert found.standard_error == pytest.approx(100 * (0.7 * 0.3 / 10) ** 0.5)
    one, two, three = found.classes()
    assert (one.recall, one.precision) == (pytest.approx(400 / 6), 100.0)
    assert (two.recall, two.precision) == (75.0, 60.0)
    assert (three.recall, three.precision) == (None, 0.0)
    assert found.mistakes() == [("class 0", "class 1", 2), ("class 1", "class 2", 1)]
    assert [line.split()[1] for line in shown(found).splitlines()[2:]] == ["0", "1", "2"]  # the worst first


def test_of_many_classes_the_worst_are_listed() -> None:
    found = evaluation(torch.eye(50, dtype=torch.int64).tolist())
    text = shown(found)
    assert text.endswith("10 classes that do better are left out; --json has all.")
    assert len(text.splitlines()) == 43


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 20, 60, 200])
def test_pictures_of_any_size_are_drawn(tmp_path: Path, classes: int) -> None:
    """Large ones without numbers in their cells, and at last without names."""
    counts = (9 * torch.eye(classes, dtype=torch.int64) + 1).tolist()
    with Image.open(plot_confusion(evaluation(counts), tmp_path / "a.png")) as picture:
        assert max(picture.size) < 2100


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    found = replace(evaluation([[1, 0], [1, 1]]), names=(r"$\frac$", "5 $ or 6 $"))
    assert plot_confusion(found, tmp_path / "a.png").exists()
    assert "(once)" in said(found)[1]


def test_letters_that_the_font_lacks_are_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    plot_confusion(replace(evaluation([[1, 0], [1, 1]]), names=("\ue000\ue001", "b")), tmp_path / "a.png")
    assert caplog.messages == ["The picture lacks letters of the classes' names, which its font does not have."]
    assert not recwarn.list
