"""A small network, data to train it on, processes to do it in, and what the contracts keep asking."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

#: The tensors of `network()` that are large enough to be pruned by default.
PRUNED = ["0.weight", "2.weight"]

Batch = tuple[Tensor, Tensor]


Loss = Callable[[Any, Any], Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def mlp(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return linear layers from width to width with ReLUs between them, as ``0``, ``2``, ``4`` and so on."""
    first, *others = linears(*widths, seed=seed, dtype=dtype)
    return nn.Sequential(first, *(module for layer in others for module in (nn.ReLU(), layer)))


def linears(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return linear layers from width to width with nothing between them."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(*ends) for ends in pairwise(widths))).to(dtype)


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a classifier of 20 features with two tensors to prune and a small head that stays dense."""
    return mlp(20, 64, 32, 4, seed=seed, dtype=dtype)


def noise(seed: int, *shape: int) -> Tensor:
    """Return normal numbers of their own seed, the same wherever training is taken up."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(count: int, seed: int = 1, size: int = 16, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Return batches of a task that can be learned: the class is the largest of four of the features."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, 20, generator=generator, dtype=dtype)
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def wide_batches(count: int, size: int, width: int) -> list[Batch]:
    """Return batches of which the class is the largest of all features."""
    return [(x, x.argmax(1)) for x in (noise(seed, size, width) for seed in range(count))]


def backward(model: nn.Module, batch: Batch, loss: Loss = F.cross_entropy) -> Tensor:
    """Back-propagate one batch's loss into fresh gradients."""
    model.zero_grad()
    found = loss(model(batch[0]), batch[1])
    found.backward()
    return found.detach()


def training(
    model: nn.Module, optimizers: Optimizers, data: Iterable[Batch], loss: Loss = F.cross_entropy
) -> Iterator[Tensor]:
    """Train with one optimizer, or with several one after the other; yield the loss after every step."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for batch in data:
        found = backward(model, batch, loss)
        for optimizer in optimizers:
            optimizer.step()
        yield found


def train(
    model: nn.Module, optimizers: Optimizers, data: Iterable[Batch], loss: Loss = F.cross_entropy
) -> list[Tensor]:
    """Do so to the end, and return the losses."""
    return list(training(model, optimizers, data, loss))


def nonzeros(model: nn.Module, names: Sequence[str] = PRUNED) -> list[int]:
    """Count the non-zeros of the named parameters."""
    return [int(model.get_parameter(name).count_nonzero()) for name in names]


def layer_nonzeros(model: nn.Sequential) -> list[int]:
    """Count the non-zeros of each layer's weight, in a model that has only such layers."""
    return [int(layer.weight.count_nonzero()) for layer in model]


def size(model: nn.Module) -> int:
    """Count all parameters."""
    return sum(p.numel() for p in model.parameters())


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights as they are now."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that two sets of tensors agree bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def in_two_processes(*parts: Callable[[int, str], Any]) -> dict[str, list[Any]]:
    """Run ``part(rank, folder)`` of each part in two gloo processes; return what they returned, by name and rank.

    Starting processes takes seconds, so everything one file has to show is done in one start. A part that fails does
    not keep the others from running; :func:`of` raises its error.
    """
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(2, *parts, folder=folder)


def in_processes(world: int, *parts: Callable[[int, str], Any], folder: str) -> dict[str, list[Any]]:
    """The same in any number of processes, in a folder that others may look into afterwards."""
    with tempfile.TemporaryDirectory() as own:
        mp.spawn(_process, (parts, folder, own, world), nprocs=world)
        ranks = [torch.load(f"{own}/{rank}.pt", weights_only=False) for rank in range(world)]
    return {part.__name__: [found[part.__name__] for found in ranks] for part in parts}


def of(runs: dict[str, list[Any]], part: Callable[[int, str], Any]) -> list[Any]:
    """Return what a part returned on each rank."""
    for found in runs[part.__name__]:
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
    return runs[part.__name__]


def _process(rank: int, parts: Sequence[Callable[[int, str], Any]], folder: str, own: str, world: int) -> None:
    torch.set_num_threads(1)
    where = f"file://{own}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found = {}
    for part in parts:
        try:
            found[part.__name__] = part(rank, folder)
        except Exception:
            found[part.__name__] = traceback.format_exc()
    torch.save(found, f"{own}/{rank}.pt")
    dist.destroy_process_group()
