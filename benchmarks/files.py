"""How long files take to be ready, beside torch.load, and how much memory saving takes.

    python benchmarks/files.py                  # ResNet-50 with 90 % zeros, two or three minutes
    python benchmarks/files.py --only memory --gigabytes 1

Loading a .pare file and torch.load take turns in one process, and the ratio is the median over rounds. An engine from a
file is timed in processes of its own, from the end of ``import pareback`` to the first result. The memory of saving is
what a process of its own has at most, less what it had before.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import pareback as pb
from engine_models import ENTRIES
from pareback.bench.masks import mask_uniformly_

PARTS = ("load", "engine", "memory")

READY = """
import time, sys, torch
import pareback as pb
x = torch.zeros(1, *map(int, sys.argv[2].split(",")))
began = time.perf_counter()
engine = pb.load_engine(sys.argv[1], threads=1)
loaded = time.perf_counter()
engine(x)
print(loaded - began, time.perf_counter() - began)
"""

MEMORY = """
import resource, sys, torch
import pareback as pb
count, density = int(float(sys.argv[2]) * 2**28), float(sys.argv[3])
weight = torch.zeros(count)
for part in weight.split(1 << 22):
    part.copy_((torch.rand(len(part)) < density).float() * 1.5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pb.save({"weight": weight}, sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def model_of(name: str, sparsity: float) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model of the list with so many zeros in every layer, and the shape of its examples."""
    entry = ENTRIES[name]
    torch.manual_seed(0)
    return mask_uniformly_(entry.build(), sparsity, torch.randn(2, *entry.shape)).eval(), entry.shape


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the times of several ways that take turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def loading(model: nn.Module, place: Path, rounds: int) -> None:
    """Print how long a .pare file takes beside torch.load, as a state dict and into a model."""
    torch.save(model.state_dict(), place / "model.pt")
    pb.save(model, place / "model.pare")
    times = in_turn(
        {
            "torch.load": lambda: torch.load(place / "model.pt", weights_only=True),
            "pb.load": lambda: pb.load(place / "model.pare"),
            "torch.load, load_state_dict": lambda: model.load_state_dict(torch.load(place / "model.pt")),
            "pb.load into the model": lambda: pb.load(place / "model.pare", model),
        },
        rounds,
    )
    for name, found in times.items():
        against = times["torch.load" if name in ("torch.load", "pb.load") else "torch.load, load_state_dict"]
        ratio = statistics.median(mine / other for mine, other in zip(found, against, strict=True))
        print(f"{name:30} {1e3 * statistics.median(found):7.1f} ms, {ratio:.2f} times torch's", flush=True)


def ready(model: nn.Module, shape: tuple[int, ...], place: Path, rounds: int) -> None:
    """Print how long an engine from a file takes, beside compiling it, where tilings are known already."""
    example = torch.randn(1, *shape)
    began = time.perf_counter()
    engine = pb.compile(model, example, threads=1)
    print(f"compiled in {time.perf_counter() - began:.1f} s, less if this machine knows its layers", flush=True)
    engine.save(place / "model.pbe")
    size = (place / "model.pbe").stat().st_size
    command = [sys.executable, "-c", READY, str(place / "model.pbe"), ",".join(map(str, shape))]
    found = [[float(word) for word in _said(command).split()] for _ in range(rounds)]
    loaded, called = (statistics.median(one[way] for one in found) for way in (0, 1))
    print(f"model.pbe, {size / 1e6:.1f} MB: loaded in {loaded:.2f} s, first result after {called:.2f} s", flush=True)


def memory(gigabytes: float, place: Path) -> None:
    """Print what saving one tensor takes besides."""
    for density in (1.0, 0.5, 0.1):
        words = [str(place / "large.pare"), str(gigabytes), str(density)]
        extra = float(_said([sys.executable, "-c", MEMORY, *words]))
        share = extra / gigabytes
        print(f"a tensor of {gigabytes:g} GiB, {density:.0%} non-zero: {share:.2f} times that besides", flush=True)


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help="of load, engine and memory")
    parser.add_argument("--model", default="resnet50", choices=ENTRIES, metavar="NAME", help="of engine_models.py")
    parser.add_argument("--sparsity", type=float, default=0.9, help="zeros in every layer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of everything that is timed (%(default)s)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the tensor that is saved (%(default)s)")
    options = parser.parse_args()
    parts = options.only.split(",")
    with TemporaryDirectory() as folder:
        place = Path(folder)
        model, shape = model_of(options.model, options.sparsity)
        if "load" in parts:
            loading(model, place, options.rounds)
        if "engine" in parts:
            ready(model, shape, place, options.rounds)
        if "memory" in parts:
            memory(options.gigabytes, place)


if __name__ == "__main__":
    main()
