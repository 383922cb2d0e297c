"""Trains under each framework in as many processes as there are, on the same global batches; run by torchrun.

Each process writes what it came to into the folder that is given. Without torchrun it is one process.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule, Trainer
from networks import batches, copied, network
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import pareback as pb
from pareback.integrations.lightning import Prune as LightningPrune
from pareback.integrations.transformers import Prune as TransformersPrune
from pareback.sharding import whole

GOAL, STEPS, GLOBAL = pb.Budget(sparsity=0.8), 20, 16
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(seed=RANK)  # DDP makes the replicas equal

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def lightning(folder: Path) -> dict[str, Any]:
    module, prune = Classifier(), LightningPrune(GOAL)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    distributed = {"strategy": "ddp" if WORLD > 1 else "auto", "devices": WORLD, "use_distributed_sampler": False}
    mine = [(x.chunk(WORLD)[RANK], y.chunk(WORLD)[RANK]) for x, y in batches(STEPS, size=GLOBAL)]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[prune],
        **quiet,
        **distributed,
    )
    trainer.fit(module, DataLoader(mine, batch_size=None))
    return {"weights": copied(module), "kept": prune.report.pruned_nonzeros}


def decoder(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def trainer(model: Any, folder: Path, prune: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL // WORLD,
        learning_rate=3e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=0,
        save_strategy="steps",
        save_steps=5,
        ddp_backend="gloo" if WORLD > 1 else None,
        **options,
    )
    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    callbacks = [prune] if prune is not None else []
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)


def hugging_face(folder: Path) -> dict[str, Any]:
    model, prune = decoder(RANK), TransformersPrune(GOAL)
    trainer(model, folder, prune).train()
    found = {"weights": copied(model), "kept": prune.report.pruned_nonzeros}
    if WORLD == 2:  # the order in which more of them add gradients up differs after a dense resume, too
        resumed = decoder(7)
        trainer(resumed, folder, TransformersPrune(GOAL)).train(resume_from_checkpoint=str(folder / "checkpoint-15"))
        found["resumed"] = copied(resumed)
    return found


def accelerated(folder: Path) -> dict[str, Any]:
    """An own loop; with two processes from the middle on once more, in a model that loads what was saved there."""
    steps = list(batches(STEPS, size=GLOBAL))
    rows = [row for x, y in steps for row in zip(x, y, strict=True)]
    accelerator = accelerate.Accelerator(cpu=True)

    def prepared(seed: int) -> Any:
        model = network(seed)
        loader = DataLoader(rows, batch_size=GLOBAL // WORLD)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
        return model, optimizer, loader, pb.Pruner(model, optimizer, GOAL, STEPS)

    def train(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, loader, pruner = prepared(RANK)
    accelerator.register_for_checkpointing(pruner)
    data = list(loader)
    train(model, optimizer, data[:12])
    accelerator.save_state(str(folder / "saved"))
    train(model, optimizer, data[12:])
    kept = pruner.finish().pruned_nonzeros
    found = {"weights": copied(accelerator.unwrap_model(model)), "kept": kept}
    if WORLD != 2:
        return found
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, _, pruner = prepared(5)
    accelerator.register_for_checkpointing(pruner)
    accelerator.load_state(str(folder / "saved"))
    train(model, optimizer, data[12:])
    pruner.finish()
    return {**found, "resumed": copied(accelerator.unwrap_model(model))}


def sharded(folder: Path) -> dict[str, Any]:
    """Accelerate saves the state of the main process alone, of a model that is sharded with FSDP2 as well."""

    def prepared(seed: int) -> Any:
        model = network(seed)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
        pruner = pb.Pruner(model, optimizer, GOAL, STEPS)
        accelerator.register_for_checkpointing(pruner)
        return accelerator, model, optimizer, pruner

    def train(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            F.cross_entropy(model(x.chunk(WORLD)[RANK]), y.chunk(WORLD)[RANK]).backward()
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, optimizer, pruner = prepared(0)
    train(model, optimizer, batches(12))
    accelerator.save_state(str(folder / "saved"))
    latents = {name: whole(value).clone() for name, value in pruner.latent_tensors().items()}
    r = pruner.r()
    accelerator, *_, other = prepared(5)
    accelerator.load_state(str(folder / "saved"))
    loaded = {name: whole(value) for name, value in other.latent_tensors().items()}
    return {"latents": latents, "loaded": loaded, "r": r, "loaded r": other.r()}


def refused(folder: Path) -> dict[str, str]:
    """What is said of sharding under the Trainer of Transformers: by its arguments, and by another hand."""
    by_hand, untold = fully_shard(decoder(0), mesh=init_device_mesh("cpu", (WORLD,))), SimpleNamespace(fsdp=None)
    optimizer = torch.optim.AdamW(by_hand.parameters())
    wrong = {
        "arguments": lambda: trainer(decoder(0), folder, TransformersPrune(GOAL), fsdp=True),
        "by hand": lambda: TransformersPrune(GOAL).on_train_begin(
            untold, None, None, model=by_hand, optimizer=optimizer
        ),
    }
    said = dict.fromkeys(wrong, "nothing")
    for name, make in wrong.items():
        try:
            make()
        except pb.UserError as error:
            said[name] = str(error)
    return said


AGREEING = [lightning, hugging_face, accelerated]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for part in [*AGREEING, sharded, refused] if WORLD == 2 else AGREEING:
        try:
            found[part.__name__] = part(Path(sys.argv[1]) / part.__name__)
        except Exception:
            found[part.__name__] = traceback.format_exc()
        dist.barrier()
    torch.save(found, Path(sys.argv[1]) / f"{RANK}.pt")


if __name__ == "__main__":
    main()
