"""benchmarks/overhead.py host: every part gives rows that mean what their columns say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pareback as pb

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SCRIPTS = ("overhead", "host", "models")
Rows = list[dict[str, object]]


@pytest.fixture(scope="module")
def overhead() -> Iterator[ModuleType]:
    """The script, and beside it ``host`` in sys.modules."""
    pytest.importorskip("torchvision")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import host  # noqa: F401
        import overhead

        yield overhead
        for name in SCRIPTS:  # names that others may want
            del sys.modules[name]


@pytest.fixture(scope="module")
def rows(overhead: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What the command writes, for sizes as small as they can be."""
    out = tmp_path_factory.mktemp("host") / "host.json"
    words = ["host", "--parts", "step,lenet", "many", "--rounds", "1", "--repeats", "2", "--tensors", "2,3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["overhead.py", *words, "--counts", "10,20", "--out", str(out)])
        overhead.main()
    content = json.loads(out.read_text())
    assert content["rounds"] == 1
    assert content["seed"] == 0
    assert content["pareback"] == pb.__version__
    return list(content["rows"])


def _part(rows: Rows, name: str) -> Rows:
    return [row for row in rows if row["part"] == name]


def test_step_is_compared_with_sgd_on_the_same_tensors(rows: Rows) -> None:
    """Per number of tensors SGD's step, and three goals whose steps enter the package."""
    found = _part(rows, "step")
    goals = ["exact budget", "fixed-GA", "fixed-BS"]
    expected = [(tensors, name) for tensors in (2, 3) for name in ["SGD alone", *goals]]
    assert [(row["tensors"], row["variant"]) for row in found] == expected
    sgd, *pruned = found[:4]
    assert sgd["pruner_over_sgd"] == sgd["package_files"] == sgd["file_changes"] == 0
    for row in pruned:
        assert row["pruner_over_sgd"] == pytest.approx(row["microseconds"] / sgd["microseconds"] - 1, abs=0.1)
        assert row["python_calls"] > sgd["python_calls"] > 0
        assert row["package_files"] > 0


def test_lenet_is_compared_with_the_dense_network(rows: Rows) -> None:
    dense, *pruned = _part(rows, "lenet")
    assert dense["variant"] == "dense"
    assert dense["ratio"] == 1.0
    assert dense["aim"] is None
    assert len(pruned) == 3
    for row in pruned:
        assert row["aim"] == 1.3
        assert row["ratio"] == pytest.approx(row["microseconds"] / dense["microseconds"], rel=0.01)


def test_many_tensors_are_counted_per_thousand(rows: Rows) -> None:
    found = _part(rows, "many")
    assert [row["tensors"] for row in found] == [10, 20]
    for row in found:
        for act in ("constructor", "step", "finish"):
            assert row[f"{act}_seconds"] > 0
            per_1000 = 1000 * row[f"{act}_seconds"] / row["tensors"]
            assert row[f"{act}_seconds_per_1000"] == pytest.approx(per_1000, rel=0.1)
        assert row["sgd_step_seconds"] > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's account of a process")
def test_memory_is_counted_in_copies(overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients are one copy each; with latent weights two remain, and the peak is no less."""
    host = sys.modules["host"]
    monkeypatch.setattr(host, "SPREADS", (3,))  # one process is enough
    (row,) = host.memory_part(argparse.Namespace(weights=["10M"]))
    assert (row["weights"], row["tensors"]) == ("10M", 3)
    assert row["weights_copies"] == pytest.approx(1, abs=0.1)
    assert row["gradient_copies"] == pytest.approx(1, abs=0.1)
    assert row["between_steps_copies"] == pytest.approx(2, abs=0.3)
    assert row["peak_copies"] == max(row[f"{act}_copies"] for act in ("constructor", "steps", "finish"))
    assert row["peak_copies"] > 1.7


def test_models_are_timed_beside_their_own_dense_step(overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps, the host's time and the counts, here of a model that nobody compiles."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    options = argparse.Namespace(rounds=1, repeats=1)
    dense, again, pruned = sys.modules["host"].model_rows("tiny-encoder", options)
    assert [row["variant"] for row in (dense, again, pruned)] == ["dense", "dense again", "exact budget"]
    assert dense["ratio"] == 1.0
    assert dense["added_host_us"] == 0.0
    assert again["package_files"] == 0
    assert pruned["added_host_us"] == pytest.approx(pruned["host_us"] - dense["host_us"], abs=0.2)
    assert pruned["package_files"] > 0
    assert pruned["python_calls"] > dense["python_calls"] == again["python_calls"]
    per_layer = 128 * (3 * 128 + 128 + 2 * 512)
    assert pruned["pruned_weights"] == 2 * per_layer + 128 * 100


def test_traffic_counts_ways_between_files(
    overhead: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over to another file and back are two changes; a file outside the package is on nobody's account."""
    monkeypatch.setattr(pb, "__file__", str(tmp_path / "__init__.py"))
    names: dict[str, object] = {"elsewhere": lambda act: act()}
    sources = {"one.py": "def one(): two(); elsewhere(two); same()\ndef same(): pass", "two.py": "def two(): pass"}
    for file, source in sources.items():
        exec(compile(source, str(tmp_path / file), "exec"), names)
    found = sys.modules["host"].traffic(names["one"])
    assert found == {"python_calls": 5, "package_files": 2, "file_changes": 4}


@pytest.mark.parametrize(
    ("words", "message"), [(["--parts", "stop"], "--parts stop: give some of step"), (["--parts", "models"], "a GPU")]
)
def test_what_cannot_be_measured_is_refused(
    overhead: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys.modules["host"], "GPU", False)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "host", *words])
    with pytest.raises(SystemExit, match=message):
        overhead.main()
