"""Trains a Llama on the sources of Python's standard library, dense and with 80 and 90 % of its linear layers pruned.

python examples/language_model.py --device cuda --out language-model.json
"""

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

import torch
import transformers

import pareback as pb
from pareback.integrations.transformers import Prune

OPTIONS = {"device": "cpu", "out": "language-model.json", "folder": "language-model", "steps": 4000, "seed": 0}
OPTIONS |= {"hidden": 320, "layers": 8, "length": 256, "pieces": 100_000, "batch": 64}  # 9.9 million parameters


def text(held_out: bool, length: int, most: int) -> list[dict[str, torch.Tensor]]:
    """Return the library's modules as pieces of bytes, in the order of their names; every tenth file is held out."""
    files = [f for f in Path(os.__file__).parent.rglob("*.py") if not {"site-packages", "test"} & set(f.parts)]
    chosen = [file.read_bytes() for i, file in enumerate(sorted(files)) if (i % 10 == 9) == held_out]
    tokens = torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8).long()
    pieces = tokens[: len(tokens) // length * length].view(-1, length)[:most]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def trained(options: argparse.Namespace, sparsity: float) -> dict[str, float]:
    """Train once, and return the loss on what was held out."""
    transformers.set_seed(options.seed)
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.hidden * 27 // 10, "num_attention_heads": 8}
    config = {"vocab_size": 256, "num_hidden_layers": options.layers, "tie_word_embeddings": True, **sizes}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    where = {"use_cpu": options.device == "cpu", "bf16": options.device != "cpu", "report_to": "none"}
    rates = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 50, "weight_decay": 0.1}
    steps = {"max_steps": options.steps, "save_strategy": "no", "per_device_train_batch_size": options.batch}
    arguments = transformers.TrainingArguments(options.folder, seed=options.seed, **where, **rates, **steps)
    prune = [Prune(pb.Budget(sparsity=sparsity), include="*_proj.weight")] if sparsity else []
    data, test = (text(held_out, options.length, options.pieces) for held_out in (False, True))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=test, callbacks=prune)
    trainer.train()
    found = {"sparsity": sparsity, "loss": trainer.evaluate()["eval_loss"], "pieces": len(data)}
    return found | {"params": pb.inspect(model).params, "nonzeros": pb.inspect(model).nonzeros}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=" ")
    options = parser.parse_args()
    record = {"date": f"{datetime.date.today()}", "options": vars(options), "python": platform.python_version()}
    record["versions"] = {module.__name__: module.__version__ for module in (torch, transformers, pb)}
    record["machine"] = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
    record["runs"] = [trained(options, sparsity) for sparsity in (0.0, 0.8, 0.9)]
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
