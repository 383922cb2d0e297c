"""The command under torchrun: two processes share each batch, agree to the bit, and one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_images import write_tree

from pareback.lab.evaluation import evaluate_run
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.distributed import team
from pareback.lab.trainer import train

CHANGES: dict[str, Any] = {
    "data.batch_size": 64,
    "goal.kind": "budget",
    "goal.sparsity": 0.9,
    "train.epochs": 3,
    "train.ema": 0.9,
}

#: Runs the command; every process also keeps the weights it ended with, and one may kill itself after an epoch.
SCRIPT = """
import os, signal, sys
import torch
from pareback import cli
from pareback.lab.train import outcome
from pareback.runs.folder import RunFolder

torch.set_num_threads(1)
counted = outcome.finish_and_count

def kept(model, pruner):
    found = counted(model, pruner)
    torch.save(model.state_dict(), os.path.join(os.environ["KEPT"], os.environ["RANK"] + ".pt"))
    return found

def dying(self, row):
    append(self, row)
    if row["epoch"] == int(os.environ.get("KILL_AFTER", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)

append, RunFolder.append = RunFolder.append, dying
outcome.finish_and_count = kept
sys.exit(cli.main())
"""


def torchrun(tmp_path: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KEPT": str(tmp_path), **variables}
    return subprocess.run([*command, "train", *argv], capture_output=True, text=True, timeout=240, env=env, check=False)


def overrides(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """The same budget, the same weights on both, one set of files, and the loss of one process with the same batch."""
    out = tmp_path / "two"
    done = torchrun(tmp_path, "--out", str(out), *overrides(CHANGES))
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    written = load_file(out / "model.safetensors")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, written[name]), name
    assert done.stdout.count("epoch 3/3") == done.stdout.count("Everything is in") == 1
    result = json.loads((out / "result.json").read_text())
    assert (result["pruned_nonzeros"], result["environment"]["processes"]) == (5020, 2)
    alone = train(override(Recipe(), CHANGES), tmp_path / "one", quiet=True)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert [row["epoch"] for row in rows[1]] == [1, 2, 3]
    assert rows[1][0]["loss"] == pytest.approx(rows[0][0]["loss"], rel=1e-3)
    assert rows[1][0]["step"] == rows[0][0]["step"] == 21
    assert result["accuracy"] == pytest.approx(alone["accuracy"], abs=3.0)
    assert result["ema_accuracy"] == pytest.approx(alone["ema_accuracy"], abs=3.0)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_two_processes_go_on_and_refuse_together(tmp_path: Path) -> None:
    """Killed, they go on from the last checkpoint to the same numbers; wrong input is complained about once."""
    out = tmp_path / "run"
    argv = ["--out", str(out), *overrides({**CHANGES, "train.checkpoint_every": 2})]
    killed = torchrun(tmp_path, *argv, KILL_AFTER="3")  # a checkpoint after the second epoch, dead after the third
    assert killed.returncode != 0
    assert torch.load(out / "checkpoint.pt", weights_only=True)["epoch"] == 2
    first = (out / "metrics.jsonl").read_text().splitlines()
    assert torchrun(tmp_path, "--resume", str(out)).returncode == 0
    again = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in again] == [1, 2, 3]
    assert again[2]["loss"] == json.loads(first[2])["loss"]  # to the bit
    refused = torchrun(tmp_path, *argv, "--seed", "1")
    assert refused.returncode != 0
    assert refused.stderr.count("holds a run of another recipe") == 1


def test_a_batch_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a captured step, and one GPU for two: refused before anything starts."""
    from pareback.lab.recipe.checks import check_machine

    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="data.batch_size=128 cannot be shared evenly by 3 processes."):
        check_machine(Recipe(), torch.device("cpu"), 3)
    with pytest.raises(ValueError, match="captures the step of one process, and there are 2."):
        check_machine(override(Recipe(), {"train.cuda_graph": True}), cuda, 2)
    with pytest.raises(ValueError, match="cannot hold fp16's loss scaling"):
        check_machine(override(Recipe(), {"train.cuda_graph": True, "train.precision": "fp16"}), cuda, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="is one GPU for 2 processes."), team("cuda:0"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_two_processes_share_photographs_and_batch_norms(tmp_path: Path) -> None:
    """Images held out, batches in parts, statistics estimated anew: what is written does what both said it does.

    The loss of one process with the file is that of two with their parts of the images, so both had its statistics.
    """
    tree, out = write_tree(tmp_path / "tree", train=20, test=5), tmp_path / "run"
    changes = {
        "data.kind": "folder",
        "data.path": tree,
        "data.image_size": 8,
        "data.workers": 0,
        "data.batch_size": 8,
        "data.val_share": 0.2,
        "model.name": "conv",
        "goal.kind": "budget",
        "goal.sparsity": 0.9,
        "train.epochs": 2,
        "train.accumulate": 2,
        "train.mixup": 0.2,
        "train.recalibrate": "always",
        "train.device": "cpu",
    }
    done = torchrun(tmp_path, "--out", str(out), *overrides(changes))
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["pruned_nonzeros"] == result["pruned_weights"] // 10
    assert result["recalibration"]["norms"] == 3
    for which, said in (("last", result), ("best", result["best"])):
        found = evaluate_run(out, which=which)  # type: ignore[arg-type]
        assert found.count == 10
        assert found.accuracy == pytest.approx(said["test_accuracy"])
        assert found.loss == pytest.approx(said["test_loss"], rel=1e-5)
    (tree / "train" / "cat" / "cut.png").write_bytes(b"")
    refused = torchrun(tmp_path, "--out", str(tmp_path / "other"), *overrides(changes))
    assert refused.stderr.count("1 of 51 images of") == 1
