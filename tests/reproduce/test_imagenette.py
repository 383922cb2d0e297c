"""Networks that are trained already, sparsified in 20 epochs: rows, tables, and the recipes for ImageNet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from tiny_images import write_tree

from pareback.cli import main
from pareback.lab.data.decoded import DecodedFolder
from pareback.lab.recipe.reading import override, read
from pareback.lab.trainer import train
from pareback.page.references import references
from pareback.reproduce import imagenette
from pareback.reproduce.runner import RowPlan, recipe_of_row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "paper"
SMALL = {"torchvision/resnet50": "torchvision/resnet18", "torchvision/alexnet": "conv"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree"), size=(36, 34))


@pytest.fixture(scope="module")
def done(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows of smaller networks, one epoch each, by the command."""
    home = tmp_path_factory.mktemp("done")
    for network in ("resnet50", "alexnet"):
        recipe = yaml.safe_load((RECIPES / f"imagenette-{network}.yaml").read_text())
        recipe["data"] |= {"image_size": 32, "batch_size": 4}
        recipe["model"] = {"name": SMALL[recipe["model"]["name"]]}
        (home / f"imagenette-{network}.yaml").write_text(yaml.safe_dump(recipe))
    rows = "resnet50-dense,resnet50-exact-90,resnet50-thin-90,alexnet-dense,alexnet-unconstrained"
    only = ",".join(f"imagenette-{row}" for row in rows.split(","))
    places = ["--out", str(home / "out"), "--runs", str(home / "runs"), "--recipes", str(home)]
    options = ["--data.path", str(tree), "--only", only, "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["reproduce", "imagenette", *places, *options]) == 0
    return home


def test_a_pruned_row_starts_from_the_dense_one_of_its_seed(done: Path) -> None:
    """Its recipe names that run, and a layer that is not pruned has not moved far from it in three steps."""
    result = json.loads((done / "runs" / "imagenette-resnet50-exact-90-0" / "result.json").read_text())
    assert result["recipe"]["model"]["pretrained"] == str(done / "runs" / "imagenette-resnet50-dense-0")
    assert result["recipe"]["optimizer"]["lr"] == 0.01
    assert result["sparsity"] == pytest.approx(0.9, abs=1e-6)
    kept = json.loads((done / "out" / "rows" / "imagenette-resnet50-exact-90-0.json").read_text())
    assert kept["recipe"]["model"]["pretrained"] == "imagenette-resnet50-dense-0"


def test_the_tables_compare_with_the_start(done: Path) -> None:
    tables = json.loads((done / "out" / "imagenette.json").read_text())
    rows = {row["name"]: row["measured"] for section in tables.values() for row in section}
    dense, pruned = rows["imagenette-resnet50-dense"], rows["imagenette-resnet50-exact-90"]
    assert dense["to_start"] is None
    assert pruned["to_start"] == pytest.approx(pruned["accuracy"] - dense["accuracy"])
    assert rows["imagenette-resnet50-thin-90"]["nonzeros"] < 0.12 * dense["nonzeros"]
    assert pruned["error"] == imagenette.error_of_images(pruned["accuracy"], 6)
    assert rows["imagenette-resnet50-exact-95"] is None
    text = (done / "out" / "imagenette.md").read_text()
    assert "| exact 95 % | – | not run yet |" in text
    for picture in ("imagenette.png", "imagenette-histograms.png"):
        assert (done / "out" / picture).read_bytes()[:4] == b"\x89PNG"
    assert pruned["to_start_error"] == pruned["error"]  # of one seed, that of its images


def test_choices_alone_make_tables_without_a_picture(done: Path, tmp_path: Path) -> None:
    """They come first, before any network of the picture: a legend of nothing was a traceback."""
    kept = json.loads((done / "out" / "rows" / "imagenette-resnet50-dense-0.json").read_text())
    (tmp_path / "rows").mkdir()
    held_out = {**kept, "name": "imagenette-val-resnet50-dense"}
    (tmp_path / "rows" / "imagenette-val-resnet50-dense-0.json").write_text(json.dumps(held_out))
    written = imagenette.collect_imagenette(tmp_path)
    assert [path.name for path in written] == ["imagenette.md", "imagenette.json"]


def test_a_dense_network_is_compared_with_no_other(done: Path, tmp_path: Path) -> None:
    """Among the choices there are two of them: the AlexNet's was told as so many points below the ResNet's."""
    (tmp_path / "rows").mkdir()
    for network in ("resnet50", "alexnet"):
        kept = json.loads((done / "out" / "rows" / f"imagenette-{network}-dense-0.json").read_text())
        name = f"imagenette-val-{network}-dense"
        (tmp_path / "rows" / f"{name}-0.json").write_text(json.dumps({**kept, "name": name}))
    imagenette.collect_imagenette(tmp_path)
    rows = json.loads((tmp_path / "imagenette.json").read_text())["imagenette-choices"]
    found = {row["name"]: row["measured"] for row in rows if row["measured"]}
    assert [one["to_start"] for one in found.values()] == [None, None]


def test_images_are_decoded_once_for_all_rows(done: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per row, which took longer than their epochs; a row of other crops has its own."""
    decoded = []
    real = DecodedFolder.__init__
    monkeypatch.setattr(DecodedFolder, "__init__", lambda *args, **words: (decoded.append(1), real(*args, **words))[1])
    rows = "resnet50-dense,resnet50-exact-90,resnet50-longer"
    only = ",".join(f"imagenette-{row}" for row in rows.split(","))
    places = ["--out", str(done / "again"), "--runs", str(done / "again-runs"), "--recipes", str(done)]
    options = ["--data.path", str(tree), "--only", only, "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["reproduce", "imagenette", *places, *options]) == 0
    assert len(decoded) == 1


def test_the_standard_error_of_images() -> None:
    """Of 3,925 with 90 % right: the square root of 0.9 · 0.1 / 3,925."""
    assert imagenette.error_of_images(90.0, 3925) == pytest.approx(100 * (0.09 / 3925) ** 0.5)


def keep(done: Path, out: Path, name: str, **changes: Any) -> None:
    """Put the record of a ResNet-50's row among others, with some of it changed."""
    row = json.loads((done / "out" / "rows" / f"imagenette-resnet50-{name}-0.json").read_text()) | changes
    (out / "rows" / f"imagenette-resnet50-{name}-{row['seed']}.json").write_text(json.dumps(row))


def exact_90(out: Path) -> dict[str, Any]:
    """Return what the row of 90 % came to, by the records in a folder."""
    imagenette.collect_imagenette(out)
    rows = json.loads((out / "imagenette.json").read_text())["imagenette-resnet50"]
    found: dict[str, Any] = next(row["measured"] for row in rows if row["name"].endswith("-exact-90"))
    return found


def test_a_row_is_compared_with_its_own_start_alone(done: Path, tmp_path: Path) -> None:
    """Rows put together from two machines: the dense network of the other one is a point away, and not its start."""
    (tmp_path / "rows").mkdir()
    for name in ("dense", "exact-90"):
        keep(done, tmp_path, name)
    assert exact_90(tmp_path)["to_start"] is not None
    keep(done, tmp_path, "dense", weights="0123456789abcdef")
    assert exact_90(tmp_path)["to_start"] is None


def test_two_seeds_that_agree_are_not_sure(done: Path, tmp_path: Path) -> None:
    """Both 0.5 points above their starts: the error was 0.00, and is that of twice 1,000 images, half of them right.

    Of three seeds it is that of their differences, 0.5, 0.5 and 0.8: √(0.06 / 2) / √3 = 0.1.
    """
    (tmp_path / "rows").mkdir()
    for seed, above in enumerate((0.5, 0.5, 0.8)):
        for name, accuracy in (("dense", 49.75), ("exact-90", 49.75 + above)):
            keep(done, tmp_path, name, seed=seed, accuracy=accuracy, images={"test": 1000})
        if seed == 1:
            two = exact_90(tmp_path)["to_start_error"]
    assert two == pytest.approx(100 * (0.25 / 2000) ** 0.5, rel=1e-3)
    assert exact_90(tmp_path)["to_start_error"] == pytest.approx(0.1)


def test_choices_never_see_the_test_images() -> None:
    """Every row that a rate is chosen by, and the dense network it starts from, is of the same held-out split."""
    plan = RowPlan(Path("out"), Path("runs"), recipes=RECIPES)
    for row in imagenette.CHOICES.rows:
        assert recipe_of_row(row, plan).data.val_share == 0.1
        assert not row.start or row.start.startswith("imagenette-val-")
    for row in (*imagenette.RESNET50.rows, *imagenette.ALEXNET.rows):
        assert recipe_of_row(row, plan).data.val_share == 0.0


@pytest.mark.parametrize("name", ["alexnet-imagenet", "resnet50-imagenet-fixed-ga", "resnet50-imagenet-budget"])
def test_the_recipes_for_imagenet_train_on_a_small_tree(name: str, tree: Path, tmp_path: Path) -> None:
    """With a file in the place of the hub's weights, of as many classes as ImageNet has."""
    recipe = read(RECIPES / f"{name}.yaml")
    assert recipe.model.pretrained == "hub"
    builder = getattr(torchvision.models, recipe.model.name.removeprefix("torchvision/"))
    torch.save(builder().state_dict(), tmp_path / "weights.pt")
    small = {"data.path": str(tree), "data.image_size": 64, "data.batch_size": 4, "data.workers": 0, "train.epochs": 1}
    here = {"train.device": "cpu", "train.precision": "fp32", "model.pretrained": str(tmp_path / "weights.pt")}
    result = train(override(recipe, {**small, **here}), tmp_path / "run", quiet=True)
    assert result["steps"] == 3
    assert result["recipe"]["train"]["label_smoothing"] == recipe.train.label_smoothing
    assert 0 < result["sparsity"] < 1


def test_published_figures_can_be_drawn_beside_runs() -> None:
    found = references(str(ROOT / "references" / "alexnet-imagenet.yaml"))
    ours = next(one for one in found if one.label.startswith("unconstrained"))
    assert (round(100 - ours.error, 2), ours.counts["nonzeros"]) == (56.62, 2_650_000)
    assert ours.fits("torchvision/alexnet on imagenet, 1000 classes")
    for one in references(str(ROOT / "references" / "resnet50-imagenet.yaml"))[1:]:
        percent = int(one.label.rpartition(", ")[2].removesuffix(" %"))
        weights = sum(p.numel() for p in torchvision.models.resnet50().parameters() if p.dim() > 1)
        assert one.counts["nonzeros"] == pytest.approx(weights * (100 - percent) / 100 + 54_120, abs=500)
