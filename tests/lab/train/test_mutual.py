"""Dense and pruned passes that teach each other: gradients by hand, batch norms apart, resumed runs, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interrupted import trained_in_parts
from safetensors.torch import load_file
from tiny_images import arrays, write_npz
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pareback as pb
from pareback.lab.models.vit import VisionTransformer
from pareback.lab.mutual import Mutual
from pareback.lab.recipe.checks import check, check_machine
from pareback.lab.recipe.reading import override, to_dict
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.step import Forward, TrainStep
from pareback.lab.trainer import train
from pareback.runs import checkpoints
from pareback.runs.store import decisive
from pareback.thresholds.controller import Controller

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training and 8 test images of noise, in four classes."""
    return write_npz(tmp_path_factory.mktemp("images") / "tiny.npz", **arrays(train=48, test=8))


def recipe_of(images: Path, **changes: Any) -> Recipe:
    """Three epochs of four steps, to a tenth of the weights."""
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
        "train.mutual": True,
    }
    return override(Recipe(), {**fields, **{key.replace("__", "."): value for key, value in changes.items()}})


# -- gradients -------------------------------------------------------------------------------------------------------


def tiny() -> tuple[nn.Sequential, torch.optim.SGD, pb.Pruner]:
    """A pruned layer, a batch norm and a layer that is not pruned, in float64; half of 48 weights are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    goal = pb.Budget(sparsity=0.5)
    return model, optimizer, pb.Pruner(model, optimizer, goal, total_steps=6, ramp=0.0, include=["0.weight"])


def by_hand(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, head: Tensor, end: Tensor, x: Tensor) -> Tensor:
    """The network's answers in training, written out."""
    z = x @ weight.T + bias
    z = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() * scale + shift
    return z.relu() @ head.T + end


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """T²·KL of softened answers with T = 2, the teacher's fixed, averaged over images."""
    p, q = (teacher.detach() / 2).softmax(1), (student / 2).softmax(1)
    return 4 * (p * (p.log() - q.log())).sum(1).mean()


def test_each_weight_has_the_gradient_of_its_pass() -> None:
    """Kept: the pruned pass's. Pruned: the dense one's at the latent weights. By labels alone for a third of the steps.

    Everything is computed a second time by hand, in float64.
    """
    model, optimizer, pruner = tiny()
    mutual = Mutual(model, pruner, optimizer, total_steps=6, smoothing=0.1)
    torch.manual_seed(1)
    for step in range(4):
        x, y = torch.randn(20, 6).double(), torch.randint(3, (20,))
        norms = mutual.state_dict()["norms"]
        own = [p.detach().clone().requires_grad_() for p in model.parameters()]
        latent = pruner.latent_tensors()["0.weight"].clone().requires_grad_()
        scale, shift = (norms[f"1.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
        sparse, dense = by_hand(*own, x), by_hand(latent, own[1], scale, shift, own[4], own[5], x)
        losses = [F.cross_entropy(z, y, label_smoothing=0.1) for z in (sparse, dense)]
        if step >= 2:
            losses = [losses[0] + divergence(dense, sparse), losses[1] + divergence(sparse, dense)]
        kept_grads = torch.autograd.grad(losses[0], own)
        pruned_grad, *norm_grads = torch.autograd.grad(losses[1], [latent, scale, shift])

        optimizer.zero_grad()
        logits = model(x)
        loss = mutual.loss(F.cross_entropy(logits, y, label_smoothing=0.1), logits, x, y)
        loss.backward()
        mutual.join_gradients()
        torch.testing.assert_close(loss, losses[0] + losses[1], rtol=1e-12, atol=0.0)
        weight = model.get_parameter("0.weight")
        assert 20 <= int(weight.count_nonzero()) <= 28  # of 48: there are both kinds
        expected = [torch.where(weight != 0, kept_grads[0], pruned_grad), *kept_grads[1:], *norm_grads]
        found = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert len(found) == len(expected) == 8
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
        optimizer.step()
    assert not torch.equal(mutual.state_dict()["norms"]["1.weight"], model.get_parameter("1.weight"))


def test_a_network_without_batch_norms_shares_everything() -> None:
    """A transformer: the optimizer gets nothing more, and pruned weights still take the dense pass's gradient."""
    torch.manual_seed(0)
    model = VisionTransformer(3, (1, 8, 8), width=24, depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=4, ramp=0.0, exclude=["head.*"])
    mutual = Mutual(model, pruner, optimizer, total_steps=4)
    assert len(optimizer.param_groups) == 1
    assert mutual.state_dict()["norms"] == {}
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    logits = model(x)
    F.cross_entropy(logits, y).backward(retain_graph=True)
    alone = model.layers[0].up.weight.grad.clone()
    optimizer.zero_grad()
    mutual.loss(F.cross_entropy(logits, y), logits, x, y).backward()
    mutual.join_gradients()
    weight = model.layers[0].up.weight
    same = weight.grad == alone
    assert torch.equal(same, weight != 0)


class ReadBackError(Exception):
    """A step asked for the value of a tensor."""


class Watch(TorchDispatchMode):
    """Raises where a GPU would have to be waited for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"):
            raise ReadBackError(function.name())
        return function(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a CUDA graph can hold it: before the passes teach each other, and after."""
    monkeypatch.setattr(Controller, "may_look", lambda self: False)  # as it is on a GPU
    model, optimizer, pruner = tiny()
    mutual = Mutual(model, pruner, optimizer, total_steps=6)
    step = TrainStep(Recipe(), model, optimizer, None, Forward(torch.device("cpu"), None, False), mutual=mutual)
    for _ in range(2):  # the optimizer's first step makes its state
        step(torch.randn(20, 6).double(), torch.randint(3, (20,)), 0.1)
    with Watch():
        for _ in range(3):
            step(torch.randn(20, 6).double(), torch.randint(3, (20,)), 0.1)
    assert int(mutual.state_dict()["done"]) == 5


# -- runs ------------------------------------------------------------------------------------------------------------


def test_the_dense_pass_leaves_the_models_batch_norms_alone(images: Path, tmp_path: Path) -> None:
    """Weights that do not move have the statistics of a run without a dense pass, which has its own in the checkpoint.

    The saved model is a plain one: same names, same shapes.
    """
    for name, mutual in (("mutual", True), ("alone", False)):
        recipe = recipe_of(images, train__mutual=mutual, optimizer__lr=1e-12, goal__threshold_lr=0.0, train__epochs=1)
        train(recipe, tmp_path / name, quiet=True)
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("mutual", "alone"))
    assert ours.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-6, atol=1e-7)
    own = checkpoints.load(tmp_path / "mutual" / "checkpoint.pt")["parts"]["mutual"]["norms"]
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert own.keys() == {f"{layer}.{kind}" for layer in (1, 4, 7) for kind in kinds}
    assert all(int(own[f"{layer}.num_batches_tracked"]) == 4 for layer in (1, 4, 7))
    assert not torch.allclose(own["7.running_var"], ours["7.running_var"], rtol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "train.accumulate": 2,
            "train.ema": 0.5,
            "train.mixup": 0.4,
            "train.freeze": "1.*",
            "train.head_rate": 0.1,
            "optimizer.clip": 1.0,
            "train.precision": "bf16",
        },
        {"optimizer.kind": "adamw", "optimizer.lr": 0.002, "train.decay_norms": False, "train.channels_last": True},
    ],
    ids=["plain", "options", "adamw"],
)
def test_the_budget_is_exact_and_a_run_goes_on_to_the_same_bits(
    changes: dict[str, Any], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within an epoch, after the passes have begun to teach each other, and resumed."""
    recipe = recipe_of(images, **changes)
    whole = train(recipe, tmp_path / "whole", quiet=True)
    assert whole["pruned_nonzeros"] == whole["pruned_weights"] // 10
    trained_in_parts(recipe, tmp_path / "parts", monkeypatch, 6)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    ends = [checkpoints.load(tmp_path / name / "checkpoint.pt")["parts"]["mutual"] for name in ("whole", "parts")]
    assert int(ends[0]["done"]) == int(ends[1]["done"]) == 12
    assert all(torch.equal(value, ends[1]["norms"][name]) for name, value in ends[0]["norms"].items())


def test_a_replayed_step_moves_both_passes_by_the_schedule(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a replay that is a plain call: learning rates are tensors then, and each group has one of its own."""
    monkeypatch.setattr("pareback.lab.train.step._captured", lambda work: work)
    monkeypatch.setattr("pareback.lab.trainer.check_machine", lambda *_: None)
    recipe = recipe_of(images)
    train(recipe, tmp_path / "plain", quiet=True)
    train(override(recipe, {"train.cuda_graph": True}), tmp_path / "replayed", quiet=True)
    ends = [checkpoints.load(tmp_path / name / "checkpoint.pt")["parts"] for name in ("plain", "replayed")]
    for layer in (1, 4, 7):
        for part in (lambda end: end["model"], lambda end: end["mutual"]["norms"]):
            one, two = (part(end)[f"{layer}.weight"] for end in ends)
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own to say about the machine
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", ["conv", "lenet-300-100"])
def test_a_captured_step_learns_the_same(model: str, tmp_path: Path) -> None:
    """Both passes, compiled, and all gradients in one CUDA graph, against the eager step."""
    changes = {"data.kind": "digits", "data.path": None, "data.batch_size": 64, "model.name": model}
    recipe = recipe_of(tmp_path, **changes, **{"train.device": "cuda", "train.ema": 0.9})
    eager = train(recipe, tmp_path / "eager", quiet=True)
    graphed = override(recipe, {"train.cuda_graph": True, "train.compile": True, "train.channels_last": True})
    graph = train(graphed, tmp_path / "graph", quiet=True)
    assert graph["pruned_nonzeros"] == eager["pruned_nonzeros"]
    assert graph["accuracy"] == pytest.approx(eager["accuracy"], abs=5.0)
    assert graph["test_loss"] == pytest.approx(eager["test_loss"], rel=0.1)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_a_recipe_that_does_not_ask_for_it_is_the_one_that_it_was() -> None:
    """Runs from before keep their place in the store."""
    before = to_dict(Recipe())
    del before["train"]["mutual"]
    assert decisive(to_dict(Recipe())) == decisive(before)
    assert decisive(to_dict(override(Recipe(), {"train.mutual": True}))) != decisive(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"goal.kind": "dense", "goal.sparsity": None}, "with goal.kind=dense nothing is pruned. Write goal.kind="),
        ({"goal.kind": "rigl"}, "with goal.kind=rigl they do not learn from every step. Write goal.kind=budget"),
        ({"goal.straight_through": False}, "with goal.straight_through=False they do not learn"),
        ({"goal.straight_through": 0.0}, "with goal.straight_through=0.0 they do not learn"),
        ({"teacher.run": "runs/dense"}, "teacher.run names another one. Drop one of them."),
    ],
)
def test_what_cannot_work_is_answered_in_a_sentence(changes: dict[str, Any], message: str, images: Path) -> None:
    with pytest.raises(ValueError, match=r"^train\.mutual") as error:
        check(recipe_of(images, **changes))
    assert message in str(error.value)


def test_several_processes_are_refused(images: Path) -> None:
    with pytest.raises(ValueError, match=r"dense pass's gradients between processes, and there are 2\. Start one"):
        check_machine(recipe_of(images), torch.device("cpu"), 2)


def test_a_finished_run_is_not_made_longer(images: Path, tmp_path: Path) -> None:
    """A third of more epochs is later: the steps that are done would have been others."""
    recipe = recipe_of(images, **{"schedule.kind": "constant", "train.epochs": 1, "goal.ramp": 0.0})
    train(recipe, tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="teach each other after a third of 1 epochs, and in a longer run later"):
        train(override(recipe, {"train.epochs": 2}), tmp_path / "run", resume=True, quiet=True)
