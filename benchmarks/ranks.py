"""Several processes prune one model on different data: after every step all hold the same bits, or it says where not.

python benchmarks/ranks.py --ranks 2,4 --steps 2000 --out results/soak
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pareback as pb
from pareback import files
from pareback.lab import environment

WAYS = ("DDP", "FSDP2")
GOALS = {"exact": pb.Budget(sparsity=0.9), "two limits": pb.Budget(sparsity=0.8, params=0.3), "fixed": pb.Fixed(0.9)}


def network() -> nn.Sequential:
    """A small network whose tensors do not divide evenly by 2 or 4."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 101), nn.LayerNorm(101), nn.GELU(), nn.Linear(101, 67), nn.GELU(), nn.Linear(67, 5)
    )


def digest(tensors: list[Tensor]) -> Tensor:
    """Return a hash of tensors' bits as numbers that processes can exchange."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.int64)


def held(way: str, model: nn.Module, pruner: pb.Pruner, whole: bool) -> list[Tensor]:
    """What every process has to have alike: thresholds and counts, and weights; those of shards, put together."""
    shared = [pruner.r(), pruner.thresholds(), torch.tensor(pruner.counts())]
    if way == "DDP":
        return [*shared, *model.parameters()]
    return [*shared, *(p.full_tensor() for p in model.parameters())] if whole else shared


def train(rank: int, way: str, goal: str, ranks: int, steps: int, place: str) -> None:
    """Train one of the processes; the first one writes in which step the others were found different, or -1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=ranks)
    plain = network()
    if way == "FSDP2":
        fully_shard(plain, mesh=init_device_mesh("cpu", (ranks,)))
    model = DistributedDataParallel(plain) if way == "DDP" else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = pb.Pruner(plain, optimizer, GOALS[goal], total_steps=steps)
    draws = torch.Generator().manual_seed(1000 + rank)  # each its own data
    parted = -1
    for step in range(steps):
        x = torch.randn(8, 37, generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
        mine = digest(held(way, plain, pruner, whole=step % 100 == 99))
        theirs = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(theirs, mine)
        if parted < 0 and not all(torch.equal(mine, other) for other in theirs):
            parted = step
    report = pruner.finish()
    if rank == 0:
        result = {"parted": parted, "nonzeros": report.pruned_nonzeros, "weights": report.pruned_params}
        files.write_json(Path(place) / "found.json", result)
    dist.destroy_process_group()


def tried(way: str, goal: str, ranks: int, steps: int) -> dict[str, Any]:
    began = time.monotonic()
    with TemporaryDirectory(prefix="ranks-") as place:
        mp.spawn(train, (way, goal, ranks, steps, place), nprocs=ranks)
        found = json.loads((Path(place) / "found.json").read_text(encoding="utf-8"))
    about = {"way": way, "goal": goal, "ranks": ranks, "steps": steps}
    return {**about, **found, "seconds": round(time.monotonic() - began)}


def as_table(rows: list[dict[str, Any]]) -> str:
    head = "| way | goal | processes | steps | first step with other bits | kept |"
    rule = "| --- | --- | --: | --: | --: | --: |"
    lines = [
        f"| {row['way']} | {row['goal']} | {row['ranks']} | {row['steps']:,} | "
        f"{'none' if row['parted'] < 0 else row['parted']} | {row['nonzeros']:,} of {row['weights']:,} |"
        for row in rows
    ]
    return "\n".join([head, rule, *lines])


def main(argv: list[str] | None = None) -> int:
    """Try every way, goal and number of processes, and print a table; 1 if bits parted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each training (%(default)s)")
    parser.add_argument("--goals", default=",".join(GOALS), help="some of %(default)s")
    parser.add_argument("--out", type=Path, help="also write ranks.json and ranks.md into this folder")
    options = parser.parse_args(argv)
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for way in WAYS:
            for goal in options.goals.split(","):
                rows.append(tried(way, goal, ranks, options.steps))
                print(as_table(rows).splitlines()[-1], flush=True)
    if options.out is not None:
        about = environment.describe(torch.device("cpu"))
        machine = {key: about[key] for key in ("python", "torch", "pareback", "cpu", "platform")}
        command = " ".join(["python benchmarks/ranks.py", *(sys.argv[1:] if argv is None else argv)])
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"command": command, "date": about["start"][:10], "machine": machine, "rows": rows}
        files.write_json(options.out / "ranks.json", found)
        text = f"# Processes that prune together\n\n`{command}`, {about['start'][:10]}\n\n{as_table(rows)}\n"
        files.write_text(options.out / "ranks.md", text)
    return int(any(row["parted"] >= 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
