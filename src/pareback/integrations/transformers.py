"""Pruning in the Trainer of Hugging Face's Transformers.

``Trainer(..., callbacks=[Prune(pb.Budget(sparsity=0.8))])`` is all there is to write.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..costs.selection import plain_names
from ..errors import InvalidUse, InvalidValue
from ..files import write
from ..goals.goal import Goal
from ..pruning.hooks import unwrapped
from ..report import Report
from ..sharding import is_sharded
from .session import Session

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise InvalidUse(
        "Transformers is not installed, which this callback is for. pip install 'pareback[frameworks]' installs it."
    ) from error

#: The pruner's state, beside the optimizer's in every checkpoint folder.
STATE = "pareback.pt"

#: The callback that was last at work on a model.
_at_work: weakref.WeakKeyDictionary[nn.Module, weakref.ref[TransformersPrune]] = weakref.WeakKeyDictionary()


class TransformersPrune(TrainerCallback):  # type: ignore[misc]
    """A callback that trains the model of a ``Trainer`` to a goal.

    Args:
        goal: :class:`~pareback.Budget`, :class:`~pareback.Fixed` or :class:`~pareback.Unconstrained`.
        options: those of :class:`~pareback.Pruner`; ``total_steps`` is the trainer's own unless it is given.

    Checkpoints that are written after the ramp meet the budget exactly, and hold the pruner's state for
    ``resume_from_checkpoint``. ``load_best_model_at_end`` chooses among those alone. ``log_history`` has the sparsity
    and each limit. After ``train()`` the model is an ordinary one with zeros in it, and ``report`` says how many.
    """

    def __init__(self, goal: Goal, **options: Any) -> None:
        self._session = Session(goal, options)
        self._landed = ExitStack()
        self._asked_in_time = False  # whether this step's checkpoint was asked for before it was our turn

    @property
    def pruner(self) -> Any:
        """The pruner, from the beginning of the training on."""
        return self._session.pruner

    @property
    def report(self) -> Report:
        """What was reached, after ``train()``."""
        return self._session.report

    # -- the beginning -----------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot be pruned as soon as there is a trainer."""
        for option in ("fsdp", "deepspeed"):
            if getattr(args, option, None):
                raise InvalidUse(
                    f"TrainingArguments({option}=...) shards the training, and this callback could not write its "
                    f"checkpoints. Leave {option} out, so that several processes train with DDP, or write a loop of "
                    "your own with torch's fully_shard and pareback.integrations.dcp."
                )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Build the pruner; the trainer has made its optimizer, and loaded model and optimizer where it resumes."""
        self.on_init_end(args, state, control)  # the callback may have come later, through add_callback
        model, optimizer = kwargs["model"], unwrapped(kwargs["optimizer"])
        if any(is_sharded(p) for p in model.parameters()):  # by accelerate's launcher, or by tp_plan
            raise InvalidUse(
                "The model's parameters are DTensors, and this callback could not write their checkpoints. Load it "
                "without tp_plan and launch it without FSDP, so that several processes train with DDP, or write a "
                "loop of your own with torch's fully_shard and pareback.integrations.dcp."
            )
        self._refuse_another(args, model)
        self._landed.close()
        resumed = _saved(args, state, model) if state.global_step > 0 else None
        self._session.begin(model, [optimizer], state.max_steps, resumed)
        self._forget_best(state)

    def _refuse_another(self, args: Any, model: nn.Module) -> None:
        """A checkpoint's folder has room for one state."""
        other = _at_work.get(model)
        other = None if other is None or other() is self else other()
        if other is not None and other._session.at_work is not None and args.save_strategy != "no":
            raise InvalidUse(
                f"Another Prune callback is at work on this model, and both would write {STATE} into its checkpoints. "
                "Put one Prune into Trainer(callbacks=[...]), with a goal for all tensors that are to be pruned, or "
                "set TrainingArguments(save_strategy='no')."
            )
        _at_work[model] = weakref.ref(self)

    # -- in training -------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the weights in training."""
        self._landed.close()
        self._forget_best(state)

    on_epoch_begin = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let what is evaluated and saved now meet the goal exactly, where it is asked for in full."""
        self._landed.close()
        pruner = self._session.at_work
        self._asked_in_time = control.should_evaluate or control.should_save
        if pruner is not None and self._asked_in_time:
            self._landed.enter_context(pruner.landed())

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the pruner's state into the checkpoint's folder."""
        pruner = self._session.at_work
        if pruner is not None and args.should_save and not args.save_only_model:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                content = {"pruner": pruner.state_dict(), "nonzeros": _nonzeros(kwargs["model"], pruner.names)}
                write(folder / STATE, lambda file: torch.save(content, file))
        if pruner is not None and not self._asked_in_time and pruner.ramp_ended:
            warnings.warn(
                f"checkpoint-{state.global_step} may miss the budget by a few weights: a callback that stands after "
                "Prune asked for it. Put Prune last in Trainer(callbacks=[...]).",
                stacklevel=2,
            )
        self._landed.close()
        self._forget_best(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the sparsity and each limit to what is logged."""
        if logs is not None and self._session.pruner is not None:
            figures = self._session.figures()
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)
        if logs is not None and "train_runtime" in logs:  # the last one, just before the best model is loaded
            self._landed.close()
            self._forget_best(state)
            if args.load_best_model_at_end and state.best_model_checkpoint is None and self._session.at_work:
                warnings.warn(
                    "load_best_model_at_end found no checkpoint that was evaluated and saved after the ramp, when the "
                    "budget is asked for in full: the last model is kept. Write a smaller ramp=, or smaller eval_steps "
                    "and save_steps.",
                    stacklevel=2,
                )

    def _forget_best(self, state: Any) -> None:
        """A model from the midst of the ramp is better than the pruned one, and not what was asked for."""
        known = (state.best_metric, state.best_model_checkpoint, state.best_global_step)
        if any(one is not None for one in known) and self._session.in_ramp():  # asking waits for the device
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Land on the goal: the model that was trained last, or the best one, which the trainer has loaded by now."""
        self._landed.close()
        self._session.end()


Prune = TransformersPrune


def _nonzeros(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Return the non-zeros of some parameters; of those that are not there, none."""
    present = plain_names(model)
    return {name: int(present[name].detach().count_nonzero()) if name in present else 0 for name in names}


def _saved(args: Any, state: Any, model: nn.Module) -> dict[str, Any]:
    """Return the pruner's state of the checkpoint that the trainer has resumed from."""
    given = getattr(args, "resume_from_checkpoint", None)
    usual = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    folders = [Path(given)] if isinstance(given, str) and given.lower() != "true" else []
    folder = next((one for one in [*folders, usual] if (one / STATE).is_file()), None)
    if folder is None:
        raise InvalidUse(
            f"The training is resumed at step {state.global_step}, but there is no {STATE} in {usual}, which this "
            "callback writes beside the optimizer's state. Resume from a checkpoint that was saved with it "
            "(save_only_model=False); if its folder lies elsewhere, name it in "
            "TrainingArguments(resume_from_checkpoint=...) as well."
        )
    content = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if _nonzeros(model, content["nonzeros"]) != content["nonzeros"]:
        raise InvalidValue(
            f"{folder / STATE} belongs to other weights than those that resume_from_checkpoint has loaded. Name the "
            "checkpoint's folder in TrainingArguments(resume_from_checkpoint=...) as well."
        )
    return content["pruner"]  # type: ignore[no-any-return]
