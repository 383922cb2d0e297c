"""PEFT: adapters on a pruned base are merged into it without filling its zeros."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import PRUNED, batches, copied, network, nonzeros, train
from torch import nn

import pareback as pb

peft = pytest.importorskip("peft")

from pareback.integrations.peft import merge_and_unload  # noqa: E402

KEPT = 665


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(torch|peft)")
        yield


def adapted(pruned: bool = True) -> tuple[nn.Module, Any]:
    """A base, pruned in one shot, with trained adapters on both of its large layers."""
    base = network()
    if pruned:
        pb.prune_(base, pb.Budget(sparsity=0.8))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.AdamW(trained, lr=1e-2), batches(5))
    return base, model


def test_peft_itself_fills_the_zeros() -> None:
    """What ours is for."""
    _, model = adapted()
    assert sum(nonzeros(model.merge_and_unload())) > 3 * KEPT


@pytest.mark.parametrize("options", [{}, {"safe_merge": True}], ids=str)
def test_zeros_stay_zeros(options: dict[str, Any]) -> None:
    """And every other weight is what PEFT makes of it."""
    _, model = adapted()
    plain = copied(adapted()[1].merge_and_unload())
    before = {name: model.get_parameter(f"base_model.model.{name[0]}.base_layer.weight") == 0 for name in PRUNED}
    merged = merge_and_unload(model, **options)
    assert sum(nonzeros(merged)) == KEPT
    for name, zeros in before.items():
        weight = merged.get_parameter(name)
        assert torch.equal(weight == 0, zeros)
        assert torch.equal(weight[~zeros], plain[name][~zeros])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: network(), "Give what peft.get_peft_model returned"),
        (lambda: adapted(pruned=False)[1], "no zeros to keep. Use its own merge_and_unload"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(pb.UserError, match=words):
        merge_and_unload(make())


def test_pruning_adapters_alone_is_warned_of() -> None:
    """The base is frozen, so that nothing else is chosen by default; whoever names them means it."""
    _, model = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"min_size": 1}
    with pytest.warns(UserWarning, match="Everything that would be pruned is an adapter"):
        pb.Pruner(model, torch.optim.AdamW(trained), pb.Budget(sparsity=0.5), 10, **options).detach()
    pb.Pruner(model, torch.optim.AdamW(trained), pb.Budget(sparsity=0.5), 10, include="*lora_*")


def test_adapters_that_are_merged_already_are_refused() -> None:
    """For fast evaluation, say: the zeros are filled then, and the model came back dense in silence."""
    _, model = adapted()
    model.merge_adapter()
    with pytest.raises(pb.UserError, match=r"are merged already.* Call model.unmerge_adapter\(\) first"):
        merge_and_unload(model)
    model.unmerge_adapter()
    assert sum(nonzeros(merge_and_unload(model))) == KEPT
