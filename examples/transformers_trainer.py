"""Prunes a small encoder in the Trainer of Transformers, keeps the best pruned checkpoint, and saves it.

python examples/transformers_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import pareback as pb
from pareback.integrations.transformers import Prune


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tokens, and whether the first of them is among the upper half."""
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, (tokens[:, 0] > 31).long(), strict=True)]


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=2, **sizes))
    prune = Prune(pb.Budget(sparsity=0.8), exclude="*embeddings*")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            load_best_model_at_end=True,  # among the checkpoints after the ramp
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        data, test = sentences(512, seed=0), sentences(128, seed=1)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=test, callbacks=[prune])
        trainer.train()  # to resume: train(resume_from_checkpoint=True)
        trainer.save_model(f"{folder}/pruned")
        again = BertForSequenceClassification.from_pretrained(f"{folder}/pruned")
    assert pb.inspect(again).nonzeros == prune.report.nonzeros
    print(prune.report)


if __name__ == "__main__":
    main()
