"""A step moves pointers, not weights: parameters keep their memory, and what replaces it meanwhile is not lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
import torch
from torch import Tensor, nn

import pareback as pb


class _Assigning(torch.optim.SGD):
    """An optimizer that gives parameters new memory instead of writing to theirs, as hand-written ones do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data.add(p.grad, alpha=-group["lr"])
        return None


def _trained(kind: type[torch.optim.SGD], steps: int = 12) -> tuple[nn.Linear, pb.Pruner]:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    optimizer = kind(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model, pruner


def _stepped(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()


def test_a_parameter_keeps_its_memory() -> None:
    """Views of a weight, and graphs captured on it, stay valid through steps, latents() and finish()."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    address, view = model.weight.data_ptr(), model.weight.detach().view(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9))
    for _ in range(3):
        _stepped(model, optimizer)
    with pruner.latents():
        assert model.weight.data_ptr() != address
    pruner.finish()
    assert model.weight.data_ptr() == address
    assert int(view.count_nonzero()) == int(model.weight.count_nonzero()) == 204


def test_optimizers_may_assign_to_data() -> None:
    """The same weights, bit for bit, as from an optimizer that writes in place."""
    (one, _), (other, _) = _trained(torch.optim.SGD), _trained(_Assigning)
    assert torch.equal(one.weight, other.weight)


def test_a_backward_pass_after_the_step_is_still_refused() -> None:
    """Autograd notices that weights it saved have changed, as with any optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pb.Pruner(model, optimizer, pb.Fixed(0.9))
    loss = model(torch.ones(4, 64)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_cast_while_a_step_was_cut_short() -> None:
    """The step raised, the latents stood in the model, and bfloat16() gave it new memory: the move is kept."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
            super().step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            raise KeyError("after the weights moved")

    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    optimizer = Failing(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9))
    with pytest.raises(KeyError):
        _stepped(model, optimizer)
    latent = pruner.latent_tensors()["weight"].clone()
    model.bfloat16()
    assert pruner.counts() == pytest.approx([205], abs=5)
    assert model.weight.dtype == torch.bfloat16
    with pruner.latents():
        assert torch.equal(model.weight, latent.bfloat16())


def test_latents_take_one_copy() -> None:
    """Beside the model and its optimizer there is one tensor of the weights' size, and no mask."""
    model, pruner = _trained(torch.optim.SGD, 2)
    found: list[Tensor] = []
    seen: set[int] = set()
    stack: list[object] = [pruner]
    while stack:  # everything that can be reached from the pruner, but for classes and modules
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(thing))
        if issubclass(type(thing), Tensor):
            found.append(thing)  # type: ignore[arg-type]
        else:
            stack.extend(gc.get_referents(thing))
    large = {t.data_ptr(): t for t in found if t.numel() == model.weight.numel()}
    del large[model.weight.data_ptr()]
    (latent,) = large.values()
    assert latent.data_ptr() == pruner.latent_tensors()["weight"].data_ptr()
    assert latent.dtype == model.weight.dtype
