"""What pruning adds to an ordinary training loop, which no CUDA graph captures: the time of the host counts there.

    python benchmarks/overhead.py host                                   # on a GPU the models, otherwise the rest
    python benchmarks/overhead.py host --parts step lenet --rounds 15 --out host.json
    python benchmarks/overhead.py host --parts many --counts 1250 5000   # and not 20,000 tensors
    python benchmarks/overhead.py host --parts memory --weights 10M
    python benchmarks/overhead.py host --parts models --models wrn-16-8  # needs a GPU

Parts other than "models" are measured on the CPU whatever the machine has. Rows have the column "aim" where there is
one: what "pruner_over_sgd" or "ratio" is to be at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import nn

import pareback as pb
from models import MODELS
from overhead import (
    DEVICE,
    GOALS,
    GPU,
    SEED,
    SPARSITY,
    Row,
    Step,
    host_seconds,
    interleaved,
    normal_weights,
    number_of,
    ratio,
    timed,
    trained,
)
from pareback.pruning.options import active
from pareback.pruning.watch import leave_optimizers_alone, watch_all_optimizers

CPU = torch.device("cpu")
BUDGET = pb.Budget(sparsity=SPARSITY)
#: Steps in a row when only the host is timed: more could fill the queue of the GPU, and the host would wait for it.
HANDFUL = 5
#: Rounds for thousands of tensors, at most: their constructor is no matter of microseconds.
FEW = 3
#: A 5 written here sets the peak of this process back to what it has.
RESET = Path("/proc/self/clear_refs")
#: Over how many tensors the weights of the part memory are spread.
SPREADS = (1, 16)
STEP_AIMS = {15: 2.0, 300: 1.0}
LENET_AIM = 1.3
MODEL_AIMS = {"wrn-16-8": 1.05, "resnet-50": 1.01, "encoder": 1.01}


# -- what Python does during a step ----------------------------------------------------------------------------------


def traffic(step: Step) -> dict[str, int]:
    """Count the Python functions that a step calls, and how it moves between the files of the package.

    Both a call into another file and the return from it are changes. Functions of PyTorch in between are none: they
    are counted as calls and belong to no file of the package.
    """
    package = str(Path(pb.__file__).parent) + os.sep
    calls = changes = 0
    entered: set[str] = set()
    current = ""

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, changes, current
        if event == "call":
            calls += 1
            here = frame.f_code.co_filename
        elif event == "return" and frame.f_back is not None:
            here = frame.f_back.f_code.co_filename
        else:
            return
        if here != current and here.startswith(package):
            changes += current != ""
            current = here
            entered.add(here)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(before)
    return {"python_calls": calls, "package_files": len(entered), "file_changes": changes}


def usual_traffic(step: Step) -> Row:
    """Count a handful of steps and return the middle one: fixed-BS looks at more tensors in some than in others."""
    found = sorted((traffic(step) for _ in range(HANDFUL)), key=lambda counts: counts["python_calls"])
    return {**found[HANDFUL // 2]}


def microseconds(times: Iterable[float]) -> float:
    return round(1e6 * statistics.median(times), 1)


def differences(times: list[float], base: list[float]) -> list[float]:
    return [a - b for a, b in zip(times, base, strict=True)]


@contextmanager
def unwatched() -> Iterator[None]:
    """Let dense optimizers step as if there were no pruner: it looks at all, and would follow its tensors to others."""
    pruners = list(active)
    active.clear()
    leave_optimizers_alone()
    yield
    active.update(pruners)
    watch_all_optimizers()


#: The variants that nothing prunes.
DENSE = ("SGD alone", "dense", "dense again")


def compared(
    steps: dict[str, Step], rounds: int, repeats: int, clock: Callable[[Step, int], float]
) -> dict[str, list[float]]:
    """Time steps in turn, the dense ones without a pruner in sight."""
    plain = {id(step) for name, step in steps.items() if name in DENSE}

    def timer(step: Step, repeats: int) -> float:
        with unwatched() if id(step) in plain else nullcontext():
            return clock(step, repeats)

    return interleaved(steps, rounds, repeats, timer)


def counted(name: str, step: Step) -> Row:
    with unwatched() if name in DENSE else nullcontext():
        return usual_traffic(step)


# -- the optimizer's step --------------------------------------------------------------------------------------------


def pruned_sgd(tensors: int, goal: pb.Goal | None) -> torch.optim.Optimizer:
    """Return an optimizer of matrices with fixed gradients, to which pruning is attached if there is a goal."""
    torch.manual_seed(SEED)
    parameters = normal_weights(tensors, (40, 40), CPU)
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True)
    if goal is not None:
        pb.Pruner(nn.ParameterList(parameters), optimizer, goal, ramp=0)
    for _ in range(3):
        optimizer.step()
    return optimizer


def step_part(options: argparse.Namespace) -> list[Row]:
    """Measure the pruner's part of an optimizer's step on small tensors, as a multiple of SGD's own."""
    rows: list[Row] = []
    for tensors in map(int, several(options.tensors)):
        optimizers = {name: pruned_sgd(tensors, goal) for name, goal in GOALS.items()}
        steps: dict[str, Step] = {name: one.step for name, one in optimizers.items()}
        times = compared(steps, options.rounds, options.repeats, host_seconds)
        base = times["SGD alone"]
        for name, found in times.items():
            row: Row = {"part": "step", "tensors": tensors, "shape": "40x40", "variant": name}
            row |= {"microseconds": microseconds(found), "pruner_over_sgd": round(ratio(found, base) - 1.0, 4)}
            row |= {"aim": STEP_AIMS.get(tensors) if GOALS[name] is not None else None, **counted(name, steps[name])}
            rows.append(shown(row))
    return rows


# -- a training step of a small network ------------------------------------------------------------------------------


def lenet_step(goal: pb.Goal | None) -> Step:
    """Return a training step of LeNet-300-100."""
    torch.manual_seed(SEED)
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers)
    for layer in layers:
        if isinstance(layer, nn.Linear):  # the bound of fixed-GA is meant for normal weights
            nn.init.kaiming_normal_(layer.weight)
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if goal is not None:
        pb.Pruner(model, optimizer, goal, ramp=0)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def lenet_part(options: argparse.Namespace) -> list[Row]:
    """Measure a whole training step of LeNet-300-100, as a multiple of the dense one."""
    rows: list[Row] = []
    steps = {"dense" if goal is None else name: lenet_step(goal) for name, goal in GOALS.items()}
    times = compared(steps, options.rounds, options.repeats, host_seconds)
    for name, found in times.items():
        row: Row = {"part": "lenet", "model": "LeNet-300-100", "batch": 64, "variant": name}
        row |= {"microseconds": microseconds(found), "ratio": ratio(found, times["dense"])}
        rows.append(shown(row | {"aim": None if name == "dense" else LENET_AIM}))
    return rows


# -- models on a GPU -------------------------------------------------------------------------------------------------


def models_part(options: argparse.Namespace) -> list[Row]:
    """Measure whole training steps of compiled models, and the time of the host in the optimizer's step."""
    return [row for name in several(options.models) for row in model_rows(name, options)]


def model_rows(name: str, options: argparse.Namespace) -> list[Row]:
    """Measure one model: dense, dense once more to show the error, and pruned.

    All three have an optimizer of their own on one compiled model, since two copies of a model differ in speed.
    """
    gc.collect()  # the model before this one
    torch._dynamo.reset()  # the compiler gives up on code it has compiled eight times
    torch.manual_seed(SEED)
    model, x, y = MODELS[name](DEVICE)
    model = model.to(DEVICE, memory_format=torch.channels_last)
    net = torch.compile(model)

    def sgd(lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)

    def training_step(optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            trained(net, optimizer, x, y)

        for _ in range(6):  # the pruner makes its graphs in the fourth
            step()
        return step

    # A rate of 0 computes as much as any other and leaves the weights alone, which are pruned ones.
    optimizers = {"dense": sgd(0.0), "dense again": sgd(0.0), "exact budget": sgd(1e-6)}
    pb.Pruner(model, optimizers["exact budget"], BUDGET, ramp=0)
    pruned = [p.numel() for p in model.parameters() if p.ndim >= 2 and p.numel() >= 1000]
    steps: dict[str, Step] = {}
    for key, one in optimizers.items():
        with unwatched() if key in DENSE else nullcontext():
            steps[key] = training_step(one)
    times = compared(steps, options.rounds, options.repeats, timed)
    alone: dict[str, Step] = {key: one.step for key, one in optimizers.items()}
    host = compared(alone, options.rounds, HANDFUL, host_seconds)
    rows = []
    for key, found in times.items():
        row: Row = {"part": "models", "model": name, "variant": key}
        row |= {"pruned_weights": sum(pruned), "tensors": len(pruned)}
        row |= {"milliseconds": round(1e3 * statistics.median(found), 3), "ratio": ratio(found, times["dense"])}
        row |= {"aim": MODEL_AIMS.get(name) if key == "exact budget" else None, "host_us": microseconds(host[key])}
        row |= {"added_host_us": microseconds(differences(host[key], host["dense"])), **counted(key, alone[key])}
        rows.append(shown(row))
    return rows


# -- thousands of tensors --------------------------------------------------------------------------------------------


def many_times(tensors: int) -> dict[str, float]:
    """Return the seconds that each act of a pruner of many small tensors takes."""
    torch.manual_seed(SEED)
    parameters = normal_weights(tensors, (8, 8), CPU)
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True)
    optimizer.step()
    times = {"sgd_step_seconds": host_seconds(optimizer.step, HANDFUL)}
    gc.collect()  # what came before is not to be tidied up at this pruner's expense
    began = time.perf_counter()
    pruner = pb.Pruner(model, optimizer, BUDGET, ramp=0, include="*")
    times["constructor_seconds"] = time.perf_counter() - began
    optimizer.step()
    times["step_seconds"] = host_seconds(optimizer.step, HANDFUL)
    began = time.perf_counter()
    pruner.finish()
    times["finish_seconds"] = time.perf_counter() - began
    return times


def many_part(options: argparse.Namespace) -> list[Row]:
    """Measure how constructor, step and finish() grow with the number of tensors."""
    counts = [int(word) for word in several(options.counts)]
    rounds = min(options.rounds, FEW)
    many_times(10)  # what is loaded once belongs to no row
    found: dict[int, list[dict[str, float]]] = {tensors: [] for tensors in counts}
    for number in range(rounds):
        for tensors in counts:
            found[tensors].append(many_times(tensors))
            print(f"many: round {number + 1} of {rounds}, {tensors} tensors: {found[tensors][-1]}", flush=True)
    rows: list[Row] = []
    for tensors, times in found.items():
        middle = {act: statistics.median(one[act] for one in times) for act in times[0]}
        row: Row = {"part": "many", "tensors": tensors, "shape": "8x8", "variant": "exact budget", "rounds": rounds}
        row |= {act: round(seconds, 6) for act, seconds in middle.items()}
        row |= {f"{act}_per_1000": round(1e3 * seconds / tensors, 6) for act, seconds in middle.items()}
        rows.append(shown(row))
    return rows


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_of_process(field: str) -> int:
    """Return a field of Linux's account of this process in bytes: VmRSS is its memory now, VmHWM the most it had.

    getrusage's ru_maxrss is VmHWM too, but starts from the peak of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def peak_of(act: Callable[[], object]) -> int:
    """Return the most memory the process had at any moment of what is done here."""
    RESET.write_text("5")
    act()
    return memory_of_process("VmHWM")


def memory_case(number: int, tensors: int) -> Row:
    """Return the peaks of a pruner's acts in copies of the weights; to be run in a process of its own."""
    many_times(2)  # libraries and threads are there after this
    torch.manual_seed(SEED)
    shape = number // tensors // 64, 64
    empty = memory_of_process("VmRSS")
    # In place, since intermediate results would leave memory that the allocator keeps for later.
    parameters = [nn.Parameter(torch.empty(shape).normal_(std=0.05)) for _ in range(tensors)]
    weights = memory_of_process("VmRSS")
    for p in parameters:
        p.grad = torch.empty(shape).normal_(std=1e-3)
    base = memory_of_process("VmRSS")
    copy = 4 * math.prod(shape) * tensors
    model, optimizer = nn.ParameterList(parameters), torch.optim.SGD(parameters, lr=1e-4)
    made: list[pb.Pruner] = []

    def steps() -> None:
        for _ in range(3):
            optimizer.step()

    # include, since a tiny case may have tensors below min_size
    peaks = {"constructor": peak_of(lambda: made.append(pb.Pruner(model, optimizer, BUDGET, ramp=0, include="*")))}
    peaks["steps"] = peak_of(steps)
    between = memory_of_process("VmRSS")
    peaks["finish"] = peak_of(lambda: made[0].finish())
    held = {"peak": max(peaks.values()), **peaks, "between_steps": between}
    found = {f"{moment}_copies": 1 + (memory - base) / copy for moment, memory in held.items()}
    found |= {"weights_copies": (weights - empty) / copy, "gradient_copies": (base - weights) / copy}
    return {"copy_mib": round(copy / 2**20, 1), **{name: round(value, 3) for name, value in found.items()}}


def memory_part(options: argparse.Namespace) -> list[Row]:
    """Measure the peak memory of a pruner, in copies of the weights."""
    rows: list[Row] = []
    counted = "the model's weights as 1, and all that the pruner adds: latent weights and scratch memory"
    apart = "gradients (gradient_copies); SGD has no momentum here"
    for written in several(options.weights):
        for tensors in SPREADS:
            words = [sys.executable, __file__, str(number_of(written)), str(tensors)]
            # What is freed goes back to the system at once: memory that malloc keeps for later is nobody's copy.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
            answer = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            row: Row = {"part": "memory", "weights": written, "tensors": tensors, "variant": "exact budget"}
            rows.append(shown(row | json.loads(answer) | {"counted": counted, "not_counted": apart}))
    return rows


# -- the command -----------------------------------------------------------------------------------------------------

PARTS = {"step": step_part, "lenet": lenet_part, "models": models_part, "many": many_part, "memory": memory_part}


def several(words: Iterable[str]) -> list[str]:
    """Return what is written with spaces or commas in between."""
    return [one for word in words for one in word.split(",") if one]


def shown(row: Row) -> Row:
    print(row, flush=True)
    return row


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this mode to those all modes have."""
    here = ["models"] if GPU else [part for part in PARTS if part != "models"]
    add("--parts", nargs="+", default=here, help=f"of {', '.join(PARTS)}; here {', '.join(here)} by default")
    add("--tensors", nargs="+", default=["15", "300"], help="of the part step (15 300)")
    add("--models", nargs="+", default=list(MODEL_AIMS), help=f"of {', '.join(MODELS)} ({' '.join(MODEL_AIMS)})")
    add("--counts", nargs="+", default=["1250", "5000", "20000"], help="tensors of the part many (1250 5000 20000)")
    add("--weights", nargs="+", default=["100M"], help="of the part memory (100M)")


def host(options: argparse.Namespace) -> list[Row]:
    """Measure what pruning adds to a training loop that no CUDA graph captures."""
    parts = several(options.parts)
    for option, words, known in (("parts", parts, PARTS), ("models", several(options.models), MODELS)):
        unknown = [word for word in words if word not in known]
        if unknown:
            raise SystemExit(f"--{option} {unknown[0]}: give some of {', '.join(known)}.")
    if "models" in parts and not GPU:
        raise SystemExit("The part models needs a GPU.")
    if "memory" in parts and not RESET.exists():
        raise SystemExit("The part memory needs Linux, whose account of a process it reads.")
    return [row for part in parts for row in PARTS[part](options)]


if __name__ == "__main__":  # the process that memory_part starts
    print(json.dumps(memory_case(int(sys.argv[1]), int(sys.argv[2]))))
