"""Pruning in the Trainer of Hugging Face's Transformers.

``Trainer(..., callbacks=[Prune(pb.Budget(sparsity=0.8))])`` is all there is to write.
"""

from __future__ import annotations

import warnings
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

    @property
    def pruner(self) -> Any:
        """The pruner, from the beginning of the training on."""
        return self._session.pruner

    @property
    def report(self) -> Report:
        """What was reached, after ``train()``."""
        return self._session.report

    # -- the beginning -----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Build the pruner; the trainer has made its optimizer, and loaded model and optimizer where it resumes."""
        model, optimizer = kwargs["model"], unwrapped(kwargs["optimizer"])
        if any(is_sharded(p) for p in model.parameters()):
            raise InvalidUse(
                "TrainingArguments(fsdp=...) shards the model, whose checkpoints this callback cannot write. Train "
                "with DDP (fsdp=''), or in a loop of your own with pareback.integrations.dcp."
            )
        self._landed.close()
        resumed = _saved(args, state, model) if state.global_step > 0 else None
        self._session.begin(model, [optimizer], state.max_steps, resumed)
        self._forget_best(state)

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
        if pruner is not None and (control.should_evaluate or control.should_save):
            self._landed.enter_context(pruner.landed())

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the pruner's state into the checkpoint's folder."""
        pruner = self._session.at_work
        if pruner is not None and args.should_save and not args.save_only_model:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                counts = _nonzeros(kwargs["model"])
                content = {"pruner": pruner.state_dict(), "nonzeros": {name: counts[name] for name in pruner.names}}
                write(folder / STATE, lambda file: torch.save(content, file))
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
        if self._session.in_ramp():
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Land on the goal: the model that was trained last, or the best one, which the trainer has loaded by now."""
        self._landed.close()
        self._session.end()


Prune = TransformersPrune


def _nonzeros(model: nn.Module) -> dict[str, int]:
    return {name: int(p.detach().count_nonzero()) for name, p in plain_names(model).items() if p.ndim > 1}


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
    present = _nonzeros(model)
    if any(present.get(name) != count for name, count in content["nonzeros"].items()):
        raise InvalidValue(
            f"{folder / STATE} belongs to other weights than those that resume_from_checkpoint has loaded. Name the "
            "checkpoint's folder in TrainingArguments(resume_from_checkpoint=...) as well."
        )
    return content["pruner"]  # type: ignore[no-any-return]
