"""A recipe at work: its epochs, checkpoints and landing."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ... import files
from ...artifact.intact import hashes
from ...errors import InvalidUse, InvalidValue, UserError
from ...pruning.watch import MANY_ZEROS
from ...runs import checkpoints
from ...runs.folder import RunFolder, check_ramp, check_rates, resume_command, started
from ...runs.origins import changed, origins, warn_of_other_pixels, warn_of_seen_images, weights_at
from .. import environment
from ..best import Best, landed
from ..closing import Closing
from ..data.mixing import Mixing
from ..data.sources import Source, open_source, skipped, steps_per_epoch, val_size
from ..models.zoo import expected
from ..recipe.reading import to_dict
from ..recipe.schema import Recipe
from . import interrupts, settings
from .distributed import Team
from .evaluate import Judge
from .optimizers import rate, warn_of_a_high_end
from .progress import Board, Clock, Display, Silent, UnheardError, as_said, header, progress
from .state import Parts
from .step import Sums, Tally, warn_of_a_layout

log = logging.getLogger(__name__)

#: Seconds between two looks at the running epoch.
_LOOK = 0.25

#: What CUDA itself may take of a GPU's memory for a process, in bytes.
_CONTEXT = 2**30


class Training:
    """One recipe at work in its folder, and how far it has come."""

    def __init__(self, recipe: Recipe, here: Team, folder: RunFolder, clock: Clock, trust: bool = False) -> None:
        self._recipe, self._team, self._folder, self._clock = recipe, here, folder, clock
        if here.device.type == "cuda":  # rows of a table are trained one after another in one process
            torch.cuda.reset_peak_memory_stats(here.device)
        self._source = _opened(recipe, here)
        self._per_epoch = steps_per_epoch(self._source, recipe.data.batch_size)
        self._total = recipe.train.epochs * self._per_epoch
        self._parts = Parts(recipe, here, self._source, self._total, trust)
        self._origins = origins(recipe, self._source)
        self._step = self._parts.step
        per_process = recipe.data.batch_size // here.world
        self._judge = Judge(self._source, self._parts.forward, here, per_process, clock)
        self._best = Best()
        self._mixed = Mixing(recipe.train, len(self._source.classes), recipe.seed, here.rank)
        self._checkpoints = checkpoints.Checkpoints(folder.checkpoint)
        self._interrupts = interrupts.Interrupts()
        self._progress: Display = Silent()
        self._board = Board(None)
        self._epoch, self._within = 0, 0  # complete epochs, and steps of the one under way
        self._rows: list[dict[str, Any]] = []
        self._resumed = 0
        self._saved: int | None = None  # steps in the last checkpoint
        self._own = False  # whether this process wrote it
        self._shared = False  # whether others were seen on the GPU

    # -- states ----------------------------------------------------------------------------------------------------

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        other = changed(state.get("origins", {}), self._origins, self._recipe)
        if other:
            raise InvalidValue(
                f"The run in {str(self._folder.path)!r} cannot go on: {other}. Give what it was begun with, or train "
                "anew with another --out."
            )
        check_ramp(self._folder.path, state["recipe"], self._recipe, self._per_epoch)
        check_rates(self._folder.path, state["recipe"], self._recipe, self._per_epoch, self._parts.pruner)
        self._take_over(state["parts"])
        self._epoch, self._within, self._rows = state["epoch"], state["within"], state["rows"]
        self._clock.load(state["seconds"])
        self._best.load_state_dict(state.get("best"))
        self._resumed = state["resumed"] + 1
        self._shared = state.get("shared_gpu", False)  # its seconds are in the sum
        self._saved = self._steps
        if len(state["random"]) == self._team.world:
            settings.restore_random_state(state["random"][self._team.rank], self._team.device)

    def _take_over(self, state: dict[str, Any]) -> None:
        try:
            self._parts.load_state_dict(state)
        except UserError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:  # torch's, of names and shapes
            raise InvalidUse(
                f"The checkpoint {str(self._folder.checkpoint)!r} does not fit the recipe's network, which may have "
                "changed since. Put it back as it was, or begin anew with --force."
            ) from error

    def _save(self) -> None:
        """Write a checkpoint of this moment, in the background."""
        random = self._team.gather(settings.random_state(self._team.device))
        if self._team.leads:
            self._folder.hold()
            self._checkpoints.save(
                {
                    "recipe": to_dict(self._recipe),
                    "origins": self._origins,
                    "class_names": list(self._source.classes),
                    "epoch": self._epoch,
                    "within": self._within,
                    "rows": self._rows,
                    "seconds": self._clock.seconds(),
                    "resumed": self._resumed,
                    "shared_gpu": self._shared,
                    "random": random,
                    "best": self._best.state_dict(),
                    "parts": self._parts.state_dict(),
                }
            )
        self._saved, self._own = self._steps, True

    @property
    def _steps(self) -> int:
        return self._epoch * self._per_epoch + self._within

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, quiet: bool = True) -> dict[str, Any]:
        """Train to the end, write what came of it, and return it."""
        about = environment.describe(self._team.device) | {"processes": self._team.world}
        if self._resumed:
            about["start"] = started(self._folder.path).get("start", about["start"])
        if self._team.leads:
            warn_of_a_high_end(self._recipe, self._per_epoch)
            warn_of_a_layout(self._recipe, self._team.device)
            warn_of_seen_images(self._recipe)
            warn_of_other_pixels(self._recipe, self._source)
            if not self._resumed:
                _warn_of_zeros(self._recipe, self._parts.model)
            self._folder.begin(self._recipe, about, self._rows)
            self._board = Board(self._folder.tensorboard if self._recipe.train.tensorboard else None, self._epoch)
        self._progress = progress(self._recipe.train.epochs, self._per_epoch, quiet)
        try:
            self._progress.say(self._header())
            with self._interrupts.listening():
                while self._epoch < self._recipe.train.epochs:
                    self._train_epoch()
            result = self._land(about)
        except UnheardError:
            self._stop(interrupts.PIPE)
        except KeyboardInterrupt as error:
            self._checkpoints.wait()
            raise error if isinstance(error, interrupts.Interrupted) else self._stopped(signal.SIGINT) from error
        finally:
            self._progress.close()
            self._board.close()
            self._checkpoints.wait()
        if self._team.leads:
            self._folder.hold()
            result["files"] = hashes(self._folder.path)
            result["weights"] = weights_at(str(self._folder.path))  # as runs that start from it note them
            files.write_json(self._folder.result, result, alone=True)  # last: where it is, everything else is
            checkpoints.previous_of(self._folder.checkpoint).unlink(missing_ok=True)  # nobody goes on from there
        return self._team.share(result)

    def _header(self) -> str:
        pruner, model = self._parts.pruner, self._parts.model
        pruned = [] if pruner is None else [p.numel() for p in pruner.parameters]
        return header(self._recipe, self._source, sum(p.numel() for p in model.parameters()), pruned, self._per_epoch)

    def _train_epoch(self) -> None:
        began, first = time.monotonic(), self._within
        if not first:
            self._step.tally.clear()
        self._parts.learn()
        looked = began
        batches = islice(self._batches(), first, None)
        while (batch := self._next(batches)) is not None:
            if self._parts.pruner is not None:
                self._step.may_replay = self._parts.pruner.may_replay(self._steps)
            self._step(*self._mixed(*batch, self._epoch, self._within), self._rate())
            self._within += 1
            if not self._clock.is_started and self._step.settled:
                self._synchronize()
                self._clock.started()
                began, first = time.monotonic(), self._within
            if self._interrupts.asked is not None:
                self._stop(self._interrupts.asked)
            if time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                self._look(looked - began, first)
        self._close_epoch(began, first)

    def _next(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
        try:
            return next(batches, None)
        except Exception:
            # Ctrl-C reaches the processes that read images as well, and they may be gone first.
            if self._interrupts.asked is not None:
                self._stop(self._interrupts.asked)
            raise

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._source.batches(
            self._epoch,
            batch=self._recipe.data.batch_size,
            seed=self._recipe.seed,
            rank=self._team.rank,
            world=self._team.world,
        )

    def _rate(self, steps_ago: int = 0) -> float:
        recipe, step = self._recipe, self._steps - steps_ago
        return rate(recipe.schedule, recipe.optimizer.lr, step, self._per_epoch, self._total)

    def _look(self, seconds: float, first: int) -> None:
        """Show where the epoch stands, and stop if its loss is lost."""
        sums = self._step.tally.peek()
        if sums is None or sums.steps <= first:
            return
        if sums.bad is not None and self._team.world == 1:  # several processes agree on it at the epoch's end
            raise self._lost(sums.bad)
        pace = seconds / (sums.steps - first)
        left = pace * (self._total - self._epoch * self._per_epoch - sums.steps)
        self._progress.step(self._epoch + 1, sums, self._recipe.data.batch_size / pace, left)

    def _close_epoch(self, began: float, first: int) -> None:
        sums = self._agreed()
        trained = time.monotonic() - began
        self._clock.started()
        self._clock.add("train", trained)
        self._shared = self._shared or self._shares_gpu()
        last = self._epoch + 1 == self._recipe.train.epochs
        judged = self._judged(last) if last or (self._epoch + 1) % self._recipe.train.evaluate_every == 0 else None
        images = (self._within - first) * self._recipe.data.batch_size
        row = {
            "epoch": self._epoch + 1,
            "step": self._steps,
            "lr": self._rate(steps_ago=1),
            "loss": sums.mean_loss,
            "accuracy": sums.accuracy,
            "test_loss": None,
            "test_accuracy": None,
            **self._measured(judged),
            **self._sparsity(),
            "images_per_second": images / trained if images else None,
            "seconds": self._clock.total(),
        }
        self._rows.append(row)
        self._epoch, self._within = self._epoch + 1, 0
        if self._team.leads:
            self._folder.hold()
            self._folder.append(row)
            self._board.add(row)
        left = (time.monotonic() - began) * (self._recipe.train.epochs - self._epoch)
        self._progress.epoch(as_said(row, self._recipe), left)
        if last or self._epoch % self._recipe.train.checkpoint_every == 0:
            self._save()

    def _agreed(self) -> Sums:
        """Return the epoch's sums over all processes; raise where anything is not finite, before it is saved."""
        mine = self._step.tally.read()
        bad = [step for step in self._team.gather(mine.bad) if step is not None]
        if bad:
            raise self._lost(min(bad))
        if mine.steps != self._per_epoch:
            raise RuntimeError(f"The data gave {mine.steps} batches in an epoch of {self._per_epoch}.")
        if not self._parts.finite():
            raise self._lost(self._within, "weights are")
        sums = self._step.tally.sums.clone()
        self._team.add(sums)
        return Tally.sums_of(sums)

    def _lost(self, step: int, what: str = "loss is") -> FloatingPointError:
        """Return the error of numbers that are not finite, at a step (from 1) of the present epoch."""
        done = self._epoch * self._per_epoch + step
        file = repr(str(self._folder.checkpoint))
        if self._saved is None:
            kept = "no checkpoint had been written yet"
        elif self._own:
            kept = f"the last good checkpoint is {file}, after step {self._saved}"
        else:  # nobody knows whether it is good: it was read, and nothing good has come of it
            kept = f"it had gone on from {file}, after step {self._saved}, which may be damaged"
        return FloatingPointError(
            f"The {what} not finite at step {done} (epoch {self._epoch + 1}); {kept}. Train anew with a lower "
            "optimizer.lr, or with optimizer.clip=1.0."
        )

    def _stop(self, number: int) -> NoReturn:
        """Save this step's state, or leave the last checkpoint where processes cannot agree on one, and stop."""
        if self._team.world == 1:
            bad = self._step.tally.read().bad
            if bad is not None:
                raise self._lost(bad)
            if not self._parts.finite():
                raise self._lost(self._within, "weights are")
            self._save()
        self._checkpoints.wait()
        raise self._stopped(number)

    def _stopped(self, number: int) -> interrupts.Interrupted:
        saved = "before the first step" if self._saved is None else f"after step {self._saved}"
        again = resume_command(self._folder.path)
        return interrupts.Interrupted(f"Stopped; saved {saved} of {self._total}. Go on with: {again}", number)

    # -- what came of it -------------------------------------------------------------------------------------------

    def _judged(self, last: bool) -> Sums:
        """Measure the epoch on the test images; where others are held out, on those, as finishing now leaves it."""
        self._team.align(self._parts.model)
        if self._judge.chooses_by == "test":
            return self._judge(self._parts.model, "test")
        with landed(self._parts.pruner):
            sums = self._judge(self._parts.model, "val")
            self._best.consider(self._epoch + 1, sums, self._parts.model, self._parts.pruner, last)
        return sums

    def _measured(self, judged: Sums | None) -> dict[str, float | None]:
        part = self._judge.chooses_by
        loss, accuracy = (None, None) if judged is None else (judged.mean_loss, judged.accuracy)
        return {f"{part}_loss": loss, f"{part}_accuracy": accuracy}

    def _sparsity(self) -> dict[str, float | int | None]:
        if self._parts.pruner is None:
            return {"sparsity": None, "nonzeros": None}
        nonzeros = sum(self._parts.pruner.counts())
        return {
            "sparsity": 1.0 - nonzeros / sum(p.numel() for p in self._parts.pruner.parameters),
            "nonzeros": nonzeros,
        }

    def _land(self, about: dict[str, Any]) -> dict[str, Any]:
        """Finish the pruner, evaluate the plain model that is left and write it; return the result."""
        if self._team.leads:
            self._folder.hold()
        held = {"val": val_size(self._source)} if val_size(self._source) else {}
        closing = Closing(self._recipe, self._team, self._folder, self._source, self._parts, self._judge)
        return {
            "name": self._recipe.name,
            "seed": self._recipe.seed,
            **closing(self._rows[-1], self._best),
            "epochs": self._epoch,
            "steps": self._steps,
            "seconds": self._clock.seconds(),
            "peak_memory": self._peak_memory(),
            "shared_gpu": self._shared,
            "resumed": self._resumed,
            "recipe": to_dict(self._recipe),
            "origins": self._origins,
            "environment": about,
            "classes": len(self._source.classes),
            "class_names": list(self._source.classes),
            "images": {"train": self._source.size, **held, "test": self._source.test_size},
            **({"skipped_images": list(skipped(self._source))} if skipped(self._source) else {}),
            "shape": list(self._source.shape),
            **_normalisation(self._source),
            "complete": True,
        }

    def _peak_memory(self) -> int | None:
        """Return the most bytes of GPU memory that were in use at once since the training was begun or resumed."""
        return torch.cuda.max_memory_allocated(self._team.device) if self._team.device.type == "cuda" else None

    def _shares_gpu(self) -> bool:
        """Whether the GPU's memory holds more than this process has, so that its seconds are not its own."""
        if self._team.device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self._team.device)
        return total - free - torch.cuda.memory_reserved(self._team.device) > _CONTEXT * self._team.world

    def _synchronize(self) -> None:
        if self._team.device.type == "cuda":
            torch.cuda.synchronize(self._team.device)


def _opened(recipe: Recipe, here: Team) -> Source:
    """Open the images: the first process before the others, who find noted which of them can be read."""
    expects = expected(recipe.model)
    if here.world == 1 or recipe.data.kind != "folder":
        return open_source(recipe.data, here.device, expects)
    source: Source | None = None
    problem: Exception | None = None
    if here.leads:
        try:
            source = open_source(recipe.data, here.device, expects)
        except UserError as error:
            problem = error
    problem = here.share(problem)
    if problem is not None:
        raise problem
    return open_source(recipe.data, here.device, expects) if source is None else source


def _warn_of_zeros(recipe: Recipe, model: nn.Module) -> None:
    """Say so where a network that was pruned before is trained without a goal, and fills up again."""
    if recipe.goal.kind != "dense" or recipe.model.pretrained is None:
        return
    tensors = [p.detach() for p in model.parameters() if p.ndim >= 2]
    size = sum(tensor.numel() for tensor in tensors)
    zeros = size - sum(int(tensor.count_nonzero()) for tensor in tensors)
    if zeros > MANY_ZEROS * size:
        log.warning(
            "%.1f %% of the weights of %s are zero, and goal.kind=dense fills them. To keep as many, write "
            "goal.kind=budget, goal.sparsity and goal.ramp=0.",
            *(100.0 * zeros / size, recipe.model.pretrained),
        )


def _normalisation(source: Source) -> dict[str, dict[str, list[float]]]:
    """Return what images are normalised with, which the network goes by; other images are to be normalised alike."""
    mean, std = (list(getattr(source, name, ())) for name in ("mean", "std"))
    return {"normalisation": {"mean": mean, "std": std}} if mean and std else {}
