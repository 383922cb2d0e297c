"""benchmarks/engine.py: rows are written one by one, kept, and shown as tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import nn

import pareback as pb
from pareback.lab.models.wrn import WideResNet
from pareback.runtime.native import bindings

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "engine.py"
pytestmark = pytest.mark.skipif(not bindings.available(), reason="the engine was not built")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with one tiny network, and a small one in place of the trained model."""
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("engine_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_benchmark", module)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    small = WideResNet(10, 1, classes=4)
    pb.prune_(small, pb.Budget(sparsity=0.9))
    pb.save(small, tmp_path / "small.pare")
    monkeypatch.setattr(module, "TRAINED", {"small": tmp_path / "small.pare"})
    monkeypatch.setattr(module, "WideResNet", lambda *_: WideResNet(10, 1, classes=4))
    tiny = module.Workload("tiny", lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), (64,))
    monkeypatch.setitem(module.WORKLOADS, "tiny", tiny)
    return module


def _run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["engine.py", *words])
    script.main()


@pytest.mark.slow
def test_rows_are_kept_and_not_measured_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches in one file, the second added by a second call, which leaves the first alone."""
    out = tmp_path / "out.json"
    words = ["--only", "tiny", "--sparsity", "0.9", "--threads", "1", "--runtimes", "eager", "--seconds", "0"]
    _run(script, monkeypatch, *words, "--batch", "1", "--out", str(out))
    first = json.loads(out.read_text())["rows"]
    _run(script, monkeypatch, *words, "--batch", "1,2", "--out", str(out))
    content = json.loads(out.read_text())
    assert list(content["rows"]) == ["tiny, batch 1, threads 1", "tiny, batch 2, threads 1"]
    assert content["rows"]["tiny, batch 1, threads 1"] == first["tiny, batch 1, threads 1"]
    row = content["rows"]["tiny, batch 2, threads 1"]
    assert row["best_dense"] == "eager"
    assert set(row["ratios"]) == {"90 %"}
    assert row["figures"]["90 %"]["sparsity"] == pytest.approx(0.9, abs=0.03)
    assert all(not outcome["differs"] for outcome in row["outcomes"])
    assert "| batch | best dense | 90 % |" in out.with_suffix(".md").read_text()
    capsys.readouterr()
    _run(script, monkeypatch, "--table", "--out", str(out))
    assert "## tiny, one thread" in capsys.readouterr().out


@pytest.mark.slow
def test_accuracy_is_counted(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eager and the engine get the same images right; a count that was cut off goes on."""
    generator = numpy.random.default_rng(0)
    images = {f"{part}_x": generator.integers(0, 256, (130, 32, 32, 3), dtype="uint8") for part in ("train", "test")}
    labels = {f"{part}_y": generator.integers(0, 4, 130) for part in ("train", "test")}
    numpy.savez(tmp_path / "data.npz", classes=numpy.array(list("abcd")), **images, **labels)
    out = tmp_path / "out.json"
    words = ["--accuracy", "--data", str(tmp_path / "data.npz"), "--out", str(out)]
    _run(script, monkeypatch, *words, "--images", "100")
    assert json.loads(out.read_text())["accuracy"]["small"]["images"] == 100
    _run(script, monkeypatch, *words)
    found = json.loads(out.read_text())["accuracy"]["small"]
    assert found["images"] == found["same"] == 130
    assert found["eager"] == found["engine"]
    assert "same class 100.00 %" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--data"):
        _run(script, monkeypatch, "--accuracy")
