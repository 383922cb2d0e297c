"""recipes/finetune.yaml: anybody's weights and photographs, with nothing else to say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_images import write_tree
from torchvision.models import get_model

from pareback.cli import main
from pareback.costs.selection import select
from pareback.lab.models.build import build
from pareback.lab.recipe.checks import check, check_effects
from pareback.lab.recipe.reading import override, read
from pareback.runs.folder import result_of

RECIPE = Path(__file__).parents[3] / "recipes" / "finetune.yaml"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_nothing_is_missing_but_weights_and_images() -> None:
    """Its first lines say the command, and every network that it is given is pruned somewhere."""
    recipe = override(read(RECIPE), {"data.path": "tree", "model.pretrained": "weights.pt"})
    check(recipe)
    check_effects(recipe, ["data.path", "model.pretrained"])
    command = RECIPE.read_text(encoding="utf-8").splitlines()[1]
    assert command == "#   pareback train recipes/finetune.yaml --model.pretrained WEIGHTS --data.path TREE"
    with torch.device("meta"):
        model = build(read(RECIPE).model, 10, (3, 224, 224))
    assert len(select(model, recipe.goal.include, recipe.goal.exclude, recipe.goal.min_size)) == 54


@pytest.mark.slow
def test_a_tree_is_all_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of another number of classes, 40 photographs in two; smaller network, crops and batches, for time's sake.

    The budget is exact in both models, batch norms are judged by images that were held out, and the run can be
    evaluated.
    """
    tree = write_tree(tmp_path / "tree", train=20, test=5)
    torch.manual_seed(0)
    torch.save(get_model("mobilenet_v3_small", num_classes=7).state_dict(), tmp_path / "weights.pt")
    out = tmp_path / "run"
    small = "--model.name torchvision/mobilenet_v3_small --data.image_size 32 --data.batch_size 12 --train.epochs 2"
    given = ["--model.pretrained", str(tmp_path / "weights.pt"), "--data.path", str(tree), "--data.workers", "0"]
    assert main(["train", str(RECIPE), *given, *small.split(), "--train.device", "cpu", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "36 images to train on, 4 held out to choose by, 10 to test with" in " ".join(said.split())
    assert "Batch norms " in said
    result = result_of(out)
    assert result["pruned_nonzeros"] == result["pruned_weights"] // 10
    assert result["best"]["nonzeros"] == result["nonzeros"]
    assert result["recalibration"]["decided_by"] == "val"
    assert main(["evaluate", str(out), "--model", "best"]) == 0
    assert "% of 10 test images" in capsys.readouterr().out
