"""What pruning adds to training, beside the alternatives a user would pick.

    python benchmarks/overhead.py training                       # the model for this machine
    python benchmarks/overhead.py training --models wrn-16-8 resnet-50 encoder --out results/overhead-h200.json
    python benchmarks/overhead.py scaling --weights 1M 10M 100M  # the optimizer's step alone, by number of weights

Every round times each variant in turn, so that a busy machine disturbs them alike. The tables show medians over rounds
and ratios within rounds. On a GPU the model is compiled, runs in bfloat16 and channels_last, and the whole step,
pruning included, is one CUDA graph; variants that no graph can capture are timed without one, against a dense step
without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import pareback as pb
from models import MODELS

SPARSITY = 0.9
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
Step = Callable[[], object]
Attach = Callable[[nn.Module, torch.optim.Optimizer], Step]


# -- the variants: each attaches pruning to a model and returns what is to run after the optimizer's step ------------


def dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return lambda: None


def pruner(goal: pb.Goal, mount: type = pb.Pruner) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        mount(model, optimizer, goal, ramp=0)
        return lambda: None

    return attach


def torch_prune(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """torch.nn.utils.prune with its masks recomputed after each step. It cannot view channels_last weights."""
    model.to(memory_format=torch.contiguous_format)
    layers = (nn.Conv2d, nn.Linear)
    places = [m for m in model.modules() if isinstance(m, layers) and m.weight.numel() >= 1000]

    def after() -> None:
        for module in places:
            if prune.is_pruned(module):
                prune.remove(module, "weight")
            prune.l1_unstructured(module, "weight", amount=SPARSITY)

    after()
    return after


def global_topk(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """One global magnitude bound from torch.topk; weights below it are zeroed after each step."""
    tensors = [p for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000]
    keep = round((1 - SPARSITY) * sum(p.numel() for p in tensors))

    @torch.no_grad()
    def after() -> None:
        magnitudes = torch.cat([p.abs().flatten() for p in tensors])
        bound = magnitudes.topk(keep, sorted=False).values.min()
        for p in tensors:
            p.mul_(p.abs() >= bound)

    return after


@dataclass(frozen=True)
class Variant:
    name: str
    attach: Attach
    captured: bool = True  #: whether its step can be part of a CUDA graph


VARIANTS = [
    Variant("dense", dense),
    Variant("pareback, exact budget", pruner(pb.Budget(sparsity=SPARSITY))),
    Variant("pareback, fixed-GA", pruner(pb.Fixed(SPARSITY, "gaussian"))),
    Variant("pareback, fixed-BS", pruner(pb.Fixed(SPARSITY))),
    Variant("topk mask", global_topk),
    Variant("dense, no graph", dense, captured=False),
    Variant("pareback, exact, no graph", pruner(pb.Budget(sparsity=SPARSITY)), captured=False),
    Variant("pareback, parametrized", pruner(pb.Budget(sparsity=SPARSITY), pb.ParametrizedPruner), captured=False),
    Variant("torch.nn.utils.prune", torch_prune, captured=False),
]
BASES = ("dense", "dense, no graph")


# -- timing ----------------------------------------------------------------------------------------------------------


def timed(step: Step, repeats: int) -> float:
    """Return the seconds one step takes."""
    if not GPU:
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - began) / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def captured(step: Step) -> Step:
    """Record a step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()

    def replay(keeps_alive: Step = step) -> None:  # what the graph works on
        graph.replay()

    return replay


def interleaved(steps: dict[str, Step], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Time every step in turn, round after round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step, repeats))
    return times


def ratio(times: list[float], base: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, base, strict=True)), 4)


# -- a whole training step -------------------------------------------------------------------------------------------


def training_step(name: str, variant: Variant) -> tuple[Step, dict[str, object]]:
    """Return one training step of a model with a variant of pruning attached, and what it keeps in memory."""
    torch.manual_seed(0)
    gc.collect()
    before = torch.cuda.memory_allocated() if GPU else 0
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    model, x, y = MODELS[name](DEVICE)
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000)
    model = model.to(DEVICE, memory_format=torch.channels_last)
    net = torch.compile(model) if GPU and variant.captured else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    after = variant.attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        after()

    for _ in range(3):
        step()
    run = captured(step) if GPU and variant.captured else step
    run()
    facts: dict[str, object] = {"model": name, "variant": variant.name, "pruned_weights": weights}
    if GPU:
        torch.cuda.synchronize()
        facts["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    return run, facts


def training(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every variant of every model."""
    rows = []
    for name in options.models:
        variants = [v for v in VARIANTS if GPU or not v.name.endswith("no graph")]
        made = {v.name: training_step(name, v) for v in variants}
        print(f"{name}: {len(made)} variants are ready, {options.rounds} rounds follow", flush=True)
        times = interleaved({key: step for key, (step, _) in made.items()}, options.rounds, options.repeats)
        for variant in variants:
            base = BASES[0] if variant.captured or not GPU else BASES[1]
            found = times[variant.name]
            extra = statistics.median(a - b for a, b in zip(found, times[base], strict=True))
            facts = made[variant.name][1]
            rows.append(
                {
                    **facts,
                    "milliseconds": round(1e3 * statistics.median(found), 3),
                    "ratio": ratio(found, times[base]),
                    "to": base,
                    "added_us_per_million": round(1e12 * extra / float(str(facts["pruned_weights"])), 2),
                }
            )
            print(rows[-1], flush=True)
        del made
    return rows


# -- the optimizer's step alone --------------------------------------------------------------------------------------


def weights_of(number: int, tensors: int) -> list[nn.Parameter]:
    """Return parameters with gradients, together ``number`` weights."""
    size = number // tensors
    parameters = [nn.Parameter(torch.randn(size // 64, 64, device=DEVICE) * 0.05) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    return parameters


def optimizer_step(number: int, tensors: int, goal: pb.Goal | None) -> Step:
    torch.manual_seed(0)
    parameters = weights_of(number, tensors)
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    if goal is not None:
        pb.Pruner(nn.ParameterList(parameters), optimizer, goal, ramp=0)
    for _ in range(3):
        optimizer.step()
    return captured(optimizer.step) if GPU else optimizer.step


GOALS: dict[str, pb.Goal | None] = {
    "SGD alone": None,
    "exact budget": pb.Budget(sparsity=SPARSITY),
    "fixed-GA": pb.Fixed(SPARSITY, "gaussian"),
    "fixed-BS": pb.Fixed(SPARSITY),
}


def scaling(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure how the cost of a step grows with the number of weights."""
    rows: list[dict[str, object]] = []
    for written in options.weights:
        number = round(float(written[:-1]) * {"M": 10**6, "G": 10**9}[written[-1]])
        for tensors in options.tensors:
            if number // tensors < 64_000 // 64:
                continue
            steps = {name: optimizer_step(number, tensors, goal) for name, goal in GOALS.items()}
            times = interleaved(steps, options.rounds, options.repeats)
            base = times["SGD alone"]
            for name, found in times.items():
                added = statistics.median(a - b for a, b in zip(found, base, strict=True))
                rows.append(
                    {
                        "weights": written,
                        "tensors": tensors,
                        "variant": name,
                        "milliseconds": round(1e3 * statistics.median(found), 4),
                        "pruner_over_sgd": round(ratio(found, base) - 1.0, 4),
                        "added_us_per_million": round(1e12 * added / number, 2),
                    }
                )
                print(rows[-1], flush=True)
            del steps
            gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["training", "scaling"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["wrn-16-8" if GPU else "wrn-16-2"])
    parser.add_argument("--weights", nargs="+", default=["1M", "10M"], help="such as 10M or 1G")
    parser.add_argument(
        "--tensors", nargs="+", type=int, default=[1, 300], help="over how many tensors they are spread"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20 if GPU else 1, help="steps per timing")
    parser.add_argument("--out", type=Path, help="where to write the table as JSON")
    options = parser.parse_args()
    if GPU:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.cuda.set_stream(torch.cuda.Stream())  # a graph cannot be captured on the default stream
    rows = {"training": training, "scaling": scaling}[options.part](options)
    if options.out is not None:
        machine = (
            torch.cuda.get_device_name() if GPU else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        )
        about = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__}
        about |= {"python": platform.python_version(), "pareback": pb.__version__, "rounds": options.rounds}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
