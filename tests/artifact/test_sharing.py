"""Tensors that share memory are stored once and share it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pruned_examples import same_state, sparse
from torch import Tensor, nn

from pareback.artifact import describe, load, save
from pareback.artifact.state import find_sharing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pare"


def back_and_forth(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    save(tensors, path)
    back = load(path)
    assert same_state(back, tensors)
    return back


class Tied(nn.Module):
    """A lookup whose table is also the last layer's weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(8, 50)
        self.table = nn.Embedding(50, 8)
        if tied:
            self.table.weight = self.head.weight


# ---------------------------------------------------------------- ties


def test_tied_weights(path: Path) -> None:
    """One copy in the file; a change of one is a change of the other; the order of names is kept."""
    back = back_and_forth(Tied().state_dict(), path)
    assert list(back) == ["head.weight", "head.bias", "table.weight"]
    back["head.weight"][0, 0] = 7.0
    assert back["table.weight"][0, 0] == 7.0
    assert describe(path).rows[2].stored == "same as 'head.weight'"


def test_tied_and_untied_models(path: Path) -> None:
    """A tied file fills both; an untied one fills a tied model only if it holds the same twice."""
    tied, untied = Tied(), Tied(tied=False)
    save(tied, path)
    load(path, untied)
    assert torch.equal(untied.table.weight, tied.head.weight)
    assert torch.equal(untied.head.weight, tied.head.weight)
    other = Tied()
    load(path, other)
    assert torch.equal(other.table.weight, tied.head.weight)
    save(untied, path)
    load(path, other)
    with torch.no_grad():
        untied.table.weight[3, 3] = 1.0
    save(untied, path)
    before = other.head.weight.clone()
    with pytest.raises(ValueError, match="'head.weight' and 'table.weight' are one tensor in the model and two diffe"):
        load(path, other)
    assert torch.equal(other.head.weight, before)


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_tie_in_channels_last(density: float, path: Path) -> None:
    """Any memory format can be tied."""
    image = sparse(8, 6, 5, 5, density=density).to(memory_format=torch.channels_last)
    back = back_and_forth({"a": image, "b": image}, path)
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert back["b"].is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_views_of_a_tensor_that_is_there(density: float, path: Path) -> None:
    """Rows, columns and the transposed share its memory, wherever they are in the order; ties of views too."""
    whole = sparse(60, 40, density=density)
    tensors = {"rows": whole[10:20], "whole": whole, "turned": whole.T, "column": whole[:, 3], "rows too": whole[10:20]}
    back = back_and_forth(tensors, path)
    back["whole"][12, 3] = 7.0
    assert back["rows"][2, 3] == back["turned"][3, 12] == back["column"][12] == back["rows too"][2, 3] == 7.0
    assert path.stat().st_size < whole.nbytes + 1200


def test_views_of_memory_that_no_tensor_covers(path: Path) -> None:
    """What no tensor shows is not in the file."""
    memory = torch.arange(1000.0) + 1
    back = back_and_forth({"a": memory[100:300], "b": memory[200:400], "c": memory[350:360]}, path)
    back["b"][0] = -1.0
    back["b"][150] = -2.0
    assert (back["a"][100], back["c"][0]) == (-1.0, -2.0)
    assert describe(path).rows[-1].shape == (300,)
    gap = torch.ones(100)
    back_and_forth({"even": gap[::2], "some": gap[:10:4]}, path)
    assert describe(path).rows[-1].nonzeros == 50


def test_views_of_other_types(path: Path) -> None:
    """The same bytes as numbers of two kinds, at places that only fit one of them."""
    memory = torch.arange(100.0)
    back = back_and_forth({"float": memory[3:40], "int": memory.view(torch.int16)[50:120]}, path)
    back["int"].zero_()
    assert back["float"].tolist() == [*range(3, 25)] + [0.0] * 15
    wide = memory.view(torch.float64)
    back = back_and_forth({"wide": wide[1:5], "narrow": memory[1:12], "tie": wide[1:5]}, path)
    assert back["wide"].data_ptr() == back["tie"].data_ptr()


def test_neighbours_are_not_shared(path: Path) -> None:
    """Tensors in one storage without a common element, as a flattened recurrent network has them."""
    memory = torch.randn(100, 10)
    tensors = {"left": memory[:, :5], "right": memory[:, 5:]}
    assert find_sharing(tensors, ":").shared == {}
    back = back_and_forth(tensors, path)
    assert back["left"].untyped_storage().data_ptr() != back["right"].untyped_storage().data_ptr()


def test_an_expanded_tensor_is_stored_for_itself(path: Path) -> None:
    """Many elements at one place cannot be a view of a file."""
    one = torch.ones(3)
    back = back_and_forth({"one": one, "many": one.expand(4, 3)}, path)
    assert back["many"].is_contiguous()


def test_empty_tensors_share_nothing(path: Path) -> None:
    """There is no memory that they could share."""
    none = torch.empty(0, 3)
    assert find_sharing({"a": none, "b": none}, ":").shared == {}
    back_and_forth({"a": none, "b": none}, path)


def test_a_model_of_views_is_filled(path: Path) -> None:
    """Also one whose tensors do not share memory."""

    def model(shared: bool) -> nn.Module:
        made = nn.Module()
        made.register_buffer("all", torch.randn(30, 4))
        made.register_buffer("part", made.all[5:10] if shared else torch.zeros(5, 4))
        return made

    saved, one, other = model(True), model(True), model(False)
    save(saved, path)
    for filled in (one, other):
        load(path, filled)
        assert same_state(filled.state_dict(), saved.state_dict())
    assert one.part.data_ptr() == one.all[5].data_ptr()


def test_half_precision_of_shared_memory(path: Path) -> None:
    """Rounded once, still shared."""
    whole = sparse(60, 40, density=0.1)
    save({"whole": whole, "part": whole[3:9]}, path, values="bfloat16")
    back = load(path)
    assert torch.equal(back["whole"], whole.bfloat16().float())
    assert back["part"].data_ptr() == back["whole"][3].data_ptr()
