"""The end of a training: the model lands on its budget, its batch norms catch up, it is measured and written."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..runs.folder import RunFolder
from .best import Best, meets_its_goal
from .data.sources import Source
from .models.learning import frozen_norms
from .recalibration import Figures, Recalibration
from .recipe.schema import Recipe
from .train import outcome
from .train.distributed import Team
from .train.evaluate import Judge
from .train.state import Parts
from .train.step import Sums


class _Measured(NamedTuple):
    """An epoch's network in the end, and what came of new statistics for it."""

    epoch: int
    figures: Figures
    renewed: dict[str, Any] | None

    @property
    def rank(self) -> tuple[float, float]:
        """What is higher for the better of two, by the images that are held out."""
        return self.figures["val_accuracy"], -self.figures["val_loss"]


class Closing:
    """What a finished training leaves in its folder: the last model, the average and the best epoch's, and figures."""

    def __init__(
        self, recipe: Recipe, here: Team, folder: RunFolder, source: Source, parts: Parts, judge: Judge
    ) -> None:
        self._team, self._folder, self._source, self._parts, self._judge = here, folder, source, parts, judge
        self._recalibrated = Recalibration(recipe, here, source, parts.forward, judge, frozen_norms(parts.model))

    def __call__(self, row: dict[str, Any], best: Best) -> dict[str, Any]:
        """Finish the pruner, measure and write each model; ``row`` has the last epoch's metrics."""
        model, pruner = self._parts.model, self._parts.pruner
        counts = outcome.finish_and_count(model, pruner)
        counts |= outcome.flops(model, counts["tensors"], self._source.shape)
        is_best = best.holds(model)
        known = self._figures(model, None if pruner is not None else row)
        figures, renewed = self._recalibrated(model, known, self._figures)
        self._save(model, "model")
        average = self._average()
        last = _Measured(row["epoch"], figures, renewed)
        # The last thing that is done with the model: other weights take the place of its own.
        chosen = self._chosen(last, best, is_best) if self._judge.chooses_by == "val" else {}
        return {
            "accuracy": figures[f"{self._judge.chooses_by}_accuracy"],
            "accuracy_before_finish": row[f"{self._judge.chooses_by}_accuracy"],
            "test_loss": figures.get("test_loss"),
            "recalibration": renewed,
            **average,
            **chosen,
            **counts,
        }

    def _average(self) -> dict[str, Any]:
        if self._parts.average is None:
            return {"ema_accuracy": None}
        average = self._parts.average.pruned()
        self._team.align(average)
        figures, renewed = self._recalibrated(average, self._figures(average), self._figures)
        self._save(average, "average")
        found = {"ema_accuracy": figures[f"{self._judge.chooses_by}_accuracy"], "ema_recalibration": renewed}
        test = {"ema_test_accuracy": figures.get("test_accuracy")} if self._judge.chooses_by == "val" else {}
        return {**found, **test}

    def _chosen(self, last: _Measured, best: Best, is_best: bool) -> dict[str, Any]:
        """Return what test images say of a run that was judged by others, and what both say of its best epoch.

        ``accuracy`` is then that on the images that are held out, by which anybody may choose between runs. With new
        statistics the last epoch, ``last``, may be the best after all.
        """
        model, found = self._parts.model, last
        if best.epoch is not None and not is_best:
            meets, own = meets_its_goal(self._parts.pruner), {n: v.clone() for n, v in model.state_dict().items()}
            model.load_state_dict(best.weights)
            found = _Measured(best.epoch, *self._recalibrated(model, self._figures(model), self._figures))
            if meets and last.rank > found.rank:
                model.load_state_dict(own)
                found = last
        self._save(model, "best")
        nonzeros = sum(int(parameter.count_nonzero()) for parameter in model.parameters())
        about = {"nonzeros": nonzeros, "recalibration": found.renewed, **_named(found.figures)}
        epoch = best.epoch if is_best else found.epoch
        return {"measured_on": "val", **_named(last.figures), "best": {"epoch": epoch, **about}}

    def _figures(self, net: nn.Module, known: dict[str, Any] | None = None) -> Figures:
        """Measure a network on what is held out and on the test images; ``known`` has what was measured of it."""
        found: Figures = {}
        for part in {self._judge.chooses_by: None, self._judge.measures_on: None}:
            if known is not None and known.get(f"{part}_accuracy") is not None:
                found |= {f"{part}_{name}": known[f"{part}_{name}"] for name in ("accuracy", "loss")}
                continue
            sums: Sums = self._judge(net, part)
            found |= {f"{part}_accuracy": sums.accuracy, f"{part}_loss": sums.mean_loss}
        return found

    def _save(self, net: nn.Module, name: str) -> None:
        if self._team.leads:
            outcome.save(net, getattr(self._folder, name), self._source.classes)


def _named(figures: Figures) -> dict[str, float | None]:
    """Return all four figures, of which those on test images may not be known."""
    return {
        f"{part}_{name}": figures.get(f"{part}_{name}") for part in ("val", "test") for name in ("accuracy", "loss")
    }
