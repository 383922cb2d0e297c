"""Attention packs three weights into one tensor and has a fast path of its own; both work on pruned weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT, assert_mounts_agree
from networks import noise, train
from optimizers import sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pareback as pb

GOAL = pb.Budget(sparsity=0.8)
FAST_PATHS = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")


class SelfAttention(nn.Module):
    """One attention layer over its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def attention() -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention()


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=48, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


MODELS = pytest.mark.parametrize("build", [attention, encoder])


def sequences(seed: int) -> Tensor:
    return noise(seed, 4, 6, 32)


def learn_to_shift(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model.train()
    torch.manual_seed(1)  # for dropout
    train(model, optimizer, [(x, x.roll(1, 1)) for x in map(sequences, range(steps))], F.mse_loss)


def start(model: nn.Module, mount: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = sgd(model, lr=0.1)
    return optimizer, mount(model, optimizer, GOAL, total_steps=steps)


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def fast(self) -> bool:
        return any(name in self.names for name in FAST_PATHS)


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def outputs(model: nn.Module, x: Tensor, fast: bool, **options: Any) -> Tensor:
    """Evaluate on the path that is asked for, and make sure that it was taken."""
    model.eval()
    with fast_path(fast), torch.no_grad(), Operators() as seen:
        result = model(x, **options)
    assert seen.fast == fast
    return result


def packed(model: nn.Module) -> list[Tensor]:
    layers = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    return [layer.in_proj_weight.detach() for layer in layers]


@MODELS
@EITHER_MOUNT
def test_the_packed_projection_is_pruned_and_the_budget_is_exact(build: Any, mount: Any) -> None:
    """The one tensor that holds queries, keys and values is selected, sparse in training and exact at the end."""
    model = build()
    optimizer, pruner = start(model, mount, 20)
    learn_to_shift(model, optimizer, 20)
    assert all(0.5 < float((weight == 0).float().mean()) < 1.0 for weight in packed(model))
    report = pruner.finish()
    sizes = [p.numel() for p in model.parameters() if p.ndim > 1]
    assert report.pruned_params == sum(sizes)
    assert report.pruned_nonzeros == sum(sizes) // 5
    assert {type(m) for m in model.modules()} == {type(m) for m in build().modules()}
    assert list(model.state_dict()) == list(build().state_dict())


@MODELS
@EITHER_MOUNT
def test_the_fast_path_computes_with_the_pruned_weights(build: Any, mount: Any) -> None:
    """In evaluation the fused path is still taken, during training and after it, and agrees with the ordinary one."""
    model, x = build(), sequences(99)
    optimizer, pruner = start(model, mount, 20)
    learn_to_shift(model, optimizer, 10)
    torch.testing.assert_close(outputs(model, x, True), outputs(model, x, False), rtol=1e-5, atol=1e-5)
    learn_to_shift(model, optimizer, 10)
    during = outputs(model, x, True)
    torch.testing.assert_close(during, outputs(model, x, False), rtol=1e-5, atol=1e-5)
    pruner.finish()
    torch.testing.assert_close(outputs(model, x, True), outputs(model, x, False), rtol=1e-5, atol=1e-5)

    plain = build()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(outputs(model, x, True), outputs(plain, x, True))
    assert torch.equal(outputs(model, x, False), outputs(plain, x, False))


# The fast path packs padded batches into nested tensors, which warn of themselves.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@EITHER_MOUNT
def test_padded_batches_take_the_fast_path_too(mount: Any) -> None:
    """With a padding mask the encoder works on nested tensors; what is not padding agrees with the ordinary path."""
    model, x = encoder(), sequences(99)
    optimizer, _ = start(model, mount, 10)
    learn_to_shift(model, optimizer, 8)
    padding = torch.arange(6) >= torch.tensor([6, 4, 3, 5])[:, None]
    fast = outputs(model, x, True, src_key_padding_mask=padding)
    slow = outputs(model, x, False, src_key_padding_mask=padding)
    torch.testing.assert_close(fast[~padding], slow[~padding], rtol=1e-5, atol=1e-5)


@MODELS
def test_both_mounts_agree(build: Any) -> None:
    """After 50 steps, dropout included, the two mounts have the same weights to the last bit, on either path."""

    def run(mount: Any) -> list[Tensor]:
        model, x = build(), sequences(99)
        optimizer, pruner = start(model, mount, 50)
        learn_to_shift(model, optimizer, 50)
        during = [*packed(model), outputs(model, x, True), outputs(model, x, False), pruner.r()]
        during = [value.clone() for value in during]
        pruner.finish()
        return [*during, *model.state_dict().values()]

    assert_mounts_agree(run)


@EITHER_MOUNT
def test_separate_projections_are_pruned_each(mount: Any) -> None:
    """With other key and value sizes the layer has three weights instead of a packed one."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, kdim=40, vdim=48, batch_first=True)
    optimizer, pruner = start(layer, mount, 5)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 5, size, generator=draw) for size in (32, 40, 48))
    for _ in range(5):
        optimizer.zero_grad()
        layer(query, key, value)[0].square().mean().backward()
        optimizer.step()
    assert pruner.finish().pruned_nonzeros == 32 * (32 + 40 + 48 + 32) // 5
    assert all(bool((w == 0).any()) for w in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight))
    assert layer.in_proj_weight is None
