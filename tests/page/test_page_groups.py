"""Means over seeds, the Pareto front, lines' names and looks, and which runs the page keeps in full."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from page_runs import content, curve, write

from pareback.page import datasets
from pareback.page.charts.theme import DARK, DASHES, LIGHT, SHAPES, legend_columns, looks
from pareback.page.details import chosen, detail, ranked, spaced
from pareback.page.document import page
from pareback.page.figures import charts_of
from pareback.page.groups import TaskRuns
from pareback.page.references import references
from pareback.page.report import StoreReport, collect


def report(folder: Path, *contents: Any, most: int = 100) -> StoreReport:
    return collect(write(folder / "runs", *contents), most=most)


def only(found: StoreReport) -> TaskRuns:
    assert len(found.tasks) == 1
    return found.tasks[0]


def test_seeds_of_a_point_are_averaged(tmp_path: Path) -> None:
    """Errors of 10.5 and 9.5 % average to 10, and the bar reaches from one to the other."""
    task = only(report(tmp_path, *curve(seeds=2)))
    assert len(task.points) == 6
    exact = next(point for point in task.points if point.level == "90 % zeros" and point.series == "exact budget")
    assert (exact.error.mean, exact.error.low, exact.error.high) == (10.0, 9.5, 10.5)
    assert [run.seed for run in exact.runs] == [0, 1]
    assert exact.counts["nonzeros"] is not None
    assert exact.counts["nonzeros"].mean == 400


def test_dense_and_thinned_networks_are_one_line_and_come_first(tmp_path: Path) -> None:
    task = only(report(tmp_path, *curve(seeds=1)))
    assert task.series == ["dense, thinned", "exact budget", "fixed-GA", "unconstrained"]
    assert [point.level for point in task.points[:2]] == ["dense", "thinned to 0.25"]
    assert task.dense is not None
    assert task.dense.error.mean == 10.0


def test_each_network_of_that_line_is_called_what_it_is(tmp_path: Path) -> None:
    """In the table, and where the front is put into words; a line without thinned networks is plainly dense."""
    task = only(report(tmp_path, *curve(seeds=1)))
    assert [point.method for point in task.points[:3]] == ["dense", "thinned", "exact budget"]
    assert [row["called"] for row in datasets.points(task)][:2] == ["dense", "thinned to 0.25"]
    assert only(report(tmp_path / "plain", content())).series == ["dense"]


def test_the_front_holds_what_nothing_beats(tmp_path: Path) -> None:
    """Thinned, fixed-GA and unconstrained ones are larger and worse than the exact budget of 90 %."""
    task = only(report(tmp_path, *curve(seeds=1)))
    front = {(point.series, point.level) for point in task.points if "nonzeros" in point.fronts}
    assert front == {("dense, thinned", "dense"), ("exact budget", "90 % zeros"), ("exact budget", "95 % zeros")}


def test_a_weight_less_does_not_make_up_for_points_of_error(tmp_path: Path) -> None:
    """299 non-zeros and four points more error are not on the front beside 300; 150 and four more are."""
    runs = [
        content("exact", accuracy=90.0, nonzeros=300, goal__kind="budget", goal__sparsity=0.9),
        content("level", accuracy=86.0, nonzeros=299, goal__kind="fixed", goal__sparsity=0.9),
        content("small", accuracy=86.0, nonzeros=150, goal__kind="budget", goal__sparsity=0.95),
    ]
    points = only(report(tmp_path, *runs)).points
    assert {point.runs[0].name for point in points if "nonzeros" in point.fronts} == {"exact", "small"}


def test_points_that_are_alike_share_the_front(tmp_path: Path) -> None:
    twins = [content(f"twin-{at}", goal__kind="fixed", goal__sparsity=0.9 + at / 1000) for at in range(2)]
    assert all("nonzeros" in point.fronts for point in only(report(tmp_path, *twins)).points)


def test_lines_of_one_method_are_told_apart_by_their_fields(tmp_path: Path) -> None:
    runs = [content(goal__kind="fixed", goal__sparsity=0.9, train__epochs=epochs) for epochs in (3, 4)]
    assert only(report(tmp_path, *runs)).series == ["fixed-BS, epochs 3", "fixed-BS, epochs 4"]


def test_lines_say_who_taught_them(tmp_path: Path) -> None:
    """By the name of the teacher's folder, the way to it where two have one name; without a teacher, nothing."""
    goal = {"goal__kind": "budget", "goal__sparsity": 0.9}
    runs = [content("a", **goal), content("b", **goal, teacher__run="runs/dense")]
    assert only(report(tmp_path / "one", *runs)).series == ["exact budget", "exact budget, taught by dense"]
    runs.append(content("c", **goal, teacher__run="old/dense"))
    assert only(report(tmp_path / "two", *runs)).series == [
        "exact budget",
        "exact budget, taught by dense (old/dense)",
        "exact budget, taught by dense (runs/dense)",
    ]


def test_fields_that_read_alike_leave_lines_apart(tmp_path: Path) -> None:
    """One pattern with a space in it, and two."""
    runs = [
        content(goal__kind="fixed", goal__sparsity=0.9, goal__include=include) for include in (("a b",), ("a", "b"))
    ]
    assert only(report(tmp_path, *runs)).series == ["fixed-BS, include a b", "fixed-BS, include a b #2"]


def test_networks_and_data_make_tasks_the_largest_first(tmp_path: Path) -> None:
    runs = [content(), content(model__name="conv"), content(model__name="conv", seed=1)]
    assert [task.name for task in report(tmp_path, *runs).tasks] == [
        "conv on digits, 10 classes",
        "lenet-300-100 on digits, 10 classes",
    ]


def test_errors_on_held_out_images_are_not_called_those_on_the_test(tmp_path: Path) -> None:
    """They are a task of their own, to which results of a paper on the test images do not belong."""
    wrn = {"model__name": "wrn", "data__kind": "npz", "data__path": "cifar100.npz"}
    found = report(tmp_path, content(**wrn), content(**wrn, data__val_share=0.1), content(**wrn, data__val_share=0.2))
    names = [task.name for task in found.tasks]
    assert names == ["WRN-16-8, images held out of cifar100, 10 classes", "WRN-16-8 on cifar100, 10 classes"]
    assert [reference.fits(name) for name in names for reference in references("table2")[:1]] == [False, True]
    assert "test error" not in page(found).lower()


def test_counts_that_are_missing_leave_a_point_out_of_their_chart_alone(tmp_path: Path) -> None:
    old = content()
    del old["flops"], old["dense_flops"]
    point = only(report(tmp_path, old)).points[0]
    assert point.counts["flops"] is None
    assert point.fronts == {"nonzeros", "bytes"}
    assert datasets.points(only(report(tmp_path, old)))[0]["flops"] is None


def test_runs_of_one_name_are_called_after_their_folders(tmp_path: Path) -> None:
    """Three recipes called digits, two of them deeper; a name that only its seeds share stays."""
    store = tmp_path / "runs"
    for place, share in (("dense", 0.8), ("demo/taught", 0.9), ("demo/other", 0.95)):
        write(store / place, content("digits", goal__kind="fixed", goal__sparsity=share))
        (store / place / "0000.json").rename(store / f"{place}.json")
    write(store, *(content("mine", seed) for seed in (0, 1)))
    found = collect(store)
    assert found.labels == ["mine", "mine (seed 1)", "demo/other", "demo/taught", "dense"]
    assert [run.name for run in found.runs][2:] == found.labels[2:]


def test_runs_called_like_a_folder_are_numbered(tmp_path: Path) -> None:
    runs = [content("same", goal__kind="fixed", goal__sparsity=share) for share in (0.8, 0.9)]
    assert sorted(report(tmp_path, *runs, content("0000")).labels) == ["0000", "0000 #2", "0001"]


# -- what is kept of single runs ---------------------------------------------------------------------------------------


def test_every_method_is_among_the_first_and_second_seeds_come_later(tmp_path: Path) -> None:
    task = only(report(tmp_path, *curve(seeds=2)))
    first = ranked(task)
    assert {run.method for run in first[:4]} == {"dense", "exact budget", "fixed-GA", "unconstrained"}
    assert [run.seed for run in first[:6]] == [0, 0, 0, 0, 0, 0]
    assert len({id(run) for run in first}) == 12


def test_no_more_runs_are_kept_in_full_than_asked(tmp_path: Path) -> None:
    found = report(tmp_path, *curve(seeds=3), most=5)
    assert len(found.runs) == 18
    assert len(found.details) == 5
    assert chosen([]) == []


def test_a_run_in_full_has_epochs_layers_and_histograms(tmp_path: Path) -> None:
    run = content(nonzeros=300, goal__kind="budget", goal__sparsity=0.9, train__epochs=4)
    (found,) = report(tmp_path, run).details.values()
    assert [row[0] for row in found["epochs"]] == [1, 2, 3, 4]
    assert found["epochs"][3][1:] == [25.0, 90.0, 90.0]
    assert found["epochs"][0][3] == pytest.approx(90 * (1 - 0.5**3))  # a quarter of the training, half of the ramp
    assert found["layers"] == [[f"blocks.{at}", 90.0, 1000] for at in range(3)]
    assert [layer["layer"] for layer in found["histograms"]] == [f"blocks.{at}: 10 % kept" for at in range(3)]


def test_long_runs_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    run = content(goal__kind="fixed", goal__sparsity=0.9, train__epochs=1000)
    (found,) = report(tmp_path, run).details.values()
    epochs = [row[0] for row in found["epochs"]]
    assert len(epochs) <= 120
    assert (epochs[0], epochs[-1]) == (1, 1000)


def test_epochs_that_were_tested_are_kept(tmp_path: Path) -> None:
    """Of 1,000 epochs ten were tested."""
    run = content(goal__kind="fixed", goal__sparsity=0.9, train__epochs=1000)
    for row in run["metrics"]:
        row["test_accuracy"] = 50.0 if row["epoch"] % 100 == 50 else None
    (found,) = report(tmp_path, run).details.values()
    assert sum(row[1] is not None for row in found["epochs"]) == 10


def test_epochs_that_were_judged_by_held_out_images_are_drawn(tmp_path: Path) -> None:
    """Their test images are looked at at the end alone."""
    run = content(goal__kind="fixed", goal__sparsity=0.9, train__epochs=3)
    for row in run["metrics"]:
        row |= {"test_accuracy": None, "val_accuracy": 60.0}
    (found,) = report(tmp_path, run).details.values()
    assert [row[1] for row in found["epochs"]] == [40.0] * 3


def test_dense_runs_have_histograms_and_no_layers(tmp_path: Path) -> None:
    (found,) = report(tmp_path, content()).details.values()
    assert found["layers"] == []
    assert found["histograms"][0]["threshold"] is None
    assert found["epochs"][0][2:] == [None, None]


def test_spacing_keeps_order() -> None:
    assert spaced([1, 2, 3], 5) == [1, 2, 3]
    assert spaced(list(range(100)), 3) == [0, 50, 99]
    assert detail.__doc__


# -- looks -------------------------------------------------------------------------------------------------------------


#: How colours look without one of the eye's three receptors (Machado, Oliveira and Fernandes, 2009), in linear RGB.
BLINDNESS = {
    "red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: Any, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def luminance(colour: str) -> float:
    return times(XYZ, linear(colour))[1]


def lab(light: list[float]) -> tuple[float, float, float]:
    shares = [value / white for value, white in zip(times(XYZ, light), (0.95047, 1.0, 1.08883), strict=True)]
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["day", "night"])
@pytest.mark.parametrize("missing", BLINDNESS)
def test_colours_differ_to_the_colour_blind(missing: str, theme: dict[str, Any]) -> None:
    """Two colours are told apart from a distance of about 2; lines that are thin need more."""
    seen = [times(BLINDNESS[missing], linear(colour)) for colour in [*theme["colours"], theme["ink"]]]
    places = [lab([min(1.0, max(0.0, value)) for value in light]) for light in seen]
    assert min(math.dist(one, two) for one, two in combinations(places, 2)) >= 20


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["day", "night"])
def test_lines_stand_out_and_text_can_be_read(theme: dict[str, Any]) -> None:
    """Contrasts of WCAG 2: 3 for graphics, 4.5 for text."""

    def contrast(colour: str) -> float:
        one, two = sorted((luminance(colour), luminance(theme["paper"])))
        return (two + 0.05) / (one + 0.05)

    assert min(contrast(colour) for colour in [*theme["colours"], theme["bound"]]) >= 3.0
    assert min(contrast(theme[name]) for name in ("ink", "muted")) >= 4.5


def test_lines_differ_in_more_than_their_colour() -> None:
    found = looks([True, *[False] * 6])
    pairs = set(zip(map(str, found["dashes"]), found["shapes"], strict=True))
    assert len(pairs) == 7
    assert found["colours"] == ["ink", 0, 1, 2, 3, 4, 5]
    assert len(SHAPES) != len(DASHES)


def test_dense_lines_are_told_apart_too() -> None:
    """The dense network and its thinned equivalents in one chart."""
    found = looks([True, False, True, True])
    assert found["colours"] == ["ink", 0, "muted", "muted"]
    assert len({str(dash) for dash, colour in zip(found["dashes"], found["colours"], strict=True) if colour != 0}) == 3


def test_three_layers_have_room(tmp_path: Path) -> None:
    """Their chart is not as flat as three lines of text."""
    found = report(tmp_path, content(goal__kind="fixed", goal__sparsity=0.9))
    assert dict(charts_of(found, only(found)))["layers"]["height"] >= 150


def test_legends_have_as_many_columns_as_fit() -> None:
    assert legend_columns(["a" * 20] * 6, 640) == 3
    assert legend_columns(["a" * 400], 300) == 1
    assert legend_columns([], 300) == 1


def test_what_only_guesses_is_on_no_front_and_in_no_figure(tmp_path: Path) -> None:
    """The smallest network of all, with 10.2 % of ten classes right: the page lists it, and pictures leave it out."""
    broken = content("broken", 0, 10.2, 20, goal__kind="fixed", goal__sparsity=0.99)
    found = report(tmp_path, *curve(seeds=1), broken)
    task = only(found)
    point = next(point for point in task.points if point.at_chance)
    assert (point.called, point.fronts) == ("fixed-BS, 99 % zeros", frozenset())
    chart = dict(charts_of(found, task))["tradeoff-nonzeros"]
    assert max(row["error"] for row in chart["datasets"]["points"]) < 30
    assert chart["title"]["text"] == ["left out, no better than guessing: fixed-BS, 99 % zeros"]


def test_an_error_of_a_third_more_is_not_cut_off() -> None:
    """Errors of 23 to 30 % and one of 34 are in one axis: it would not be twice as long."""
    errors = [23.3, 23.57, 23.68, 23.73, 23.92, 23.95, 24.37, 24.37, 24.56, 25.81, 26.5, 29.92, 34.36]
    assert datasets.linear_end([{"error": error} for error in errors]) is None
    assert datasets.linear_end([{"error": error} for error in [*errors, 99.0]]) == 34.36


def test_lines_are_named_by_what_is_unlike_most_of_their_method(tmp_path: Path) -> None:
    """A default that is written out makes no other line, and what most lines share is not said of each."""
    runs = [
        content("plain", goal__kind="budget", goal__sparsity=0.9),
        content("written", goal__kind="budget", goal__sparsity=0.95, goal__ramp=0.5, goal__shrink="power"),
        content("short", goal__kind="budget", goal__sparsity=0.9, goal__ramp=0.25),
        content("decay", goal__kind="budget", goal__sparsity=0.9, optimizer__weight_decay=0.001),
        content("bare", goal__kind="budget", goal__sparsity=0.9, goal__straight_through=False),
        content("tuned", goal__kind="budget", goal__sparsity=0.9, model__pretrained="dense.pt"),
    ]
    names = ["exact budget", "exact budget, pretrained dense.pt", "exact budget, ramp 0.25"]
    names += ["exact budget, straight through off"]
    assert sorted(only(report(tmp_path, *runs)).series) == [*names, "exact budget, weight decay 0.001"]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["day", "night"])
@pytest.mark.parametrize("missing", BLINDNESS)
def test_kept_weights_differ_from_latent_ones_to_the_colour_blind(missing: str, theme: dict[str, Any]) -> None:
    """Bars that stand beside each other, in one histogram."""
    kept, latent = (times(BLINDNESS[missing], linear(theme[name])) for name in ("bars", "pale"))
    assert math.dist(*(lab([min(1.0, max(0.0, value)) for value in light]) for light in (kept, latent))) >= 20
