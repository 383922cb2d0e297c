"""The bar chart of a comparison: a panel for each case, ratios to the best dense runtime."""

from __future__ import annotations

from pathlib import Path

from pareback.bench.chart import bars, draw
from pareback.bench.comparison import Comparison
from pareback.bench.contest import Case, Outcome


def case(batch: int) -> Case:
    """Eager takes 4 ms, onnxruntime 2, the engine 0.5; one has no time."""
    return Case(
        batch,
        1,
        (
            Outcome("eager", "eager", "dense", rounds=[4e-3] * 3, error=0.0),
            Outcome("onnxruntime", "onnxruntime", "dense", rounds=[2e-3] * 3, error=0.0),
            Outcome("openvino", "openvino", "dense", problem="it is not installed"),
            Outcome("engine", "engine", "engine", rounds=[5e-4] * 3, error=0.0),
        ),
    )


def test_bars_are_ratios_to_the_best_dense_runtime() -> None:
    assert list(bars(case(1)).values()) == [0.5, 1.0, 4.0]
    assert bars(Case(1, 1, ())) == {}


def test_a_picture_is_written(tmp_path: Path) -> None:
    """Also where nothing could be measured."""
    for number, cases in enumerate([(case(1), case(16)), ()]):
        path = tmp_path / f"{number}.png"
        draw(Comparison("a model", "", {}, cases, (), {"cpu": "a processor"}), path)
        assert path.read_bytes().startswith(b"\x89PNG")
