"""A network as its own teacher: the average by hand, its growing weight, resumed runs, one graph, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interrupted import trained_in_parts
from tiny_images import arrays, write_npz
from torch import nn

import pareback as pb
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe, TeacherRecipe
from pareback.lab.self_teacher import SelfTeacher
from pareback.lab.teacher import distance
from pareback.lab.trainer import train
from pareback.page.method import flat, method
from pareback.runs import checkpoints
from pareback.runs.folder import difference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training and 8 test images of noise, in four classes."""
    return write_npz(tmp_path_factory.mktemp("images") / "tiny.npz", **arrays(train=48, test=8))


def recipe_of(images: Path, **changes: Any) -> Recipe:
    """Three epochs of four steps, to a tenth of the weights, with batch norms."""
    fields: dict[str, Any] = {
        "data.kind": "npz",
        "data.path": str(images),
        "data.batch_size": 12,
        "model.name": "conv",
        "goal.kind": "budget",
        "goal.sparsity": 0.9,
        "optimizer.lr": 0.05,
        "train.epochs": 3,
        "train.device": "cpu",
        "teacher.run": "self",
    }
    return override(Recipe(), {**fields, **changes})


def test_average_and_weight_by_hand() -> None:
    """Five steps in float64: the average is of pruned weights, and its answers count by 0.8·t/5 at step t."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    goal = pb.Budget(sparsity=0.5)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=5, ramp=0.0, include=["weight"])
    teacher = SelfTeacher(TeacherRecipe("self", weight=0.8, temperature=2.0), model, 5)
    mean = model.weight.detach().clone()
    for step in range(5):
        x, y = torch.randn(3, 6).double(), torch.tensor([0, 1, 3])
        logits, answers = model(x), teacher.answers(x)
        assert torch.allclose(answers, x @ mean.T, atol=1e-6)  # its decay is a float32
        by_labels = F.cross_entropy(logits, y)
        share = 0.8 * step / 5
        expected = (1 - share) * by_labels + share * distance(logits, x @ mean.T, 2.0)
        loss = teacher.loss(by_labels, logits, answers)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        teacher.follow()
        kept = min(0.999, (2.0 + step) / (11.0 + step))
        mean = kept * mean + (1 - kept) * model.weight.detach()
    assert int((model.weight == 0).sum()) == 12
    assert int((mean == 0).sum()) < 12  # masks changed: the average is denser
    pruner.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"train.ema": 0.5, "train.mixup": 0.4, "train.accumulate": 2, "train.precision": "bf16"}],
    ids=["plain", "options"],
)
def test_a_run_goes_on_to_the_same_bits(
    changes: dict[str, Any], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within an epoch and resumed: the average and its weight are in the checkpoint."""
    recipe = recipe_of(images, **changes)
    whole = train(recipe, tmp_path / "whole", quiet=True)
    assert whole["pruned_nonzeros"] == whole["pruned_weights"] // 10
    trained_in_parts(recipe, tmp_path / "parts", monkeypatch, 6)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    ends = [checkpoints.load(tmp_path / name / "checkpoint.pt")["parts"]["teacher"] for name in ("whole", "parts")]
    assert float(ends[0]["done"]) == float(ends[1]["done"]) == 12.0
    one, two = (end["average"]["module"] for end in ends)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_it_changes_the_training_and_any_goal_may_have_it(images: Path, tmp_path: Path) -> None:
    """Dense networks and methods with masks included; without a teacher the same recipe ends elsewhere."""
    files = {}
    for name, changes in {
        "taught": {},
        "alone": {"teacher.run": None},
        "dense": {"goal.kind": "dense", "goal.sparsity": None},
        "rigl": {"goal.kind": "rigl"},
    }.items():
        result = train(recipe_of(images, **{"train.epochs": 1, **changes}), tmp_path / name, quiet=True)
        files[name] = (tmp_path / name / "model.safetensors").read_bytes()
        if name != "dense":
            assert result["pruned_nonzeros"] == result["pruned_weights"] // 10
    assert files["taught"] != files["alone"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own to say about the machine
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_learns_the_same(tmp_path: Path) -> None:
    """Both networks, compiled, and the average in one CUDA graph, against the eager step."""
    changes = {"data.kind": "digits", "data.path": None, "data.batch_size": 64, "train.device": "cuda"}
    recipe = recipe_of(tmp_path, **changes)
    eager = train(recipe, tmp_path / "eager", quiet=True)
    graphed = override(recipe, {"train.cuda_graph": True, "train.compile": True, "train.channels_last": True})
    graph = train(graphed, tmp_path / "graph", quiet=True)
    assert graph["pruned_nonzeros"] == eager["pruned_nonzeros"]
    assert graph["accuracy"] == pytest.approx(eager["accuracy"], abs=5.0)
    assert graph["test_loss"] == pytest.approx(eager["test_loss"], rel=0.1)


def test_it_is_no_folder(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name is not looked into, a run in it is no mistake, and it is another recipe than a run's."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(images, **{"train.epochs": 1})
    assert train(recipe, tmp_path / "self", quiet=True)["origins"]["teacher"] is None
    assert "teacher.run" in difference(recipe, override(recipe, {"teacher.run": "runs/dense"}))
    assert method(flat({"goal": {"kind": "budget"}, "teacher": {"run": "self"}})) == "exact budget, taught by itself"


def test_two_teachers_are_refused(images: Path) -> None:
    with pytest.raises(ValueError, match="teacher.run names another one. Drop one of them"):
        check(recipe_of(images, **{"train.mutual": True}))


def test_a_finished_run_is_not_made_longer(images: Path, tmp_path: Path) -> None:
    """In a longer one the teacher's answers would have counted less in the steps that are done."""
    recipe = recipe_of(images, **{"schedule.kind": "constant", "train.epochs": 1, "goal.ramp": 0.0})
    train(recipe, tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="grows to the end of 1 epochs, and in a longer run more slowly"):
        train(override(recipe, {"train.epochs": 2}), tmp_path / "run", resume=True, quiet=True)
