"""Pruning in Lightning's Trainer.

``Trainer(..., callbacks=[Prune(pb.Budget(sparsity=0.9))])`` is all there is to write.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from ..errors import InvalidUse, InvalidValue
from ..goals.goal import Goal
from ..pruning.hooks import unwrapped
from ..pruning.state import whole_state
from ..report import Report
from ..sharding import is_sharded, whole
from .averaging import PrunedAverage, PrunedSwa
from .best import BestAfterRamp, is_lightnings
from .session import Session

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise InvalidUse(
            "Lightning is not installed, which this callback is for. pip install 'pareback[frameworks]' installs it."
        ) from error


class LightningPrune(Callback):  # type: ignore[misc]
    """A callback that trains a ``LightningModule`` to a goal.

    Args:
        goal: :class:`~pareback.Budget`, :class:`~pareback.Fixed` or :class:`~pareback.Unconstrained`.
        options: those of :class:`~pareback.Pruner`; ``total_steps`` is the trainer's own unless it is given.

    Every checkpoint that is written after the ramp meets the budget exactly. Its state lies in the checkpoint, and
    ``fit(ckpt_path=...)`` goes on bit for bit. The sparsity and each limit are logged. After ``fit`` the model is an
    ordinary one with zeros in it, and ``report`` says how many; a second ``fit`` keeps them.
    """

    def __init__(self, goal: Goal, **options: Any) -> None:
        self._session = Session(goal, options)
        self._restored: dict[str, Any] | None = None  # Lightning restores callbacks before there is an optimizer
        self._averages: dict[int, PrunedAverage | PrunedSwa] = {}
        self._best: BestAfterRamp | None = None  # while a training lasts

    @property
    def pruner(self) -> Any:
        """The pruner, from the beginning of the training on."""
        return self._session.pruner

    @property
    def report(self) -> Report:
        """What was reached, after ``fit``."""
        return self._session.report

    # -- the beginning -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be pruned, and stand between averages and the model."""
        self._restored = self._best = None  # of validate(ckpt_path=...), or of a fit that was interrupted
        if is_lightnings(trainer.strategy, "FSDPStrategy"):
            raise InvalidValue(
                "Trainer(strategy='fsdp') flattens parameters, so tensors cannot be told apart. Use "
                "strategy=ModelParallelStrategy() and call fully_shard in configure_model."
            )
        if stage == "fit":
            _land_weights_alone(trainer, self._session)
        for callback in trainer.callbacks if stage == "fit" else []:
            if id(callback) in self._averages:
                continue
            if is_lightnings(callback, "WeightAveraging"):
                self._averages[id(callback)] = PrunedAverage(callback, self._session)
            elif is_lightnings(callback, "StochasticWeightAveraging"):
                self._averages[id(callback)] = PrunedSwa(callback, self._session)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the pruner; model and optimizers are restored by now."""
        optimizers = [unwrapped(one) for one in trainer.optimizers]
        if all(is_lightnings(one, "_MockOptimizer") for one in optimizers):
            raise InvalidUse(
                "configure_optimizers() returned nothing, and a model is pruned in the steps of its optimizers. Return "
                "those that manual optimization steps, too."
            )
        restored, self._restored = self._restored, None
        if restored and restored["pruner"] is None:
            self._session.keep_zeros(pl_module, optimizers)
        else:
            steps = None if "total_steps" in self._session.options else _total_steps(trainer, pl_module)
            if steps is not None and restored is None and self._session.pruner is None:
                steps -= _steps_done(trainer, pl_module)  # of a dense training that is resumed
            self._check_length(steps)
            self._session.begin(pl_module, optimizers, steps, restored and restored["pruner"])
        self._best = BestAfterRamp(trainer, self._session)
        for average in self._averages.values():
            average.begin()

    def _check_length(self, steps: int | None) -> None:
        """Ask in Lightning's words for the length of a training whose target grows."""
        options, ramp = self._session.options, self._session.options.get("ramp")
        grows = self._session.goal.usual_ramp if ramp is None else ramp
        if steps is None and "total_steps" not in options and grows:
            raise InvalidValue(
                "The target grows over a share of the training, and this one has no end: Trainer(max_epochs=-1), or "
                "a loader without a length. Give Trainer(max_steps=...), or Prune(goal, total_steps=...) with the "
                "steps of the optimizer that you expect; Prune(goal, ramp=0) prunes to the full target at once."
            )

    # -- in training -------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the sparsity and each limit, as often as the trainer logs."""
        if self._session.at_work is not None and trainer._logger_connector.should_update_logs:
            self.log_dict(self._session.figures())
        if self._best is not None:
            self._best.after_batch(trainer.is_last_batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let what is best be chosen after the ramp."""
        if self._best is not None:
            self._best.look()

    on_train_epoch_end = on_validation_start

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let what is saved meet the goal exactly, where it is asked for in full."""
        pruner = self._session.at_work
        if pruner is None:
            return
        landed = pruner.landed_tensors()
        by_id = {id(p): landed[name] for name, p in zip(pruner.names, pruner.parameters, strict=True) if landed}
        # An average's callback has moved the model's own weights elsewhere, if it came first.
        part = "current_model_state" if "current_model_state" in checkpoint else "state_dict"
        weights = dict(checkpoint[part])
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            if id(parameter) in by_id:
                value = by_id[id(parameter)]
                if name not in weights or not is_sharded(weights[name]):  # all in one file: every rank has to ask
                    value = whole(value)
                if name in weights:
                    weights[name] = value.to(weights[name].device)
        checkpoint[part] = weights

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs; after the end, that there is nothing more to prune."""
        pruner = self._session.pruner
        if pruner is None:
            return self._restored or {}
        if pruner.finished:
            return {"pruner": None}
        return {"pruner": whole_state(pruner.state_dict())}  # Lightning writes callbacks once, not once per rank

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the training begins."""
        self._restored = state_dict or None

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Land on the goal."""
        if self._best is not None:
            self._best.end()
            self._best = None
        self._session.end()


Prune = LightningPrune


def _land_weights_alone(trainer: Any, session: Session) -> None:
    """Let files of ``save_weights_only=True`` meet the goal, too: of those Lightning tells no callback."""
    plain = trainer.save_checkpoint
    if getattr(plain, "session", None) is session:
        return

    def save_checkpoint(filepath: Any, weights_only: bool | None = None, *rest: Any, **options: Any) -> None:
        pruner = session.at_work if weights_only else None
        with nullcontext() if pruner is None else pruner.landed():
            plain(filepath, weights_only, *rest, **options)

    save_checkpoint.session = session  # type: ignore[attr-defined]
    trainer.save_checkpoint = save_checkpoint


def _steps_done(trainer: Any, module: Any) -> int:
    """Return the rounds of optimizer steps that the trainer has taken before."""
    return int(trainer.global_step) // (1 if module.automatic_optimization else len(trainer.optimizers))


def _total_steps(trainer: Any, module: Any) -> int | None:
    """Return the rounds of optimizer steps that the trainer is going to take."""
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps) or steps < 1:
        return None  # the pruner can do without it, unless its target grows
    several = 1 if module.automatic_optimization else len(trainer.optimizers)
    if steps == trainer.max_steps:
        return int(steps) // several  # max_steps counts those of every optimizer
    for callback in trainer.callbacks:
        # It appends an epoch that trains nothing, to measure the statistics of batch norm.
        if is_lightnings(callback, "StochasticWeightAveraging") and callback._model_contains_batch_norm:
            steps -= steps // trainer.max_epochs
    return int(steps)
