"""The demo at a fraction of its length, and the example that uses the API alone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pareback.lab.recipe.schema import DataRecipe
from pareback.reproduce.demo import NETWORKS, demo, runs
from pareback.runs.record import read_record

ROOT = Path(__file__).parents[2]
#: The demo's networks for two epochs of the 8×8 digits.
SHORT = {
    title: replace(network, data=DataRecipe(batch_size=256), train=replace(network.train, epochs=2))
    for title, network in NETWORKS.items()
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_demo_prints_a_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six runs, met to the weight; three pictures where it says; again over what is there, with the same numbers."""
    demo(tmp_path / "out", SHORT)
    first = capsys.readouterr().out
    # What is there is overwritten alike by any process: two more need not be started.
    monkeypatch.setattr("pareback.reproduce.demo.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    demo(tmp_path / "out", SHORT)
    again = capsys.readouterr().out
    table = first[first.index("network ") : first.index("bytes:")]
    assert table in again
    assert len(table.strip().splitlines()) == 2 + 6
    assert len(first.splitlines()) < 30
    for sparsity, kept in (("95", 2510), ("98", 1004)):
        assert read_record(tmp_path / "out" / f"lenet-{sparsity}").result["pruned_nonzeros"] == kept
        assert re.search(rf"LeNet-300-100 +{sparsity} % zeros .* {kept + 410:,} ", table)
    pictures = re.findall(r"^  (\S+\.png)$", first, re.MULTILINE)
    assert [Path(path).name for path in pictures] == ["layers.png", "convergence.png", "histograms.png"]
    assert all(Path(path).exists() for path in pictures)


@pytest.mark.slow
def test_a_run_that_fails_stops_the_demo(tmp_path: Path) -> None:
    """Its error comes out of the process that trained, and the rest is not waited for."""
    broken = {"broken": replace(SHORT["LeNet-300-100"], data=DataRecipe(batch_size=10**6))}
    with pytest.raises(ValueError, match="batch"):
        demo(tmp_path / "out", broken)


def test_the_demo_is_what_it_says() -> None:
    """LeNet-300-100 and the conv net on 5,000 real digits, each dense and to exact budgets of 95 and 98 %."""
    recipes = [recipe for network in NETWORKS.values() for recipe in runs(network)]
    assert [recipe.goal.sparsity for recipe in recipes] == [None, 0.95, 0.98] * 2
    assert {recipe.data.kind for recipe in recipes} == {"mnist5000"}
    assert {recipe.goal.enforce for recipe in recipes} == {"exact"}
    assert {recipe.train.device for recipe in recipes} == {"cpu"}


def test_make_demo_is_the_command() -> None:
    """``make demo`` runs ``pareback demo``."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(["make", "-n", "demo"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    shown = made.stdout
    assert shown.splitlines()[-1] == ".venv/bin/pareback demo"


def test_the_example_uses_the_api_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/digits.py trains the 8×8 digits dense and to two budgets and prints what is left."""
    monkeypatch.setattr(sys, "argv", ["digits.py"])
    example = runpy.run_path(str(ROOT / "examples" / "digits.py"))
    example["train"].__globals__["EPOCHS"] = 4
    example["main"]()
    shown = capsys.readouterr().out
    # 25,400 weights in tensors of at least 100, of which one in twenty stays, and 410 biases.
    assert re.search(r"95 % sparse +\d\d\.\d\d % +2,920\n", shown)
