"""Trains, saves and resumes under Lightning's strategies for several processes; run by torchrun, with a folder."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from networks import PRUNED, batches, network
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import pareback as pb
from pareback.integrations.lightning import Prune
from pareback.sharding import is_sharded, whole

NAMES = [f"net.{name}" for name in PRUNED]


class Sharded(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed, torch.float64)  # in float32 the last bits may decide whether a weight is kept

    def configure_model(self) -> None:
        if self.device_mesh is not None and not is_sharded(self.net[0].weight):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def strategy(name: str) -> Any:
    if name == "ddp":
        return DDPStrategy()
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return ModelParallelStrategy(**sizes, save_distributed_checkpoint=name == "sharded")


def fit(folder: Path, name: str, seed: int, ckpt_path: Any = None) -> dict[str, Tensor]:
    """Train a model, and return its whole weights."""
    module = Sharded(seed)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy(name),
        devices=2,
        max_epochs=4,
        use_distributed_sampler=False,  # with it a resumed dense fit differs, too
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Prune(pb.Budget(sparsity=0.8)), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )
    mine = batches(10, seed=int(os.environ["RANK"]), dtype=torch.float64)
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None), ckpt_path=ckpt_path)
    return {name: whole(p.detach()) for name, p in module.named_parameters()}


def saved_weights(file: Path) -> dict[str, Tensor]:
    """Read a checkpoint's weights, in one file or in a folder."""
    if file.is_file():
        return torch.load(file, weights_only=True)["state_dict"]
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(file, file / "whole.pt")
    return torch.load(file / "whole.pt", weights_only=False)["state_dict"]


def kept(weights: dict[str, Tensor]) -> int:
    return sum(int(weights[name].count_nonzero()) for name in NAMES)


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in ("ddp", "sharded", "whole"):
        folder = Path(sys.argv[1]) / name
        try:
            straight = fit(folder / "a", name, seed=0)
            resumed = fit(folder / "b", name, seed=5, ckpt_path=folder / "a" / "epoch=2.ckpt")
            saved = kept(saved_weights(folder / "a" / "epoch=2.ckpt")) if torch.distributed.get_rank() == 0 else 0
            found[name] = {"straight": straight, "resumed": resumed, "kept": kept(straight), "saved": saved}
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, Path(sys.argv[1]) / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
