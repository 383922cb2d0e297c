"""What pruning adds to a training step, beside the alternatives a user would pick.

    python benchmarks/overhead.py                     # the model for this machine
    python benchmarks/overhead.py --models wrn-16-8 --rounds 10 --out results/overhead.json

Every round times a few steps of each variant in turn, so that a busy machine disturbs them alike; the table shows the
median over rounds and its ratio to the dense step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import pareback as pb
from wrn import WideResNet

SPARSITY = 0.9
Step = Callable[[], None]


def images(batch: int, size: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, size, size, device=device)
    return x.contiguous(memory_format=torch.channels_last), torch.randint(0, classes, (batch,), device=device)


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, Tensor, Tensor]]] = {
    "wrn-16-2": lambda device: (WideResNet(16, 2), *images(64, 32, 100, device)),
    "wrn-16-8": lambda device: (WideResNet(16, 8), *images(128, 32, 100, device)),
}


def pruned_tensors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000]


def dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return lambda: None


def exact_budget(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    pb.Pruner(model, optimizer, pb.Budget(sparsity=SPARSITY), ramp=0)
    return lambda: None


def fixed(bound: str) -> Callable[[nn.Module, torch.optim.Optimizer], Step]:
    def variant(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        pb.Pruner(model, optimizer, pb.Fixed(SPARSITY, bound))
        return lambda: None

    return variant


def parametrized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    pb.ParametrizedPruner(model, optimizer, pb.Budget(sparsity=SPARSITY), ramp=0)
    return lambda: None


def torch_prune(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """torch.nn.utils.prune with its masks recomputed after each step. It cannot view channels_last weights."""
    model.to(memory_format=torch.contiguous_format)
    places = [
        (m, "weight") for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.weight.numel() >= 1000
    ]

    def after() -> None:
        for module, name in places:
            if prune.is_pruned(module):
                prune.remove(module, name)
            prune.l1_unstructured(module, name, amount=SPARSITY)

    after()
    return after


def global_topk(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """One global magnitude bound from torch.topk, masks applied to the weights after each step."""
    tensors = pruned_tensors(model)
    keep = round((1 - SPARSITY) * sum(p.numel() for p in tensors))

    @torch.no_grad()
    def after() -> None:
        magnitudes = torch.cat([p.abs().flatten() for p in tensors])
        bound = magnitudes.topk(keep, sorted=False).values.min()
        for p in tensors:
            p.mul_(p.abs() >= bound)

    return after


VARIANTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Step]] = {
    "dense": dense,
    "pareback, exact budget": exact_budget,
    "pareback, fixed-GA": fixed("gaussian"),
    "pareback, fixed-BS": fixed("search"),
    "pareback, parametrized": parametrized,
    "torch.nn.utils.prune": torch_prune,
    "topk mask": global_topk,
}


def training_step(name: str, variant: str, device: torch.device) -> Step:
    """Return one training step of a model with a variant of pruning attached."""
    torch.manual_seed(0)
    model, x, y = MODELS[name](device)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    after = VARIANTS[variant](model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()

    return step


def timed(step: Step, repeats: int, device: torch.device) -> float:
    """Return the seconds one step takes."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, rounds: int, repeats: int, device: torch.device) -> list[dict[str, object]]:
    """Time all variants of a model in turn and return the rows of the table."""
    steps = {variant: training_step(name, variant, device) for variant in VARIANTS}
    for step in steps.values():
        timed(step, 2, device)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(rounds):
        for variant, step in steps.items():
            times[variant].append(timed(step, repeats, device))
    base = times["dense"]
    return [
        {
            "model": name,
            "variant": variant,
            "milliseconds": round(1e3 * statistics.median(found), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(found, base, strict=True)), 4),
        }
        for variant, found in times.items()
    ]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["wrn-16-8" if device.type == "cuda" else "wrn-16-2"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=1, help="steps per timing")
    parser.add_argument("--out", type=Path, help="where to write the table as JSON")
    options = parser.parse_args()
    rows = [row for name in options.models for row in measure(name, options.rounds, options.repeats, device)]
    print(f"{'model':<10}{'variant':<26}{'ms / step':>12}{'ratio to dense':>16}")
    for row in rows:
        print(f"{row['model']:<10}{row['variant']:<26}{row['milliseconds']:>12}{row['ratio']:>16}")
    if options.out is not None:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        about = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__}
        about |= {"python": platform.python_version(), "pareback": pb.__version__, "rounds": options.rounds}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
