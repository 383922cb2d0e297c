"""Plots and histograms from run folders: numbers checked by hand, pictures that fit what they show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.reproduce import plots
from pareback.runs.record import Histogram, Record, histograms_of, read_record, write_record
from pareback.shrink import shrink


def record(name: str = "run", layers: int = 3, epochs: int = 4, sparsity: float | None = 0.9) -> Record:
    """A run with layers of growing sparsity, without any training."""
    pruned = sparsity is not None
    tensors = [
        {
            "name": f"blocks.{number // 2}.conv{number % 2 + 1}.weight",
            "shape": [10, 10, 1, 1],
            "size": 100,
            "nonzeros": 100 - number if pruned else 100,
            "pruned": pruned,
            "sigma": 1.0 if pruned else None,
            "threshold": 1.5 if pruned else None,
        }
        for number in range(layers)
    ]
    metrics = [
        {"epoch": epoch, "test_accuracy": 50.0 + epoch, "sparsity": sparsity and sparsity * epoch / epochs}
        for epoch in range(1, epochs + 1)
    ]
    histogram = Histogram("blocks.0.conv1.weight", [10, 10, 1, 1], 100, 10, 3.0, [0, 1, 2, 0, 2], 1.0, 1.5)
    result = {
        "name": name,
        "seed": 0,
        "accuracy": 60.0,
        "sparsity": sparsity or 0.0,
        "pruned_weights": 100 * layers if pruned else 0,
        "tensors": tensors,
        "recipe": {"model": {"thin": None}},
    }
    return Record(result, tuple(metrics), (histogram,) if pruned else ())


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of whatever is drawn, to look into."""
    seen: list[Any] = []
    real = plots.figure

    @contextmanager
    def figure(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        with real(*args, **kwargs) as (drawn, axes):
            yield drawn, axes
            drawn.canvas.draw()
            seen.append((drawn, axes))

    monkeypatch.setattr(plots, "figure", figure)
    return seen


# -- per-layer sparsity ----------------------------------------------------------------------------------------------


def test_layers_show_each_runs_sparsity(panels: list[Any], tmp_path: Path) -> None:
    """A line per run, a tick per layer, percentages of zeros."""
    path = plots.plot_layers({"": [record("a"), record("b")]}, tmp_path / "new" / "layers.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
    panel = panels[0][1][0][0]
    assert [list(line.get_ydata()) for line in panel.lines] == [pytest.approx([0.0, 1.0, 2.0])] * 2
    assert [tick.get_text() for tick in panel.get_xticklabels()] == [
        "blocks.0.conv1",
        "blocks.0.conv2",
        "blocks.1.conv1",
    ]
    assert [text.get_text() for text in panels[0][0].legends[0].get_texts()] == [
        "a (90.00 % in all)",
        "b (90.00 % in all)",
    ]


def test_nothing_overlaps_with_17_layers_and_six_runs(panels: list[Any], tmp_path: Path) -> None:
    """Ticks keep apart from each other, the legend from the data, and everything stays inside the picture."""
    plots.plot_layers({"": [record(f"budget-wavg-{number}", 17) for number in range(6)]}, tmp_path / "layers.png")
    drawn, axes = panels[0]
    boxes = [tick.get_window_extent() for tick in axes[0][0].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
    legend = drawn.legends[0].get_window_extent()
    assert legend.y1 <= min(box.y0 for box in boxes)
    assert 0 <= legend.x0 < legend.x1 <= drawn.bbox.x1
    looks = {(line.get_color(), line.get_marker()) for line in axes[0][0].lines}
    assert len(looks) == 6


def test_dense_equivalents_have_lines_of_their_own() -> None:
    """The dense network and two thinned ones."""
    records = [record(name, sparsity=None) for name in ("dense", "thin-0.15", "thin-0.05")]
    for thin in records[1:]:
        thin.result["recipe"]["model"]["thin"] = 0.1
    assert len({(look["color"], look["linestyle"]) for look in plots.look(records)}) == 3


# -- convergence -----------------------------------------------------------------------------------------------------


def test_convergence_shows_accuracy_and_sparsity(panels: list[Any], tmp_path: Path) -> None:
    """The dense run in black and above alone; epochs that were not evaluated are left out."""
    dense, pruned = record("dense", sparsity=None), record("pruned")
    dense.metrics[1]["test_accuracy"] = None
    plots.plot_convergence({"": [dense, pruned]}, tmp_path / "convergence.png")
    above, below = (row[0] for row in panels[0][1])
    assert [list(line.get_xdata()) for line in above.lines] == [[1, 3, 4], [1, 2, 3, 4]]
    assert above.lines[0].get_color() == plots.DENSE
    assert [list(line.get_ydata()) for line in below.lines] == [pytest.approx([22.5, 45.0, 67.5, 90.0])]


def test_a_run_of_one_epoch_is_a_marker(panels: list[Any], tmp_path: Path) -> None:
    """A line of one point shows nothing; where there are more epochs, markers would hide it."""
    plots.plot_convergence({"": [record("one", epochs=1), record("four")]}, tmp_path / "convergence.png")
    for (panel,) in panels[0][1]:
        assert [line.get_marker() not in ("", "None") for line in panel.lines] == [True, False]


def test_what_falls_after_the_first_epochs_is_seen(panels: list[Any], tmp_path: Path) -> None:
    """Of twenty epochs the first lies below the axis, and a run that falls to 1 % in the tenth does not."""
    run = record(epochs=20)
    for row in run.metrics:
        row["test_accuracy"] = 1.0 if row["epoch"] == 10 else 0.5 if row["epoch"] == 1 else 70.0
    plots.plot_convergence({"": [run]}, tmp_path / "convergence.png")
    assert 0.5 > panels[0][1][0][0].get_ylim()[0] > -5
    for row in run.metrics:
        row["test_accuracy"] = 70.0 if row["epoch"] > 1 else 0.5
    plots.plot_convergence({"": [run]}, tmp_path / "convergence.png")
    assert panels[1][1][0][0].get_ylim()[0] > 60


def test_a_run_has_the_same_colour_in_every_plot(panels: list[Any], tmp_path: Path) -> None:
    """Dense and thinned runs, which have no layers to show, take none of the pruned runs' colours."""
    dense, thinned, pruned = record("dense", sparsity=None), record("thin", sparsity=None), record("pruned")
    thinned.result["recipe"]["model"]["thin"] = 0.15
    plots.plot_convergence({"": [dense, thinned, pruned]}, tmp_path / "convergence.png")
    plots.plot_layers({"": [pruned]}, tmp_path / "layers.png")
    colours = [line.get_color() for line in panels[0][1][0][0].lines]
    assert colours == [plots.DENSE, plots.THINNED, panels[1][1][0][0].lines[0].get_color()]


def test_first_epochs_do_not_squeeze_the_rest(panels: list[Any], tmp_path: Path) -> None:
    """Forty epochs at 70 % and above after one at 1 %: the axis begins near 70."""
    run = record(epochs=40)
    for row in run.metrics:
        row["test_accuracy"] = 1.0 if row["epoch"] == 1 else 70.0 + 0.1 * row["epoch"]
    plots.plot_convergence({"": [run]}, tmp_path / "convergence.png")
    low, high = panels[0][1][0][0].get_ylim()
    assert 69.0 < low < 71.0 < 74.0 < high < 75.0


def test_one_epoch_is_enough(tmp_path: Path) -> None:
    """A shortened run can be drawn, too, and groups stand side by side."""
    path = plots.plot_convergence({"one": [record(epochs=1)], "two": [record(epochs=1)]}, tmp_path / "convergence.png")
    assert path.exists()


# -- histograms ------------------------------------------------------------------------------------------------------


def result(threshold: float | None, shrink_: str | None, kind: str = "budget") -> dict[str, Any]:
    """What result.json says of one tensor of 2,000 weights."""
    entry = {"name": "w", "shape": [40, 50], "size": 2000, "pruned": threshold is not None}
    entry |= {"sigma": None if threshold is None else 1.0, "threshold": threshold}
    goal = {"kind": kind, "enforce": "exact", "shrink": shrink_, "min_size": 1000}
    return {"tensors": [entry], "recipe": {"goal": goal}}


@pytest.mark.parametrize(("named", "exponent"), [("hard", math.inf), (None, 3.0), ("soft", 1.0)])
def test_histograms_undo_the_shrink(named: str | None, exponent: float, tmp_path: Path) -> None:
    """What is counted are the latent weights beyond the threshold, whatever the shrink made of them."""
    torch.manual_seed(0)
    latent = torch.randn(40, 50)
    save_file({"w": shrink(latent, 1.5, exponent)}, tmp_path / "w.safetensors")
    (found,) = histograms_of(result(1.5, named), tmp_path / "w.safetensors")
    kept = latent[latent.abs() >= 1.5]
    assert found.nonzeros == len(kept)
    assert sum(found.counts) >= 0.999 * len(kept)
    middles = [(low + high) / 2 for low, high in pairwise(found.edges)]
    assert all(abs(middle) >= 1.5 - found.width for middle, count in zip(middles, found.counts, strict=True) if count)
    for place in (2.0, -2.0):
        bin_ = next(number for number, low in enumerate(found.edges) if low <= place < low + found.width)
        low = found.edges[bin_]
        assert found.counts[bin_] == pytest.approx(int(((kept >= low) & (kept < low + found.width)).sum()), abs=1)


@pytest.mark.parametrize("goal", [{}, {"enforce": "squared"}, {"straight_through": False}])
def test_a_run_keeps_the_distribution_of_its_latent_weights(goal: dict[str, Any], tmp_path: Path) -> None:
    """All weights of each pruned tensor, in the bins of the kept ones, and the same beyond the threshold."""
    recipe = override(Recipe(), {"goal.kind": "budget", "goal.sparsity": 0.8, "train.epochs": 2, "train.device": "cpu"})
    train(override(recipe, {f"goal.{name}": value for name, value in goal.items()}), tmp_path / "run", quiet=True)
    found = read_record(tmp_path / "run")
    assert len(found.histograms) == 3
    for histogram in found.histograms:
        assert histogram.latents is not None
        assert 0.99 * histogram.size < sum(histogram.latents) <= histogram.size
        beyond = [
            low > (histogram.threshold or 0) or high < -(histogram.threshold or 0)
            for low, high in pairwise(histogram.edges)
        ]
        kept = [(a, b) for a, b, far in zip(histogram.counts, histogram.latents, beyond, strict=True) if far]
        assert sum(abs(a - b) for a, b in kept) <= 0.02 * histogram.nonzeros + 2  # finish() moved thresholds a little
        assert sum(a for a, _ in kept) > 0.5 * histogram.nonzeros
    plots.plot_histograms([found], tmp_path / "histograms.png")
    write_record(found, tmp_path / "kept.json")
    assert read_record(tmp_path / "kept.json").histograms == found.histograms


def test_the_gaussian_counts_like_the_bins(tmp_path: Path) -> None:
    """Normal weights fill dense bins as the fitted Gaussian says, within chance."""
    torch.manual_seed(0)
    save_file({"w": 0.1 * torch.randn(40, 50)}, tmp_path / "w.safetensors")
    (found,) = histograms_of(result(None, None, "dense"), tmp_path / "w.safetensors")
    assert found.threshold is None
    assert found.sigma == pytest.approx(0.1, rel=0.05)
    total = sum(found.gaussian((low + high) / 2) for low, high in pairwise(found.edges))
    assert total == pytest.approx(2000, rel=0.01)
    assert sum(found.counts[40 - 5 : 40 + 6]) == pytest.approx(11 * found.gaussian(0.0), rel=0.15)


def test_an_empty_layer_and_missing_weights(tmp_path: Path) -> None:
    """A tensor of zeros has no counts; without the weights there is no histogram."""
    save_file({"w": torch.zeros(40, 50)}, tmp_path / "w.safetensors")
    (found,) = histograms_of(result(1.5, "hard"), tmp_path / "w.safetensors")
    assert (found.nonzeros, sum(found.counts)) == (0, 0)
    assert histograms_of(result(1.5, "hard"), tmp_path / "gone.safetensors") == ()


def test_histograms_show_threshold_and_gaussian(panels: list[Any], tmp_path: Path) -> None:
    """Bars, a bell and two lines; runs without histograms are left out, and none at all still makes a picture."""
    plots.plot_histograms([record(), record(sparsity=None)], tmp_path / "histograms.png")
    axes = panels[0][1]
    assert axes.shape == (1, 1)
    assert [line.get_xdata()[0] for line in axes[0][0].lines[1:]] == [-1.5, 1.5]
    assert axes[0][0].get_title() == "blocks.0.conv1, 10.00 % kept"
    assert plots.plot_histograms([record(sparsity=None)], tmp_path / "none.png").exists()


def test_kept_weights_are_seen_beside_a_whole_gaussian(panels: list[Any], tmp_path: Path) -> None:
    """Of 100,000 weights 1,000 are kept: their bars reach a tenth of the panel, and the bell ends within it."""
    full = record()
    few = Histogram("w.weight", [400, 250], 100_000, 1000, 1.0, [500, *[0] * 79, 500], 0.1, 0.9)
    none = Histogram("z.weight", [2, 50], 100, 0, 1.0, [0] * 81, 0.0, None)
    plots.plot_histograms([Record(full.result, full.metrics, (few, none))], tmp_path / "histograms.png")
    panel, empty = panels[0][1][0]
    top = panel.get_ylim()[1]
    assert max(panel.lines[0].get_ydata()) < top
    height = panel.transAxes.inverted().transform(panel.transData.transform((0.0, 500.0)))[1]
    assert height > 0.1
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["0", "1k", "5k", "10k"]
    assert len(empty.lines) == 0


def test_histograms_choose_layers_from_first_to_last(panels: list[Any], tmp_path: Path) -> None:
    """Of seven layers three are shown; a run with fewer leaves its last panels blank."""
    full = record()
    many = [Histogram(f"{n}.weight", [2, 50], 100, 10, 3.0, [1, 0, 1], 1.0, None) for n in range(7)]
    plots.plot_histograms([Record(full.result, full.metrics, tuple(many)), full], tmp_path / "histograms.png")
    axes = panels[0][1]
    assert [panel.get_title() for panel in axes[0]] == ["0: 2×50, dense", "3: 2×50, dense", "6: 2×50, dense"]
    assert [panel.axison for panel in axes[1]] == [True, False, False]


# -- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, as short as it gets."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("plots") / "run"
    goal = GoalRecipe("budget", sparsity=0.9)
    train(Recipe(data=DataRecipe(batch_size=256), goal=goal, train=TrainRecipe(epochs=2)), out, quiet=True)
    torch.set_num_threads(before)
    return out


def test_a_record_is_the_folder_without_weights(folder: Path, tmp_path: Path) -> None:
    """Written and read again it is the same but for the command line and rounding, and it is small."""
    whole = read_record(folder)
    write_record(whole, tmp_path / "rows" / "run.json")
    again = read_record(tmp_path / "rows" / "run.json")
    assert again.histograms == whole.histograms
    assert [row["epoch"] for row in again.metrics] == [1, 2]
    assert again.metrics[1]["loss"] == pytest.approx(whole.metrics[1]["loss"], abs=1e-6)
    assert {key for key in whole.result if whole.result[key] != again.result[key]} == {"environment"}
    assert again.result["environment"]["command"].startswith("pareback")
    assert (tmp_path / "rows" / "run.json").stat().st_size < 10_000


def test_a_record_holds_no_path_of_the_machine(folder: Path, tmp_path: Path) -> None:
    """Neither of the data nor of the program."""
    whole = read_record(folder)
    whole.result["recipe"]["data"]["path"] = "/home/someone/cifar100.npz"
    whole.result["environment"]["argv"] = ["/home/someone/pareback", "train", "--out", "/home/someone/runs/x"]
    write_record(whole, tmp_path / "run.json")
    assert "someone" not in (tmp_path / "run.json").read_text()
    again = read_record(tmp_path / "run.json").result
    assert (again["recipe"]["data"]["path"], again["environment"]["command"]) == (
        "cifar100.npz",
        "pareback train --out x",
    )


def test_numbers_on_a_logarithmic_axis_are_plain_and_apart(tmp_path: Path) -> None:
    """From 0.5 to 8 million parameters they read 6 × 10⁻¹, 2 × 10⁰, 3 × 10⁰…, one over the other."""
    with plots.figure(1, 2, (10.0, 4.4), tmp_path / "a.png") as (drawn, axes):
        panel = axes[0][0]
        panel.plot([0.5, 8.0], [0.0, 1.0])
        panel.set_xscale("log")
        plots.log_ticks(panel.xaxis)
        drawn.canvas.draw()
        low, high = panel.get_xlim()
        shown = [tick for tick in panel.get_xticklabels(which="both") if tick.get_text()]
        seen = [tick for tick in shown if low <= tick.get_position()[0] <= high]
        assert [tick.get_text() for tick in seen] == ["0.5", "1", "2", "5"]
        boxes = [tick.get_window_extent() for tick in seen]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_plots_take_a_real_run(folder: Path, tmp_path: Path) -> None:
    """And the same run gives the same bytes, so that committed pictures change with their runs alone."""
    run = read_record(folder)
    for plot in (plots.plot_layers, plots.plot_convergence):
        assert plot({"": [run]}, tmp_path / "a.png").read_bytes() == plot({"": [run]}, tmp_path / "b.png").read_bytes()
    assert plots.plot_histograms([run], tmp_path / "c.png").exists()


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    """In one sentence each."""
    with pytest.raises(FileNotFoundError, match="Give a run's folder or the file"):
        read_record(tmp_path / "gone.json")
    with pytest.raises(FileNotFoundError, match="holds no finished run"):
        read_record(tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is not the record of a run"):
            read_record(tmp_path / "bad.json")
