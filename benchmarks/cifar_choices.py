"""Measures on CIFAR-100 what the library's defaults rest on: WRN-16-8, one cosine cycle, one row per choice.

    python benchmarks/cifar_choices.py --data cifar100.npz --set sgd --out results/cifar-choices-sgd.json

`--set sgd` asks whether the threshold gradient should count the pruned weights alone or all of them; `--set adamw` how
fast thresholds should learn beside an optimizer that normalises gradients. On a GPU the whole step, pruner included,
runs in one CUDA graph. `--quick` is a dry run on little data.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import pareback as pb
from pareback import kernels
from pareback.kernels import reference
from pareback.lab.models.wrn import WideResNet


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str
    goal: pb.Goal | None = None
    optimizer: str = "sgd"
    epochs: int = 40
    pull: str = "pruned"
    threshold_lr: float | None = None
    width: int = 8
    seed: int = 0


def _exact(sparsity: float, **options: object) -> Run:
    run = Run(f"exact {100 * sparsity:g} %", pb.Budget(sparsity=sparsity))
    return replace(run, **options)  # type: ignore[arg-type]


SETS: dict[str, list[Run]] = {
    "sgd": [
        Run("dense"),
        _exact(0.98),
        _exact(0.98, pull="all"),
        _exact(0.95),
        _exact(0.95, pull="all"),
    ],
    "adamw": [
        Run("dense", optimizer="adamw", epochs=20),
        *[_exact(0.98, optimizer="adamw", epochs=20, threshold_lr=m) for m in (0.01, 0.1, 1.0, 10.0, 30.0)],
    ],
    "sgd-rate": [_exact(0.98, threshold_lr=m) for m in (0.003, 0.03, 0.1)],
}


def pull_of_all(pruned: Tensor, latent: Tensor, grad: Tensor) -> Tensor:
    """Return the threshold's pull counting kept weights too, which gentler shrinks than the hard one move."""
    return ((pruned - latent) * grad).sum()


PULLS = {"pruned": reference.threshold_pull, "all": pull_of_all}


class Data:
    """CIFAR-100 on the device, padded once; augmented by indexing."""

    def __init__(self, path: Path, device: torch.device, limit: int | None) -> None:
        arrays = np.load(path)
        train = torch.from_numpy(arrays["train_x"][:limit]).to(device).float()
        test = torch.from_numpy(arrays["test_x"][:limit]).to(device).float()
        mean, std = train.mean((0, 1, 2)), train.std((0, 1, 2))
        padded = (torch.zeros(len(train), 40, 40, 3, device=device) - mean) / std
        padded[:, 4:36, 4:36] = (train - mean) / std
        self.train_x = padded.bfloat16() if device.type == "cuda" else padded
        self.train_y = torch.from_numpy(arrays["train_y"][:limit].astype(np.int64)).to(device)
        self.test_x = ((test - mean) / std).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        self.test_y = torch.from_numpy(arrays["test_y"][:limit].astype(np.int64)).to(device)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch, each image cropped and flipped at random."""
        size, device = len(index), index.device
        line = torch.arange(32, device=device)
        top, left = torch.randint(0, 9, (2, size, 1, 1), device=device).unbind()
        flip = torch.rand(size, 1, 1, device=device) < 0.5
        columns = torch.where(flip, 31 - line.view(1, 1, 32), line.view(1, 1, 32)) + left
        x = self.train_x[index.view(-1, 1, 1), line.view(1, 32, 1) + top, columns]
        return x.permute(0, 3, 1, 2), self.train_y[index]


def train(run: Run, data: Data, device: torch.device, batch: int) -> dict[str, object]:
    """Train one row and return its outcome."""
    torch.manual_seed(run.seed)
    began = time.perf_counter()
    cuda = device.type == "cuda"
    model = WideResNet(16, run.width).to(device, memory_format=torch.channels_last)
    net = torch.compile(model) if cuda else model
    peak_lr = 0.1 if run.optimizer == "sgd" else 2e-3
    lr = torch.tensor(peak_lr, device=device)
    steps = run.epochs * (len(data.train_y) // batch)
    if run.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=True, capturable=cuda)
    pruner = None
    if run.goal is not None:
        pruner = pb.Pruner(model, optimizer, run.goal, total_steps=steps, exclude="fc.*", threshold_lr=run.threshold_lr)
    index = torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> None:
        x, y = data.batch(index)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    order = torch.Generator().manual_seed(run.seed)
    advance, done, worst = step, 0, 0.0
    for epoch in range(run.epochs):
        shuffled = torch.randperm(len(data.train_y), generator=order).to(device)
        for start in range(0, len(shuffled) - batch + 1, batch):
            if cuda and done == 4:
                advance = _captured(step)
            lr.fill_(peak_lr * 0.5 * (1 + math.cos(math.pi * done / steps)))
            index.copy_(shuffled[start : start + batch])
            advance()
            done += 1
        if pruner is not None and epoch >= run.epochs // 2:
            error = pruner.metrics()["sparsity"] - run.goal.sparsity  # type: ignore[union-attr]
            worst = max(worst, abs(float(error)))
    outcome: dict[str, object] = {
        **asdict(run),
        "goal": repr(run.goal),
        "accuracy_before_finish": evaluate(model, data),
    }
    if pruner is not None:
        report = pruner.finish()
        outcome |= {
            "sparsity": report.sparsity,
            "nonzeros": report.nonzeros,
            "worst_tracking_points": 100 * worst,
            "tensor_sparsity": {r.name: round(r.sparsity, 4) for r in report.rows if r.pruned},
        }
    return outcome | {"accuracy": evaluate(model, data), "seconds": round(time.perf_counter() - began, 1)}


def run_row(run: Run, data: Data, device: torch.device, batch: int) -> dict[str, object]:
    """Train one row. The library counts pruned weights; the other choice needs its plain operators."""
    reference.threshold_pull = PULLS[run.pull]
    with kernels.only("reference") if run.pull == "all" else nullcontext():
        return train(run, data, device, batch)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Data) -> float:
    """Return the top-1 accuracy in percent."""
    model.eval()
    right = 0
    cuda = data.test_x.is_cuda
    for start in range(0, len(data.test_y), 1000):
        with torch.autocast(data.test_x.device.type, torch.bfloat16, enabled=cuda):
            guess = model(data.test_x[start : start + 1000]).argmax(1)
        right += int((guess == data.test_y[start : start + 1000]).sum())
    model.train()
    return 100.0 * right / len(data.test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="npz with train_x, train_y, test_x, test_y")
    parser.add_argument("--set", choices=SETS, default="sgd")
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="WRN-16-1, 1,024 images, 2 epochs: does it run?")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # a graph cannot be captured on the default stream
    data = Data(options.data, device, 1024 if options.quick else None)
    rows = []
    for run in SETS[options.set]:
        if options.quick:
            run = replace(run, epochs=2, width=1)
        rows.append(run_row(run, data, device, 128))
        print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            about = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__}
            about |= {"pareback": pb.__version__, "set": options.set, "quick": options.quick}
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
