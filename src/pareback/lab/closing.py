"""The end of a training: the model lands on its budget, its batch norms catch up, it is measured and written."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runs.folder import RunFolder
from .best import Best
from .data.sources import Source
from .models.learning import frozen_norms
from .recalibration import Figures, Recalibration
from .recipe.schema import Recipe
from .train import outcome
from .train.distributed import Team
from .train.evaluate import Judge
from .train.state import Parts
from .train.step import Sums


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
        if (
            best.epoch is not None and not is_best
        ):  # the last thing that is done with the model: other weights take the place of its own
            model.load_state_dict(best.weights)
        return {
            "accuracy": figures[f"{self._judge.chooses_by}_accuracy"],
            "accuracy_before_finish": row[f"{self._judge.chooses_by}_accuracy"],
            "test_loss": figures.get("test_loss"),
            "recalibration": renewed,
            **average,
            **self._choice(figures, best, (figures, renewed) if is_best else None),
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

    def _choice(self, last: Figures, best: Best, known: tuple[Figures, dict[str, Any] | None] | None) -> dict[str, Any]:
        """Return what test images say of a run that was judged by others, and what both say of its best epoch.

        Nothing where no images are held out: then ``accuracy`` is that on the test images. Otherwise it is that on the
        images that are held out, by which anybody may choose between runs. ``known`` is what was found of the best
        epoch if it is the last.
        """
        if self._judge.chooses_by != "val":
            return {}
        model = self._parts.model
        figures, renewed = known or self._recalibrated(model, self._figures(model), self._figures)
        self._save(model, "best")
        nonzeros = sum(int(parameter.count_nonzero()) for parameter in model.parameters())
        about = {"nonzeros": nonzeros, "recalibration": renewed, **_named(figures)}
        return {"measured_on": "val", **_named(last), "best": {"epoch": best.epoch, **about}}

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
