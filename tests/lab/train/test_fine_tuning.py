"""What fine-tuning on one's own images asks for: parts of batches, frozen layers, rates and decay by layer, mixing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import trained_in_parts
from safetensors.torch import load_file
from tiny_images import joined, write_tree
from torch import nn

from pareback.lab.data.folder import Folder
from pareback.lab.data.mixing import Mixing
from pareback.lab.models.build import build
from pareback.lab.models.learning import freeze_, frozen_norms, head_of
from pareback.lab.recipe.checks import check, check_machine
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import ModelRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pareback.lab.train.optimizers import load, optimizer_of, set_rate
from pareback.lab.train.step import Forward, Tally, TrainStep
from pareback.lab.trainer import train
from pareback.runs.folder import result_of
from pareback.runs.store import key

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")

#: Each option, away from its default, as a run on a tree of images has it.
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"train.accumulate": 3},
    "decay_norms": {"train.decay_norms": False},
    "freeze": {"train.freeze": "0.*,1.*"},
    "head_rate": {"train.head_rate": 0.2},
    "randaugment": {"data.randaugment": 9},
    "mixup": {"train.mixup": 0.4},
    "cutmix": {"train.cutmix": 1.0},
    "all": {
        "train.accumulate": 3,
        "train.decay_norms": False,
        "train.freeze": "0.*,1.*",
        "train.head_rate": 0.2,
        "data.randaugment": 9,
        "data.val_share": 0.25,
        "train.mixup": 0.4,
        "train.cutmix": 1.0,
        "train.label_smoothing": 0.1,
        "train.recalibrate": "always",
        "train.ema": 0.5,
    },
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training and 8 test images of noise, in two classes."""
    return write_tree(tmp_path_factory.mktemp("tree"), train=12, test=4)


def recipe_of(tree: Path, changes: dict[str, Any]) -> Recipe:
    """Three epochs of four steps (three, if images are held out), to a tenth of the weights."""
    fields: dict[str, Any] = {
        "data.kind": "folder",
        "data.path": str(tree),
        "data.image_size": 8,
        "data.workers": 0,
        "data.batch_size": 6,
        "model.name": "conv",
        "goal.kind": "budget",
        "goal.sparsity": 0.9,
        "optimizer.lr": 0.05,
        "train.epochs": 3,
        "train.device": "cpu",
    }
    return override(Recipe(), {**fields, **changes})


def kept(file: Path, names: list[str]) -> int:
    weights = load_file(file)
    return sum(int(weights[name].count_nonzero()) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_the_budget_is_exact_and_a_run_goes_on_to_the_same_bits(
    name: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each option alone and with all of them: stopped within an epoch, and resumed."""
    recipe = recipe_of(tree, OPTIONS[name])
    whole = train(recipe, tmp_path / "whole", quiet=True)
    pruned = [tensor["name"] for tensor in whole["tensors"] if tensor["pruned"]]
    assert whole["pruned_nonzeros"] == whole["pruned_weights"] // 10
    trained_in_parts(recipe, tmp_path / "parts", monkeypatch, 5)
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert files == sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()
        assert kept(tmp_path / "whole" / file, pruned) == whole["pruned_nonzeros"]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "all"])
def test_each_option_changes_the_weights_and_its_default_no_key(name: str, tree: Path, tmp_path: Path) -> None:
    """An option that did nothing would pass every other test."""
    plain, asked = recipe_of(tree, {"train.epochs": 1}), recipe_of(tree, {"train.epochs": 1, **OPTIONS[name]})
    for place, recipe in (("plain", plain), ("asked", asked)):
        train(recipe, tmp_path / place, quiet=True)
    one, two = (load_file(tmp_path / place / "model.safetensors") for place in ("plain", "asked"))
    assert any(not torch.equal(one[key], two[key]) for key in one)
    assert key(asked) != key(plain)
    assert key(Recipe()) == "e362c0cfbe"


# -- parts of a batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_make_the_step_of_the_whole(parts: int) -> None:
    """Without batch norms the same gradient, to the last bits of rounding; loss and hits are those of the batch."""
    x, y = torch.randn(8, 3, 4, 4), torch.arange(8) % 2
    ends = []
    for accumulate in (1, parts):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 2))
        recipe = Recipe(train=TrainRecipe(accumulate=accumulate, label_smoothing=0.1))
        optimizer = optimizer_of(OptimizerRecipe(clip=0.1), net)
        step = TrainStep(recipe, net, optimizer, None, Forward(CPU, None, False))
        for _ in range(3):
            step(x, y, 0.1)
        ends.append((net[1].weight.detach().clone(), step.tally.read()))
    (whole, sums), (accumulated, parted) = ends
    torch.testing.assert_close(accumulated, whole, rtol=1e-5, atol=1e-6)
    assert parted.mean_loss == pytest.approx(sums.mean_loss, rel=1e-5)
    assert (parted.correct, parted.images, parted.steps) == (sums.correct, sums.images, sums.steps)


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    recipe = override(Recipe(), {"data.batch_size": 128, "train.accumulate": 3})
    with pytest.raises(ValueError, match=r"batch_size=128 cannot be divided evenly by train.accumulate=3. Write a mul"):
        check_machine(recipe, CPU, 1)
    with pytest.raises(ValueError, match=r"evenly by 4 processes with train.accumulate=3. Write a multiple of 12"):
        check_machine(recipe, CPU, 4)


def test_parts_of_one_image_are_answered_in_a_sentence_where_norms_cannot_learn_from_them(
    tree: Path, tmp_path: Path
) -> None:
    small = {"data.image_size": 4, "model.name": "wrn", "model.depth": 10, "model.width": 1, "goal.kind": "dense"}
    recipe = recipe_of(tree, {**small, "goal.sparsity": None, "data.batch_size": 2, "train.accumulate": 2})
    with pytest.raises(ValueError, match=r"a single image at a time, .* or a smaller train\.accumulate\."):
        train(recipe, tmp_path / "run", quiet=True)


# -- layers that do not learn ----------------------------------------------------------------------------------------


def test_frozen_layers_keep_every_bit(tree: Path, tmp_path: Path) -> None:
    """Weights and, of batch norms, statistics, even where the others' are estimated anew; the rest learns."""
    recipe = recipe_of(tree, {**OPTIONS["freeze"], "train.recalibrate": "always", "optimizer.weight_decay": 0.1})
    result = train(recipe, tmp_path / "run", quiet=True)
    assert result["recalibration"]["norms"] == 2
    torch.manual_seed(recipe.seed)
    begun = build(recipe.model, 2, (3, 8, 8)).state_dict()
    ended = load_file(tmp_path / "run" / "model.safetensors")
    same = {name for name in begun if torch.equal(begun[name], ended[name])}
    assert {name for name in begun if name.startswith(("0.", "1."))} <= same
    assert not any(name.endswith(("weight", "running_mean")) for name in same if not name.startswith(("0.", "1.")))
    frozen = [tensor for tensor in result["tensors"] if tensor["name"].startswith("0.")]
    assert [tensor["pruned"] for tensor in frozen] == [False]


def test_only_norms_that_do_not_learn_at_all_stay_still() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    freeze_(model, ["0.*", "1.*", "2.bias"])
    assert frozen_norms(model) == {"1": model[1]}
    freeze_(model, None)


def test_a_pattern_that_freezes_nothing_or_everything_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"train.freeze='0.wieght' matches no parameter. Did you mean '0.weight'?"):
        freeze_(model, ["0.wieght"])
    with pytest.raises(ValueError, match=r"train.freeze='0' matches no parameter. Write '0.\*' for all within\."):
        freeze_(model, ["0"])
    with pytest.raises(ValueError, match=r"train.freeze leaves nothing that could learn"):
        freeze_(model, ["*"])


# -- rates and decay by layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "adamw", "ham"])
def test_the_head_follows_the_schedule_at_a_rate_of_its_own(kind: str) -> None:
    """And norms and biases do not decay, where that is asked for; all parameters are there, once."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    recipe = OptimizerRecipe(kind=kind, lr=0.1, weight_decay=0.01)  # type: ignore[arg-type]
    optimizer = optimizer_of(recipe, model, decay_norms=False, head=head_of(model, 3), head_rate=0.5)
    set_rate(optimizer, 0.04)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    wanted = {"0.weight": (0.04, 0.01), "0.bias": (0.04, 0.0), "1.weight": (0.04, 0.0), "1.bias": (0.04, 0.0)}
    wanted |= {"2.weight": (0.2, 0.01), "2.bias": (0.2, 0.0)}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == {
        name: (pytest.approx(rate), decay) for name, (rate, decay) in wanted.items()
    }
    assert len(found) == 6
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_groups_have_rates_of_their_own_in_memory_for_a_graph() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = optimizer_of(OptimizerRecipe(lr=0.1), model, captured=True, head=head_of(model, 3), head_rate=0.5)
    places = [group["lr"].data_ptr() for group in optimizer.param_groups]
    set_rate(optimizer, 0.02)
    assert [round(float(group["lr"]), 4) for group in optimizer.param_groups] == [0.02, 0.1]
    assert [group["lr"].data_ptr() for group in optimizer.param_groups] == places
    assert len(set(places)) == 2


def test_a_state_from_before_there_were_shares_is_taken_over() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(OptimizerRecipe(lr=0.1), model)
    state = optimizer.state_dict()
    del state["param_groups"][0]["share"]
    load(optimizer, state)
    set_rate(optimizer, 0.03)
    assert optimizer.param_groups[0]["lr"] == 0.03


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("conv", "12."),
        ("lenet-300-100", "5."),
        ("wrn", "fc."),
        ("torchvision/resnet18", "fc."),
        ("torchvision/mobilenet_v3_small", "classifier.3."),
        ("torchvision/squeezenet1_1", "classifier.1."),
    ],
)
def test_the_head_is_the_last_layer(name: str, head: str) -> None:
    model = build(ModelRecipe(name, depth=10, width=1), 7, (3, 64, 64))
    own = {id(p) for p in head_of(model, 7)}
    assert {n for n, p in model.named_parameters() if id(p) in own} == {f"{head}weight", f"{head}bias"}


def test_a_network_without_a_head_says_so() -> None:
    with pytest.raises(ValueError, match=r"train.head_rate is for the last layer, and none here has 9 outputs"):
        head_of(nn.Sequential(nn.Linear(6, 5)), 9)


def test_a_rate_for_a_head_that_is_frozen_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    freeze_(model, ["1.weight"])
    optimizer_of(OptimizerRecipe(), model, head=head_of(model, 3), head_rate=0.5)
    freeze_(model, ["1.bias"])
    with pytest.raises(ValueError, match=r"train.head_rate has no effect where train.freeze holds the last layer"):
        optimizer_of(OptimizerRecipe(), model, head=head_of(model, 3), head_rate=0.5)


# -- mixing and RandAugment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_images_and_labels_are_mixed_alike(way: str) -> None:
    """Images that say their class: the share of each class in an image is that in its label."""
    y = torch.tensor([0, 1, 2, 3])
    x = torch.eye(4)[y].view(4, 4, 1, 1).expand(4, 4, 16, 16).contiguous()
    mixing = Mixing(TrainRecipe(**{way: 1.0}), classes=4, seed=0)
    for step in range(5):
        mixed, labels = mixing(x, y, epoch=1, step=step)
        torch.testing.assert_close(mixed.mean((2, 3)), labels, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(labels.sum(1), torch.ones(4))
    assert torch.equal(x, torch.eye(4)[y].view(4, 4, 1, 1).expand(4, 4, 16, 16))


def test_what_is_drawn_depends_on_seed_epoch_step_and_process_alone() -> None:
    """And torch's own generator, from which dropout draws, is left as it was."""
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    recipe = TrainRecipe(mixup=0.4, cutmix=1.0)
    state = torch.get_rng_state()
    first = Mixing(recipe, 3, seed=1)(x, y, 2, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = Mixing(recipe, 3, seed=1)(x, y, 2, 5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    others = [Mixing(recipe, 3, 2)(x, y, 2, 5), Mixing(recipe, 3, 1)(x, y, 3, 5), Mixing(recipe, 3, 1)(x, y, 2, 6)]
    others.append(Mixing(recipe, 3, 1, rank=1)(x, y, 2, 5))
    assert not any(torch.equal(first[0], other[0]) for other in others)


def test_of_two_ways_one_is_drawn_for_each_batch() -> None:
    """Cutmix leaves every pixel one of the two images'; mixup blends them."""
    x, y = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 16, 16), torch.arange(4)
    mixing = Mixing(TrainRecipe(mixup=1.0, cutmix=1.0), 4, seed=0)
    whole = [bool((mixing(x, y, 0, step)[0] % 1 == 0).all()) for step in range(40)]
    assert 8 < sum(whole) < 32
    assert Mixing(TrainRecipe(), 4, seed=0)(x, y, 0, 0)[1] is y


def test_hits_are_counted_by_the_larger_label() -> None:
    tally = Tally(CPU)
    tally.add(torch.tensor(1.0), torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.7, 0.3], [0.6, 0.4]]))
    assert (tally.read().correct, tally.read().images) == (1, 2)


def test_randaugment_changes_training_images_alone_and_the_same_way_each_time(tree: Path) -> None:
    plain, changed = (Folder(tree, image_size=8, workers=0, randaugment=magnitude) for magnitude in (0, 15))
    one, two, again = (joined(source.batches(1, batch=8, seed=0))[0] for source in (plain, changed, changed))
    assert torch.equal(two, again)
    assert not torch.equal(one, two)
    assert torch.equal(*(joined(source.test_batches(batch=8))[0] for source in (plain, changed)))


def test_randaugment_without_augmentation_is_refused() -> None:
    recipe = override(Recipe(), {"data.kind": "folder", "data.randaugment": 9, "data.augment": False})
    with pytest.raises(ValueError, match="data.randaugment has no effect with data.augment=false"):
        check(recipe)
    with pytest.raises(ValueError, match="data.randaugment=31 must be at least 0 and below 31"):
        check(override(recipe, {"data.randaugment": 31, "data.augment": True}))


def test_a_mixed_run_says_what_its_file_does(tree: Path, tmp_path: Path) -> None:
    """Test images are never mixed."""
    recipe = recipe_of(tree, {**OPTIONS["mixup"], "train.epochs": 1})
    train(recipe, tmp_path / "run", quiet=True)
    model = build(recipe.model, 2, (3, 8, 8)).eval()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    x, y = joined(Folder(tree, image_size=8, workers=0).test_batches(batch=8))
    with torch.no_grad():
        accuracy = 100 * float((model(x).argmax(1) == y).double().mean())
    assert result_of(tmp_path / "run")["accuracy"] == pytest.approx(accuracy)
