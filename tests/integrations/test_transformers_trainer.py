"""The Trainer of Transformers: a decoder and an encoder end to end, resuming, the best model, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import assert_same, copied
from torch import nn

import pareback as pb

transformers = pytest.importorskip("transformers")

from pareback.integrations.transformers import STATE, Prune  # noqa: E402

pytestmark = pytest.mark.slow  # many seconds in all

GOAL = pb.Budget(sparsity=0.8)


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    """A framework's own warnings are not what is tested here; ours are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="(torch|transformers|accelerate)")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def decoder(seed: int = 0) -> nn.Module:
    """A small Llama with tied embeddings."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def encoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, num_labels=2, **sizes))


def sentences(model: nn.Module, count: int = 64) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens if "CausalLM" in type(model).__name__ else (tokens[:, 0] > 31).long()
    return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]


def trainer(model: nn.Module, folder: Path, callback: Any, **arguments: Any) -> Any:
    defaults = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 5}
    usual = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 0}
    args = transformers.TrainingArguments(output_dir=str(folder), **{**usual, **defaults, **arguments})
    data = sentences(model)
    callbacks = [] if callback is None else [callback]
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)


def kept(model: nn.Module, callback: Any) -> int:
    names = dict(model.named_parameters())
    return sum(int(names[name].count_nonzero()) for name in callback.pruner.names)


def allowed(callback: Any) -> int:
    (limit,) = callback.pruner.limits
    return int(limit.allowed)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (decoder, {}),
        (encoder, {"gradient_accumulation_steps": 2}),
        (decoder, {"bf16": True, "max_grad_norm": 0.5}),
        (encoder, {"lr_scheduler_type": "cosine", "warmup_steps": 4}),
        (encoder, {"fp16": True, "label_smoothing_factor": 0.1, "optim": "adafactor"}),
        (decoder, {"gradient_checkpointing": True, "torch_compile": True, "torch_compile_backend": "eager"}),
    ],
    ids=["decoder", "encoder accumulating", "decoder bf16", "encoder warm-up", "encoder fp16", "decoder compiled"],
)
def test_end_to_end(make: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    """The budget is met, the history has the sparsity, and what is saved loads as an ordinary model."""
    model, callback = make(), Prune(GOAL)
    done = trainer(model, tmp_path, callback, **arguments)
    done.train()
    assert int(callback.pruner.metrics()["step"]) == 20
    assert kept(model, callback) == callback.report.pruned_nonzeros == allowed(callback)
    logged = [entry["sparsity"] for entry in done.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert logged[-1] == pytest.approx(0.8, abs=0.02)
    assert all("limit/sparsity" in entry for entry in done.state.log_history)
    done.save_model(str(tmp_path / "saved"))
    again = type(model).from_pretrained(tmp_path / "saved")
    assert_same(copied(again), copied(model))


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "pruned"])
def test_resuming_is_as_exact_as_a_dense_resume(dense: bool, arguments: dict[str, Any], tmp_path: Path) -> None:
    """From within the ramp and from after it, a resumed run ends with the same bits."""
    straight, callback = decoder(), None if dense else Prune(GOAL)
    trainer(straight, tmp_path, callback, save_strategy="steps", save_steps=5, **arguments).train()
    for step in (5, 15):
        assert dense or (tmp_path / f"checkpoint-{step}" / STATE).is_file()
        resumed, second = decoder(seed=9), None if dense else Prune(GOAL)
        again = trainer(resumed, tmp_path, second, **arguments)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(copied(resumed), copied(straight))
        assert dense or second.report.pruned_nonzeros == callback.report.pruned_nonzeros


def test_saving_does_not_change_the_training(tmp_path: Path) -> None:
    plain, saved = decoder(), decoder()
    trainer(plain, tmp_path / "a", Prune(GOAL)).train()
    often = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer(saved, tmp_path / "b", Prune(GOAL), **often).train()
    assert_same(copied(saved), copied(plain))


def test_checkpoints_after_the_ramp_meet_the_budget(tmp_path: Path) -> None:
    """Written in the midst of training, to the weight."""
    callback = Prune(GOAL)
    trainer(decoder(), tmp_path, callback, save_strategy="steps", save_steps=2).train()
    for step in (10, 12, 14, 16, 18, 20):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert kept(model, callback) == allowed(callback), step


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_model_is_one_of_those_after_the_ramp(strategy: str, tmp_path: Path) -> None:
    """The highest loss is asked for, so that the earliest model is the best: it is the earliest after the ramp."""
    model, callback = decoder(), Prune(GOAL)
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": strategy, "save_steps": 2}
    done = trainer(model, tmp_path, callback, load_best_model_at_end=True, metric_for_best_model="loss", **often)
    done.args.greater_is_better = True
    done.train()
    assert done.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")
    best = type(model).from_pretrained(tmp_path / "checkpoint-10")
    assert_same(copied(model), copied(best))
    assert kept(model, callback) == allowed(callback)


class StopsEarly(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 6


def test_no_best_model_after_the_ramp_is_said(tmp_path: Path) -> None:
    """Nor is one from within the ramp taken for it: the last model is cut, which finish() says as well."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    callback = Prune(GOAL)
    done = trainer(decoder(), tmp_path, callback, load_best_model_at_end=True, **often)
    done.add_callback(StopsEarly())
    with (
        pytest.warns(UserWarning, match="load_best_model_at_end found no checkpoint"),
        pytest.warns(UserWarning, match="after 6 of 20 steps"),
    ):
        done.train()
    assert done.state.best_model_checkpoint is None
    assert kept(done.model, callback) == allowed(callback)


def test_metrics_of_ones_own_and_stopping_early(tmp_path: Path) -> None:
    """Patience begins after the ramp, and the best is one of the models from there on."""

    def as_it_comes(_: Any) -> dict[str, float]:
        return {"score": -float(done.state.global_step)}  # the earliest model is the best

    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    model, callback = encoder(), Prune(GOAL)
    done = trainer(model, tmp_path, callback, load_best_model_at_end=True, metric_for_best_model="score", **often)
    done.compute_metrics = as_it_comes
    done.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=2))
    with pytest.warns(UserWarning, match="after 14 of 20 steps"):
        done.train()
    assert done.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")
    assert kept(model, callback) == allowed(callback)


def test_every_training_of_a_search_has_a_pruner_of_its_own(tmp_path: Path) -> None:
    """With ``model_init`` each ``train()`` begins with another model, as ``hyperparameter_search`` does."""
    callback = Prune(GOAL)
    done = trainer(encoder(), tmp_path, callback, max_steps=10)
    done.model_init = lambda trial=None: encoder()
    seen = []
    for rate in (1e-3, 3e-3):
        done.args.learning_rate = rate
        done.train()
        assert kept(done.model, callback) == allowed(callback)
        assert int(callback.pruner.metrics()["step"]) == 10
        seen.append(copied(done.model))
    assert any(not torch.equal(seen[0][name], value) for name, value in seen[1].items())


def test_tensors_of_one_dimension_are_saved_with_the_others(tmp_path: Path) -> None:
    """Whoever names them in ``include`` has them pruned, saved and resumed."""
    often = {"save_strategy": "steps", "save_steps": 10}
    options = {"include": ["*attention*weight"]}
    straight, resumed, callback = encoder(), encoder(seed=3), Prune(GOAL, **options)
    trainer(straight, tmp_path, callback, **often).train()
    assert any(p.ndim == 1 for p in callback.pruner.parameters)
    trainer(resumed, tmp_path, Prune(GOAL, **options)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert_same(copied(resumed), copied(straight))


class SavesLate(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 15


def test_a_checkpoint_asked_for_after_our_turn_is_said(tmp_path: Path) -> None:
    """It may be a few weights off; before our turn it meets the budget."""
    late = trainer(encoder(), tmp_path / "late", Prune(GOAL))
    late.add_callback(SavesLate())
    with pytest.warns(UserWarning, match=r"Put Prune last in Trainer\(callbacks=\[\.\.\.\]\)"):
        late.train()
    model, callback = encoder(), Prune(GOAL)
    done = trainer(model, tmp_path / "last", SavesLate())
    done.add_callback(callback)
    done.train()
    saved = type(model).from_pretrained(tmp_path / "last" / "checkpoint-15")
    assert kept(saved, callback) == allowed(callback)


def test_a_second_training_keeps_the_zeros(tmp_path: Path) -> None:
    model, callback = decoder(), Prune(GOAL)
    done = trainer(model, tmp_path, callback)
    done.train()
    before = copied(model)
    done.optimizer = done.lr_scheduler = None
    done.train()
    assert kept(model, callback) == allowed(callback)
    assert any(not torch.equal(value, before[name]) for name, value in copied(model).items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Prune(GOAL, ramps=0.1), "Did you mean 'ramp'"),
        (lambda: Prune(0.8), "is not a goal"),
        (lambda: Prune(GOAL).report, "There is no report yet"),
    ],
)
def test_what_is_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(pb.UserError, match=words):
        make()


def test_two_callbacks_for_one_model(tmp_path: Path) -> None:
    """Each would write its state over the other's."""
    done = trainer(encoder(), tmp_path, Prune(GOAL, include="*attention*weight"), save_strategy="steps", save_steps=9)
    done.add_callback(Prune(GOAL, include="*intermediate*weight"))
    with pytest.raises(pb.UserError, match=r"Put one Prune into Trainer\(callbacks="):
        done.train()


def test_deepspeed_is_refused_at_once() -> None:
    arguments = SimpleNamespace(fsdp=None, deepspeed="zero.json")
    with pytest.raises(pb.UserError, match=r"TrainingArguments\(deepspeed=...\) shards .* Leave deepspeed out"):
        Prune(GOAL).on_init_end(arguments, None, None)


def test_a_checkpoint_without_the_pruners_state(tmp_path: Path) -> None:
    trainer(decoder(), tmp_path, None, save_strategy="steps", save_steps=10).train()
    with pytest.raises(pb.UserError, match="resume_from_checkpoint"):
        trainer(decoder(), tmp_path, Prune(GOAL)).train(resume_from_checkpoint=True)


def test_a_state_of_other_weights(tmp_path: Path) -> None:
    """The trainer does not tell its callbacks where it resumed from: what lies where it usually is, is compared."""
    for name, seed in (("a", 0), ("b", 4)):
        usual = {"save_strategy": "steps", "save_steps": 5}
        trainer(decoder(seed), tmp_path / name, Prune(GOAL), **usual).train()
    other = trainer(decoder(), tmp_path / "b", Prune(GOAL))
    with pytest.raises(pb.UserError, match="belongs to other weights"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    told = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-5")}
    other = trainer(decoder(), tmp_path / "b", Prune(GOAL), **told)
    other.train(resume_from_checkpoint=told["resume_from_checkpoint"])
