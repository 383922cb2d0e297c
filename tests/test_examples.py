"""The examples run as a reader would run them, and are short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
#: What each is started with, and what it prints.
EXAMPLES: dict[str, tuple[list[str], str]] = {
    "own_loop.py": ([], "332 of 3,328"),
    "lightning_digits.py": ([], "pruned"),
    "transformers_trainer.py": ([], "pruned"),
    "accelerate_loop.py": ([], "332 of 3,328"),
    "pretrained_timm.py": ([], "FLOPs"),
}


def run(*command: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path) -> None:
    arguments, words = EXAMPLES[name]
    assert words in run(str(FOLDER / name), *arguments, folder=tmp_path)


@pytest.mark.slow
def test_the_sharded_example_runs_on_two_processes(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert "332 of 3,328" in run(*torchrun, str(FOLDER / "sharded.py"), folder=tmp_path)


@pytest.mark.slow
def test_the_language_model_is_trained_and_recorded(tmp_path: Path) -> None:
    """As small as it gets: the record says what was trained, where and with what, and the budgets are met."""
    small = {"steps": 6, "hidden": 32, "layers": 1, "length": 64, "pieces": 64, "batch": 8}
    run(str(FOLDER / "language_model.py"), *(f"--{name}={n}" for name, n in small.items()), folder=tmp_path)
    record = json.loads((tmp_path / "language-model.json").read_text())
    assert record.keys() == {"machine", "python", "versions", "date", "options", "runs"}
    assert record["options"]["seed"] == 0
    dense, less, least = record["runs"]
    linear = 4 * 32 * 32 + 3 * 32 * 86
    assert dense["nonzeros"] == dense["params"]
    for pruned, share in ((less, 0.8), (least, 0.9)):
        assert pruned["params"] - pruned["nonzeros"] == pytest.approx(share * linear, abs=2)


def test_they_are_short() -> None:
    """People read them: under 60 lines (the first one, which compares networks, has 68), and the command on top."""
    for path in FOLDER.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < (69 if path.name == "digits.py" else 60), path.name
        assert any(line.startswith(("python examples/", "torchrun ", "accelerate launch")) for line in lines), path.name
