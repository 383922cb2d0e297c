"""Weights from files: every common form, other classifiers, and files that do not fit."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import same_state
from safetensors.torch import save_file
from torch import Tensor, nn

import pareback as pb
from pareback.lab.models.pretrained import load_weights_, read_weights


def network(classes: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, classes))


STATE = network().state_dict()


# ---------------------------------------------------------------- reading


SAVES: dict[str, Callable[..., Any]] = {
    "a.pt": torch.save,
    "a.pth": torch.save,
    "a.safetensors": save_file,
    "a.pare": pb.save,
    "model.safetensors": save_file,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_state_dict_is_read_as_it_was_saved(tmp_path: Path, name: str) -> None:
    """And the model of a run by the name of its folder."""
    SAVES[name](STATE, tmp_path / name)
    if name == "model.safetensors":
        name = ""
    weights = read_weights(tmp_path / name)
    assert weights.keys() == STATE.keys()
    assert all(torch.equal(weights[key], STATE[key]) for key in STATE)


@pytest.mark.parametrize("place", ["model", "state_dict", "model_state_dict"])
def test_a_checkpoint_is_searched_for_the_weights(tmp_path: Path, place: str) -> None:
    torch.save({"epoch": 3, place: STATE}, tmp_path / "a.pt")
    assert same_state(read_weights(tmp_path / "a.pt"), STATE)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "0."])
def test_wrappers_names_are_taken_away(tmp_path: Path, prefix: str) -> None:
    """Those of DistributedDataParallel, torch.compile, Lightning and any other module around the network."""
    torch.save({f"{prefix}{name}": value for name, value in STATE.items()}, tmp_path / "a.pt")
    model = network(seed=1)
    load_weights_(model, read_weights(tmp_path / "a.pt"), 4, "a.pt")
    assert same_state(model.state_dict(), STATE)


def test_a_network_whose_own_names_begin_like_a_wrapper_s_keeps_them(tmp_path: Path) -> None:
    """As one that holds its layers under self.module does."""
    own, other = (nn.Sequential(OrderedDict(module=network(seed=seed))) for seed in (0, 1))
    torch.save(own.state_dict(), tmp_path / "a.pt")
    load_weights_(other, read_weights(tmp_path / "a.pt"), 4, "a.pt")
    assert same_state(other.state_dict(), own.state_dict())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no .*a.pt'. Give a run's folder, a .pare, .safet"):
        read_weights(tmp_path / "a.pt")


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch()
    with pytest.raises(ValueError, match="a.onnx' is not a state dict"):
        read_weights(tmp_path / "a.onnx")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.pare"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_truncated_file_is_called_damaged(tmp_path: Path, name: str, kept: float) -> None:
    SAVES[name](STATE, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=name):
        read_weights(tmp_path / name)


def test_whole_models_are_refused_because_their_code_would_run(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is not a state dict that torch.load\\(weights_only=True\\) reads"):
        read_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [torch.zeros(3), {}, {"epoch": 3}, [STATE]])
def test_files_without_a_state_dict_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="(holds no weights by name|is not a state dict).*Save model.state_dict"):
        read_weights(tmp_path / "a.pt")


# ---------------------------------------------------------------- loading


def test_all_weights_are_copied_and_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = network(seed=1)
    load_weights_(model, STATE, 4, "a.pt")
    assert same_state(model.state_dict(), STATE)
    assert not caplog.records


@pytest.mark.parametrize("classes", [2, 9])
def test_a_classifier_of_another_size_stays_fresh_with_a_note(classes: int, caplog: pytest.LogCaptureFixture) -> None:
    model = network(classes, seed=1)
    fresh = copy.deepcopy(model[3].state_dict())
    with caplog.at_level(logging.INFO):
        load_weights_(model, STATE, classes, "a.pt")
    assert same_state(model[3].state_dict(), fresh)
    assert torch.equal(model[0].weight, STATE["0.weight"])
    assert caplog.messages == [f"a.pt is of 4 classes, and these are {classes}: '3.weight', '3.bias' begin anew."]


def test_a_head_that_is_not_there_begins_anew_where_a_training_starts(caplog: pytest.LogCaptureFixture) -> None:
    """As in the weights of a backbone; a run's own network has to be whole."""
    weights = {name: value for name, value in STATE.items() if not name.startswith("3.")}
    model = network(seed=1)
    fresh = copy.deepcopy(model[3].state_dict())
    with pytest.raises(ValueError, match=r"it lacks '3\.weight', '3\.bias'"):
        load_weights_(model, weights, 4, "a.pt")
    load_weights_(model, weights, 4, "a.pt", may_lack_head=True)
    assert same_state(model[3].state_dict(), fresh)
    assert torch.equal(model[0].weight, STATE["0.weight"])
    assert caplog.messages == ["a.pt has no head: '3.weight', '3.bias' begin anew."]
    weights.pop("0.weight")
    with pytest.raises(ValueError, match=r"it lacks '0\.weight', '3\.weight', '3\.bias'"):
        load_weights_(model, weights, 4, "a.pt", may_lack_head=True)


def test_old_files_without_the_norms_counters_are_taken() -> None:
    weights = {name: value for name, value in STATE.items() if not name.endswith("num_batches_tracked")}
    model = network(seed=1)
    load_weights_(model, weights, 4, "a.pt")
    assert same_state(model.state_dict(), STATE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"0.weight": None, "1.bias": None},
            "a.pt does not fit the model: it lacks '0.weight', '1.bias'; give weights",
        ),
        (
            {"5.weight": torch.zeros(3)},
            "it also has '5.weight'; give weights saved from the same model, or their model.name",
        ),
        ({"0.weight": torch.zeros(6, 3, 3, 3)}, "it has other shapes of '0.weight';"),
        ({"3.weight": torch.zeros(9, 6)}, "it has other shapes of '3.weight';"),
        ({"0.bias": None, "x": torch.zeros(3)}, "it lacks '0.bias' and also has 'x';"),
    ],
)
def test_weights_of_another_network_are_refused_and_nothing_is_changed(
    change: dict[str, Tensor | None], says: str
) -> None:
    model = network(seed=1)
    before = copy.deepcopy(model.state_dict())
    weights = {name: value for name, value in {**STATE, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=says):
        load_weights_(model, weights, 4, "a.pt")
    assert same_state(model.state_dict(), before)
