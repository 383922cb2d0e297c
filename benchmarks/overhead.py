"""What pruning adds to training, beside the alternatives a user would pick.

    python benchmarks/overhead.py training                       # the model for this machine
    python benchmarks/overhead.py training --models wrn-16-8 resnet-50 encoder --out results/overhead-h200.json
    python benchmarks/overhead.py scaling --weights 1M 10M 100M  # the optimizer's step alone, by number of weights
    python benchmarks/overhead.py profile                        # its kernels on a GPU, beside what memory allows
    python benchmarks/overhead.py host                           # without a CUDA graph, where the host counts: host.py

Every round times each variant in turn, so that a busy machine disturbs them alike. The tables show medians over rounds
and ratios within rounds. On a GPU the model is compiled, runs in bfloat16 and channels_last, and the whole step,
pruning included, is one CUDA graph, beside a graph of the dense step of the same model; the row "dense" has two such
graphs that do the same and shows the error. Variants that no graph can capture are timed without one, against a dense
step without one.
"""

from __future__ import annotations

import argparse
import functools
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
SEED = 0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
Step = Callable[[], object]
Attach = Callable[[nn.Module, torch.optim.Optimizer], Step]
Row = dict[str, object]


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


# -- timing ----------------------------------------------------------------------------------------------------------


def timed(step: Step, repeats: int) -> float:
    """Return the seconds one step takes."""
    if not GPU:
        return host_seconds(step, repeats)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def host_seconds(step: Step, repeats: int) -> float:
    """Return the seconds that one step takes of the host: a GPU is idle at first, and is not waited for at the end."""
    if GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - began) / repeats


@functools.cache
def graph_memory() -> tuple[object, object]:
    """Return the memory that all graphs share, and a graph that keeps it.

    Each graph writes before it reads, so they do not disturb each other.
    """
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        torch.ones(1, device=DEVICE)
    return pool, graph


def captured(step: Step) -> Step:
    """Record a step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=graph_memory()[0], stream=torch.cuda.current_stream()):
        step()

    def replay(keeps_alive: Step = step) -> None:  # what the graph works on
        graph.replay()

    return replay


def interleaved(
    steps: dict[str, Step], rounds: int, repeats: int, clock: Callable[[Step, int], float] = timed
) -> dict[str, list[float]]:
    """Time every step in turn, round after round.

    Rounds start at different steps, and a step runs untimed first: a processor near its power limit is slower after
    hard work than after easy work.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if GPU:
                clock(steps[name], repeats)
            times[name].append(clock(steps[name], repeats))
    return times


def ratio(times: list[float], base: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(times, base, strict=True)), 4)


# -- a whole training step -------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A variant that is ready to run."""

    step: Step
    facts: dict[str, object]
    base: Step | None = None  #: the dense step of the very same model, as a graph of its own


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take one step of training, in bfloat16 on a GPU."""
    optimizer.zero_grad()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
        loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()


def training_step(name: str, variant: Variant) -> Made:
    """Return one training step of a model with a variant of pruning attached, and what it keeps in memory."""
    torch.manual_seed(SEED)
    gc.collect()
    before = torch.cuda.memory_allocated() if GPU else 0
    model, x, y = MODELS[name](DEVICE)
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000)
    model = model.to(DEVICE, memory_format=torch.channels_last)
    in_graph = GPU and variant.captured
    net = torch.compile(model) if in_graph else model

    def ready(optimizer: torch.optim.Optimizer, after: Step) -> Step:
        def step() -> None:
            trained(net, optimizer, x, y)
            after()

        for _ in range(3):
            step()
        run = captured(step) if in_graph else step
        run()
        return run

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=5e-4, fused=True)

    # Two copies of one model differ by up to a tenth in speed on a GPU, so each variant brings its own dense step.
    base_optimizer = sgd()
    base = ready(base_optimizer, lambda: None) if in_graph else None
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before += 4 * sum(p.numel() for p in model.parameters()) if base is not None else 0  # the base's momentum
    optimizer = sgd()
    step = ready(optimizer, variant.attach(model, optimizer))
    facts: dict[str, object] = {"model": name, "variant": variant.name, "pruned_weights": weights}
    if GPU:
        torch.cuda.synchronize()
        facts["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    return Made(step, facts, base)


def training(options: argparse.Namespace) -> list[Row]:
    """Measure every variant of every model."""
    rows = []
    for name in options.models:
        torch._dynamo.reset()  # the compiler gives up on code it has compiled eight times
        variants = [v for v in VARIANTS if GPU or not v.name.endswith("no graph")]
        training_step(name, VARIANTS[0])  # what is set up once, such as cuDNN's choices, belongs to no variant
        made = {v.name: training_step(name, v) for v in variants}
        print(f"{name}: {len(made)} variants are ready, {options.rounds} rounds follow", flush=True)
        steps: dict[str, Step] = {}
        for key, one in made.items():
            if one.base is not None:
                steps[f"dense, the same model as {key}"] = one.base
            steps[key] = one.step
        times = interleaved(steps, options.rounds, options.repeats)
        for variant in variants:
            own = f"dense, the same model as {variant.name}"
            base = own if own in times else "dense, no graph" if GPU else "dense"
            found = times[variant.name]
            extra = statistics.median(a - b for a, b in zip(found, times[base], strict=True))
            facts = made[variant.name].facts
            rows.append(
                {
                    **facts,
                    "milliseconds": round(1e3 * statistics.median(found), 3),
                    "dense_milliseconds": round(1e3 * statistics.median(times[base]), 3),
                    "ratio": ratio(found, times[base]),
                    "added_us_per_million": round(1e12 * extra / float(str(facts["pruned_weights"])), 2),
                }
            )
            print(rows[-1], flush=True)
        del made, steps
    return rows


# -- the optimizer's step alone --------------------------------------------------------------------------------------


def normal_weights(tensors: int, shape: tuple[int, int], device: torch.device) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    parameters = [nn.Parameter(torch.randn(shape, device=device) * 0.05) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    return parameters


def weights_of(number: int, tensors: int) -> list[nn.Parameter]:
    """Return parameters with gradients, together ``number`` weights."""
    return normal_weights(tensors, (number // tensors // 64, 64), DEVICE)


def number_of(written: str) -> int:
    """Return the number that is written as 10M or 1G."""
    return round(float(written[:-1]) * {"M": 10**6, "G": 10**9}[written[-1]])


def optimizer_step(number: int, tensors: int, goal: pb.Goal | None) -> Step:
    torch.manual_seed(SEED)
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


def scaling(options: argparse.Namespace) -> list[Row]:
    """Measure how the cost of a step grows with the number of weights."""
    rows: list[Row] = []
    for written in options.weights:
        number = number_of(written)
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


# -- where the time of a step goes -----------------------------------------------------------------------------------


def bandwidth() -> float:
    """Return the bytes per second that a plain copy moves, read and written."""
    one, other = torch.empty(2, 2**26, device=DEVICE).unbind()
    step = captured(lambda: other.copy_(one))
    step()
    return 2 * 4 * 2**26 / statistics.median(timed(step, 20) for _ in range(9))


def profile(options: argparse.Namespace) -> list[Row]:
    """List the kernels that pruning adds to the optimizer's step of a model, on a GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    if not GPU:
        raise SystemExit("A profile of kernels needs a GPU.")
    speed = bandwidth()
    rows: list[Row] = [{"copy_terabytes_per_second": round(speed / 1e12, 3)}]
    model = MODELS[options.models[0]](DEVICE)[0]
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000)
    floor = {"bytes_per_weight": 20, "floor_us": round(20 * weights / speed * 1e6, 1)}
    rows.append({"model": options.models[0], "pruned_weights": weights, **floor})
    for name, goal in GOALS.items():
        torch.manual_seed(SEED)
        model = MODELS[options.models[0]](DEVICE)[0].to(DEVICE, memory_format=torch.channels_last)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-4
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1e-3).to(DEVICE), momentum=0.9, fused=True)
        if goal is not None:
            pb.Pruner(model, optimizer, goal, ramp=0)
        for _ in range(3):
            optimizer.step()
        with profiled(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                optimizer.step()
            torch.cuda.synchronize()
        kernels = {e.key[:80]: round(e.device_time_total / 10, 2) for e in found.key_averages() if e.device_time_total}
        captured_us = 1e6 * statistics.median(timed(captured(optimizer.step), options.repeats) for _ in range(9))
        rows.append({"variant": name, "captured_us": round(captured_us, 1), "kernels_us": kernels})
        print(rows[-1], flush=True)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="part", required=True)

    def mode(name: str, measure: Callable[[argparse.Namespace], list[Row]], repeats: int) -> Callable[..., object]:
        one = modes.add_parser(name, description=measure.__doc__)
        one.set_defaults(measure=measure)
        one.add_argument("--rounds", type=int, default=9)
        one.add_argument("--repeats", type=int, default=repeats, help="steps per timing (%(default)s)")
        one.add_argument("--out", type=Path, help="where to write the table as JSON")
        return one.add_argument

    for name, measure in {"training": training, "profile": profile}.items():
        add = mode(name, measure, 20 if GPU else 1)
        add("--models", nargs="+", choices=MODELS, default=["wrn-16-8" if GPU else "wrn-16-2"])
    add = mode("scaling", scaling, 20 if GPU else 1)
    add("--weights", nargs="+", default=["1M", "10M"], help="such as 10M or 1G")
    add("--tensors", nargs="+", type=int, default=[1, 300], help="over how many tensors they are spread")
    import host  # here, since it imports this file

    host.add_options(mode("host", host.host, 20))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if GPU:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.cuda.set_stream(torch.cuda.Stream())  # a graph cannot be captured on the default stream
    rows = options.measure(options)
    if options.out is not None:
        processor = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        machine = f"{torch.cuda.get_device_name()}, {processor}" if GPU else processor
        about: Row = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__}
        about |= {"python": platform.python_version(), "pareback": pb.__version__, "rounds": options.rounds}
        about |= {"repeats": options.repeats, "seed": SEED}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
