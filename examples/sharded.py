"""Prunes a model that is sharded over processes (FSDP2), with checkpoints that any number of processes can load.

torchrun --nproc-per-node 2 examples/sharded.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pareback as pb
from pareback.integrations import dcp

STEPS = 60


def build() -> tuple[nn.Module, torch.optim.Optimizer, pb.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding; and the pruner after both
    return model, optimizer, pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one for all processes
    model, optimizer, pruner = build()
    train(model, optimizer, range(40))
    dcp.save(folder[0], model, optimizer, pruner)
    model, optimizer, pruner = build()  # another day, on as many processes as there are then
    dcp.load(folder[0], model, optimizer, pruner)
    train(model, optimizer, range(40, STEPS))
    report = pruner.finish()
    if dist.get_rank() == 0:
        print(report)
    dist.barrier()  # nobody leaves while another is in its last exchange
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
