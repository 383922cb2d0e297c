"""One of the processes that train together is killed or stopped: the others end, say so, and the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pareback.lab.recipe.reading import to_yaml
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.train.distributed import lost_another, patience

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

RECIPE = Recipe(
    data=DataRecipe(batch_size=64), goal=GoalRecipe("budget", sparsity=0.9), train=TrainRecipe(epochs=6, device="cpu")
)
#: Every epoch takes a while, so that there is a moment in which to kill.
SLOW = """
import sys, time
from pareback import cli
from pareback.lab.train.loop import Training
close = Training._close_epoch
def slowly(self, *args):
    close(self, *args)
    time.sleep(0.3)
Training._close_epoch = slowly
sys.exit(cli.main())
"""


def started(out: Path, log: Path, words: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start two processes as torchrun would, but without torchrun, which would end the second for the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PAREBACK_PATIENCE": "8", "WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(2):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(log.with_suffix(f".{rank}"), "wb") as said:
            command = [sys.executable, "-c", SLOW, "train", *words, "--quiet"]
            env = {**common, **meeting, **places}
            processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=env, cwd=out.parent))
    return processes


def wait_for_epochs(out: Path, count: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes().splitlines()) >= count:
            return
        time.sleep(0.02)
    pytest.fail("no epoch was done")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What two processes write that are left alone."""
    out = tmp_path_factory.mktemp("ranks") / "whole"
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(to_yaml(RECIPE))
    processes = started(out, out.parent / "whole.log", [str(recipe), "--out", str(out)])
    assert [process.wait(timeout=120) for process in processes] == [0, 0], (out.parent / "whole.0").read_text()
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.killed
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_the_other_ends_and_the_run_goes_on(number: int, rank: int, whole: bytes, tmp_path: Path) -> None:
    out, recipe, log = tmp_path / "run", tmp_path / "recipe.yaml", tmp_path / "log"
    recipe.write_text(to_yaml(RECIPE))
    processes = started(out, log, [str(recipe), "--out", str(out)])
    wait_for_epochs(out, 2)
    processes[rank].send_signal(number)
    other = processes[1 - rank]
    try:
        assert other.wait(timeout=90) == 1  # by itself, long before torch's own half an hour
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = log.with_suffix(f".{1 - rank}").read_text()
    assert "Another of the 2 processes is gone, or has not answered for 8 s, so that this one stopped." in said
    assert f"go on from the last good checkpoint with: pareback train --resume {out}" in said
    assert "Traceback" not in said
    again = started(out, log, ["--resume", str(out)])
    assert [process.wait(timeout=120) for process in again] == [0, 0], log.with_suffix(".0").read_text()
    assert (out / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_a_patience_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREBACK_PATIENCE", text)
    with pytest.raises(ValueError, match="is no number of seconds. Write PAREBACK_PATIENCE=600"):
        patience()


def test_other_errors_are_not_taken_for_it() -> None:
    assert lost_another(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert lost_another(dist.DistBackendError("NCCL error"))
    assert not lost_another(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_another(ValueError("timed out"))
