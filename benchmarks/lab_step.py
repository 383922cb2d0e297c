"""Where the time of a step of the lab's training goes, on a GPU.

    python benchmarks/lab_step.py recipes/paper/dense.yaml recipes/paper/exact-95.yaml --data.path cifar100.npz

Builds what `pareback train` builds, takes steps until they are compiled and captured, times steps by the clock, and
then sorts the kernels of some more by what they do. Kernels run one after another, so that their sum should be the
clock's time; what is missing from it is time in which the GPU waited.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pareback.lab import environment
from pareback.lab.data.sources import Source, open_source, steps_per_epoch
from pareback.lab.recipe.reading import override, read
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train import settings
from pareback.lab.train.distributed import Team
from pareback.lab.train.state import Parts

#: What a kernel does, by words in its name; the first that fits.
KINDS = {
    "pruner": ("adopt", "shrink", "prune", "moments", "counts"),
    "optimizer": ("multi_tensor", "foreach", "fused_sgd", "FusedSgd"),
    "batch norm, ReLU, additions (compiled)": ("triton_",),
    "convolutions": ("cudnn", "xmma", "cutlass", "implicit", "wgrad", "dgrad", "fprop", "nvjet", "gemm", "conv"),
    "copies and fills": ("Memcpy", "Memset", "copy", "Fill", "fill"),
}


def kind(kernel: str) -> str:
    """Return what a kernel does."""
    return next((name for name, words in KINDS.items() if any(word in kernel for word in words)), "other")


def measure(recipe: Recipe, steps: int) -> dict[str, object]:
    """Return the milliseconds of one step by the clock, and by kind of kernel."""
    device = torch.device("cuda")
    with settings.applied(recipe, device):
        source = open_source(recipe.data, device)
        per_epoch = steps_per_epoch(source, recipe.data.batch_size)
        parts = Parts(recipe, Team(device), source, recipe.train.epochs * per_epoch)
        batches = endless(source, recipe)
        began = time.perf_counter()
        while not parts.step.settled:
            parts.step(*next(batches), 1e-3)
        torch.cuda.synchronize()
        ready = time.perf_counter() - began

        def run() -> float:
            began = time.perf_counter()
            for _ in range(steps):
                parts.step(*next(batches), 1e-3)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - began) / steps

        run()
        clock = min(run() for _ in range(3))
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run()
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in found.key_averages():
        spent = event.device_time_total / 1e3 / steps
        if spent:
            kinds[kind(event.key)] += spent
            kernels[event.key[:90]] += spent
    return {
        "recipe": recipe.name,
        "seconds_until_captured": round(ready, 1),
        "ms_per_step": round(clock, 3),
        "ms_by_kind": {name: round(spent, 3) for name, spent in kinds.most_common()},
        "ms_of_kernels": {name: round(spent, 4) for name, spent in kernels.most_common(25)},
    }


def endless(source: Source, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches, epoch after epoch."""
    epochs = (source.batches(epoch, batch=recipe.data.batch_size, seed=0) for epoch in count())
    return chain.from_iterable(epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--data.path", dest="data", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where to write the table as JSON")
    options = parser.parse_args()
    rows = []
    for path in options.recipes:
        rows.append(measure(override(read(path), {"data.path": options.data}), options.steps))
        print({key: value for key, value in rows[-1].items() if key != "ms_of_kernels"}, flush=True)
    if options.out is not None:
        about = environment.describe(torch.device("cuda"))
        del about["argv"]  # paths of one machine
        options.out.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
