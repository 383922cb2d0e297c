"""Runtimes take turns in processes of their own; those that fail or differ are said to, and no others suffer."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from pareback.bench import Subject, compare, mask_uniformly_
from pareback.bench.advice import advice
from pareback.bench.comparison import Comparison, suited
from pareback.bench.contest import Case, Contest, Effort, Entrant, Outcome, ratio
from pareback.bench.process import Process, WorkerError
from pareback.bench.runtimes import RUNTIMES
from pareback.bench.showing import as_text
from pareback.bench.subject import Staged
from pareback.bench.worker import Worker, serve
from pareback.runtime.native import bindings

pytestmark = pytest.mark.slow

QUICK = Effort(seconds=0.0, rounds=(2, 2), turn=0.001)


def _subject() -> Subject:
    torch.manual_seed(0)
    x = torch.randn(8, 40)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10))
    return Subject("tiny", mask_uniformly_(model, 0.7, x), x, "made up")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))


# -- what is timed ---------------------------------------------------------------------------------------------------


def test_masks_are_uniform_and_leave_the_rest() -> None:
    """Every chosen layer has the sparsity asked for; tables that are only added keep their values."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 36, 20))
    model.register_parameter("positions", nn.Parameter(torch.ones(40, 40)))
    mask_uniformly_(model, 0.9, torch.randn(4, 3, 8, 8), min_size=100)
    assert (model[0].weight == 0).float().mean().item() == pytest.approx(0.9, abs=0.03)
    assert (model[3].weight == 0).float().mean().item() == pytest.approx(0.9, abs=0.01)
    assert bool((model.positions == 1).all())
    assert not model.training
    assert model[1].momentum == 0.1
    spread = model[:2](torch.randn(64, 3, 8, 8)).std().item()
    assert spread == pytest.approx(1.0, abs=0.3)  # the norm has measured what reaches it


def test_examples_go_around() -> None:
    """More examples than there are begin again with the first."""
    subject = Subject("tiny", nn.Identity(), torch.arange(3.0).view(3, 1))
    assert subject.batch(5).flatten().tolist() == [0, 1, 2, 0, 1]


def test_figures_count_the_model() -> None:
    """Weights, operations and bytes of the file."""
    found = _subject().figures()
    assert found["parameters"] == 40 * 64 + 64 + 64 * 10 + 10
    assert found["flops"] == 2 * (40 * 64 + 64 * 10)
    kept = found["nonzeros"] - 64 - 10
    assert found["nonzero_flops"] == 2 * kept
    assert found["safetensors_bytes"] > 4 * found["parameters"] > found["pare_bytes"]


# -- taking turns ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not bindings.available(), reason="the engine was not built")
def test_every_runtime_that_is_installed_agrees_with_eager() -> None:
    """Each gives eager's results, or int8's which are close to them."""
    there = [name for name, runtime in RUNTIMES.items() if not runtime.missing()]
    comparison = compare(_subject(), [1, 3], [1], there, effort=QUICK)
    assert [case.batch for case in comparison.cases] == [1, 3]
    for case in comparison.cases:
        for outcome in case.outcomes:
            assert outcome.problem == ""
            assert len(outcome.rounds) == 2
            assert outcome.seconds > 0
            assert not outcome.differs
            assert outcome.error < (0.2 if outcome.kind == "int8" else 1e-5)
    json.dumps(comparison.as_dict(), allow_nan=False)
    assert "What follows" in as_text(comparison)


def test_time_can_run_out() -> None:
    """The first case is measured whatever the limit; the others are named."""
    comparison = compare(_subject(), [1, 2], [1, 2], ["eager"], seconds=0.0, effort=QUICK)
    assert [(case.batch, case.threads) for case in comparison.cases] == [(1, 1)]
    assert comparison.skipped == ((2, 1), (1, 2), (2, 2))
    assert any("no time for batch 2 with one thread" in line for line in advice(comparison))


def test_counts_are_checked() -> None:
    """Nothing begins with a batch of nothing."""
    with pytest.raises(ValueError, match="batches must be whole numbers of at least 1"):
        compare(_subject(), [0])
    with pytest.raises(ValueError, match="threads must be"):
        compare(_subject(), [1], [])


class _Fails(nn.Module):
    """Runs batches of 1, the way some runtimes fail at some shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and torch.get_num_threads() == 1:  # the parent, which has another number, knows the result
            raise ValueError("too many\nat once")
        return x + 1


def test_a_failure_takes_out_one_runtime_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is kept; the others go on."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    good, bad = (Subject("x", module, torch.randn(4, 5)) for module in (nn.Identity(), _Fails()))
    entrants = [
        Entrant("good", "eager", Staged(good, tmp_path / "good")),
        Entrant("bad", "eager", Staged(bad, tmp_path / "bad")),
    ]
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with Contest(entrants, 1, tmp_path) as contest:
        assert contest.run(1, QUICK)["bad"].problem == ""
        case = contest.run(2, QUICK)
    assert case["bad"].problem == "too many at once"
    assert case["bad"].rounds == []
    assert len(case["good"].rounds) == 2


def test_a_process_that_dies_is_noticed() -> None:
    """With its last words."""
    process = Process("no-such-runtime", 1)
    with pytest.raises(WorkerError, match="no-such-runtime"):
        process.ready()
    process.close()


def test_a_worker_answers_requests(tmp_path: Path) -> None:
    """The protocol within one process: prepare, time, memory, and a mistake that is answered."""
    staged = Staged(_subject(), tmp_path / "model")
    numpy.save(tmp_path / "x.npy", staged.subject.batch(7).numpy())
    requests = [
        {},
        {
            "do": "prepare",
            "model": str(staged.path("module")),
            "batch": 3,
            "inputs": str(tmp_path / "x.npy"),
            "output": str(tmp_path / "y.npy"),
        },
        {"do": "time", "calls": 4, "untimed": 1},
        {"do": "memory"},
        {"do": "prepare", "model": "nowhere", "batch": 3, "inputs": "nowhere", "output": "nowhere"},
    ]
    answers, threads = io.StringIO(), torch.get_num_threads()
    try:
        serve(lambda: Worker("eager", 1), io.StringIO("\n".join(map(json.dumps, requests))), answers)
    finally:
        torch.set_num_threads(threads)
    ready, prepared, timed, memory, wrong = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    assert prepared["ready"] > 0
    assert len(timed["seconds"]) == 4
    assert memory["bytes"] is None or memory["bytes"] >= 0
    assert "nowhere" in wrong["error"]
    found = torch.from_numpy(numpy.load(tmp_path / "y.npy"))  # two whole batches of three
    assert torch.allclose(found, staged.reference(6), atol=1e-6)


def test_dynamic_quantisation_is_for_models_without_convolutions() -> None:
    """Its convolutions are slower than float32."""
    assert "int8-dynamic" not in suited(nn.Sequential(nn.Conv1d(1, 1, 1)))
    assert suited(nn.Linear(1, 1)) == tuple(RUNTIMES)


def test_missing_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, without importing anything."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert RUNTIMES["openvino"].missing() == ["onnx", "onnxscript", "openvino"]
    assert RUNTIMES["eager"].missing() == []


# -- what follows ----------------------------------------------------------------------------------------------------


def _outcome(name: str, *rounds: float, error: float = 0.0, agreement: float = 1.0, remark: str = "") -> Outcome:
    return Outcome(
        name, name, RUNTIMES[name].kind, "", list(rounds), 0.5, 1000, error=error, agreement=agreement, remark=remark
    )


def _comparison(*outcomes: Outcome, density: float = 0.3, nonzeros: int = 30) -> Comparison:
    figures = {
        "parameters": 100, "nonzeros": nonzeros, "sparsity": 0.7, "flops": 2e9, "nonzero_flops": 6e8,
        "flop_density": density, "pare_bytes": 500, "safetensors_bytes": 2_000_000,
    }  # fmt: skip
    machine = {"cpu": "a processor", "cores": 2, "versions": {"torch": "2"}}
    return Comparison("model", "about", figures, (Case(1, 1, outcomes),), (), machine)


def test_ratios_are_taken_within_rounds() -> None:
    """A round that was slow for all does not count against one."""
    assert ratio(_outcome("eager", 2.0, 20.0, 2.0), _outcome("engine", 1.0, 10.0, 1.0)) == 2.0
    assert math.isnan(ratio(_outcome("eager"), _outcome("engine", 1.0)))


def test_advice_for_int8() -> None:
    """At 30 % density int8 is twice as fast: at half of the operations the engine would be, too."""
    found = _comparison(
        _outcome("eager", 0.004), _outcome("int8", 0.001, agreement=0.98), _outcome("engine", 0.002), density=0.3
    )
    first, second = advice(found)
    assert (
        first == "At batch 1, one thread, the engine is 2.0× as fast as the best dense float32 runtime, PyTorch eager."
    )
    assert "eager's class for 98 % of the examples, is 2.0× as fast as the engine on this CPU" in second
    assert "until about 15.0 % of the operations are left" in second


@pytest.mark.parametrize(
    ("engine", "int8", "sentences"),
    [
        (0.001, 0.002, ["the engine is 4.0× as fast", "it is 2.0× as fast as dense int8"]),
        (0.004, 0.004, ["are equally fast", "are equally fast"]),
        (
            0.008,
            0.016,
            ["PyTorch eager is 2.0× as fast as the engine: this model is too dense", "2.0× as fast as dense int8"],
        ),
    ],
)
def test_advice_for_each_outcome(engine: float, int8: float, sentences: list[str]) -> None:
    """Who wins, who is level, who should be used instead."""
    found = advice(_comparison(_outcome("eager", 0.004), _outcome("int8", int8), _outcome("engine", engine)))
    assert len(found) == len(sentences)
    assert all(part in line for part, line in zip(sentences, found, strict=True))


@pytest.mark.parametrize(
    ("density", "flops", "sentence"),
    [
        (0.5, 1e5, "too dense"),
        (0.02, 1e5, "too small to gain"),
        (0.02, 1e9, "gains too little from this model's zeros"),
    ],
)
def test_advice_on_why_the_engine_loses(density: float, flops: float, sentence: str) -> None:
    """LeNet-300-100 on digits has 1e5 operations: with 2 % of them left it is not too dense."""
    found = _comparison(_outcome("eager", 0.004), _outcome("engine", 0.008), density=density, nonzeros=90)
    found.figures["flops"] = flops
    (line,) = advice(found)
    assert "PyTorch eager is 2.0× as fast as the engine: " in line
    assert sentence in line
    assert line.endswith(", use that runtime.")


def test_advice_on_layers_results_and_operators() -> None:
    """Zeros in cheap layers, a runtime that is wrong, operators left to PyTorch."""
    remark = "3 layers\nleft to PyTorch: aten.cat (unknown)\nat batch 1 the dense operators run"
    found = _comparison(
        _outcome("eager", 0.004), _outcome("openvino", 0.001, error=0.1), _outcome("engine", 0.002, remark=remark),
        nonzeros=10,
    )  # fmt: skip
    text = as_text(found)
    assert "10.0 % of the weights remain but 30.0 % of the operations" in " ".join(text.split())
    assert "DIFFER by 1e-01" in text
    lines = advice(found)
    assert "best dense float32 runtime, PyTorch eager" in lines[0]  # not the one that is wrong
    assert "The engine leaves to PyTorch: aten.cat (unknown)." in lines
    assert "The engine says: at batch 1 the dense operators run." in lines


def test_without_the_engine_nothing_is_advised() -> None:
    """There is nothing to compare."""
    found = _comparison(_outcome("eager", 0.004))
    assert advice(found) == []
    assert "1.00×" in as_text(found)
