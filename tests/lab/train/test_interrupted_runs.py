"""Runs that were killed, stopped or lost: whatever the moment, going on ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pareback.lab.data.in_memory import InMemory
from pareback.lab.models.build import build
from pareback.lab.recipe.reading import override, to_yaml
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train
from pareback.runs import checkpoints
from pareback.runs.folder import RunFolder, result_of

#: Four epochs of five steps, with everything that has a state: momentum, thresholds, an average.
RECIPE = Recipe(
    data=DataRecipe(batch_size=256),
    goal=GoalRecipe("budget", sparsity=0.9),
    train=TrainRecipe(epochs=4, ema=0.9),
)
#: The same with a network that has statistics.
CONV = override(RECIPE, {"model.name": "conv", "train.epochs": 3, "train.checkpoint_every": 2})


pytestmark = pytest.mark.usefixtures("one_thread")


def written(out: Path) -> list[bytes]:
    return [(out / name).read_bytes() for name in ("model.safetensors", "model-ema.safetensors")]


def epochs(out: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What an uninterrupted run writes."""
    out = tmp_path_factory.mktemp("whole")
    train(RECIPE, out, quiet=True)
    return written(out)


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Do something right after a step of the training."""
    call, seen = TrainStep.__call__, iter(range(1, 10_000))

    def acting(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == number:
            act()

    monkeypatch.setattr(TrainStep, "__call__", acting)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [3, 5, 12, 20])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(
    number: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[bytes]
) -> None:
    """In the middle of an epoch or at its end; nothing of the work is lost, and no epoch is told twice."""
    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        at_step(patched, step, lambda: signal.raise_signal(number))
        with pytest.raises(Interrupted) as caught:
            train(RECIPE, tmp_path, quiet=True)
    assert str(caught.value) == (
        f"Stopped; saved after step {step} of 20. Go on with: pareback train --resume {tmp_path}"
    )
    assert caught.value.number == number
    assert signal.getsignal(number) == before
    with pytest.raises(ValueError, match="holds an unfinished run. Go on with it: pareback train --resume"):
        train(RECIPE, tmp_path, quiet=True)
    assert train(RECIPE, tmp_path, quiet=True, resume=True)["resumed"] == 1
    assert written(tmp_path) == whole
    assert epochs(tmp_path) == [1, 2, 3, 4]


def test_ctrl_c_while_it_lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[bytes]) -> None:
    """After the last step nothing is left to save but the landing, which is done again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pareback.lab.train.outcome.finish_and_count", interrupted)
        with pytest.raises(Interrupted, match="saved after step 20 of 20. Go on with: pareback train --resume"):
            train(RECIPE, tmp_path, quiet=True)
    train(RECIPE, tmp_path, quiet=True, resume=True)
    assert written(tmp_path) == whole
    assert epochs(tmp_path) == [1, 2, 3, 4]


def test_ctrl_c_that_ends_the_readers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[bytes]
) -> None:
    """The processes that read images may die of the same Ctrl-C; the run stops as if they had not."""
    batches = InMemory.batches

    def dying(self: InMemory, epoch: int, **options: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(self, epoch, **options)):
            if (epoch, number) == (1, 2):
                signal.raise_signal(signal.SIGINT)
                raise RuntimeError("DataLoader worker exited unexpectedly")
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(InMemory, "batches", dying)
        with pytest.raises(Interrupted, match="saved after step 7 of 20."):
            train(RECIPE, tmp_path, quiet=True)
    train(RECIPE, tmp_path, quiet=True, resume=True)
    assert written(tmp_path) == whole


def test_a_killed_runs_readers_are_waited_for(tmp_path: Path) -> None:
    """They hold the folder's lock until they notice that their run is gone; a living run is not waited for."""
    folder = RunFolder(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with folder:
        (tmp_path / ".lock").write_text(str(gone.pid))  # the lock is held, but not by the process that took it
        threading.Timer(0.3, folder.__exit__).start()
        with RunFolder(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_run_that_is_lost_is_not_saved_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the loss is gone keeps the good checkpoint and says what happened."""
    at_step(monkeypatch, 8, lambda: signal.raise_signal(signal.SIGINT))
    call = TrainStep.__call__
    seen = iter(range(1, 100))
    monkeypatch.setattr(
        TrainStep, "__call__", lambda self, x, y, lr: call(self, x / (0 if next(seen) == 7 else 1), y, lr)
    )
    with pytest.raises(FloatingPointError, match="not finite at step 7 .epoch 2.*after step 5"):
        train(RECIPE, tmp_path, quiet=True)


def test_going_on_twice_and_with_random_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout goes on with its own random numbers; a checkpoint every second epoch is enough."""
    monkeypatch.setattr("pareback.lab.train.state.build", lambda *args: nn.Sequential(nn.Dropout(0.2), build(*args)))
    train(CONV, tmp_path / "whole", quiet=True)
    for step in (7, 3):
        with monkeypatch.context() as patched:
            at_step(patched, step, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(Interrupted):
                train(CONV, tmp_path / "parts", quiet=True, resume=True)
    assert train(CONV, tmp_path / "parts", quiet=True, resume=True)["resumed"] == 2
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    seconds = result_of(tmp_path / "parts")["seconds"]
    assert seconds["start"] + seconds["train"] + seconds["evaluate"] <= seconds["total"]


def test_only_what_does_not_matter_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on elsewhere, with other workers or checkpoints, is the same run; another learning rate is not."""
    with monkeypatch.context() as patched:
        at_step(patched, 7, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(RECIPE, tmp_path, quiet=True)
    with pytest.raises(ValueError, match="another recipe .optimizer.lr is 0.1 there and 0.2 here"):
        train(override(RECIPE, {"optimizer.lr": 0.2}), tmp_path, quiet=True, resume=True)
    moved = override(RECIPE, {"data.workers": 0, "train.device": "cpu", "train.checkpoint_every": 3})
    assert train(moved, tmp_path, quiet=True, resume=True)["complete"]


def test_a_broken_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may do what a killed process cannot."""
    with monkeypatch.context() as patched:
        at_step(patched, 7, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(RECIPE, tmp_path, quiet=True)
    checkpoint = tmp_path / "checkpoint.pt"
    (tmp_path / "checkpoint.previous.pt").unlink(missing_ok=True)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match="checkpoint.pt' cannot be read. Delete it to let --resume begin anew."):
        train(RECIPE, tmp_path, quiet=True, resume=True)
    torch.save({"version": 0}, checkpoint)
    with pytest.raises(RuntimeError, match="is not a checkpoint of this release."):
        train(RECIPE, tmp_path, quiet=True, resume=True)
    checkpoint.unlink()
    assert train(RECIPE, tmp_path, quiet=True, resume=True)["complete"]


def damages() -> Iterator[Callable[[bytearray, random.Random], None]]:
    """What a disk may do to a file: a bit, a block of zeros, some bytes."""

    def bit(content: bytearray, chance: random.Random) -> None:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)

    def zeros(content: bytearray, chance: random.Random) -> None:
        start = chance.randrange(len(content))
        content[start : start + 512] = bytes(len(content[start : start + 512]))

    def others(content: bytearray, chance: random.Random) -> None:
        start = chance.randrange(len(content))
        content[start : start + 16] = chance.randbytes(len(content[start : start + 16]))

    yield from (bit, zeros, others)


def test_a_damaged_checkpoint_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's reader looks at no checksum: of 619 such files 586 had loaded and changed the result.

    A damage is named and the checkpoint before is used, or it touched nothing that is read.
    """
    path, chance = tmp_path / "checkpoint.pt", random.Random(0)
    writer = checkpoints.Checkpoints(path)
    torch.manual_seed(0)
    states = [{"weights": torch.randn(40, 40), "step": torch.tensor(number), "epoch": number} for number in (1, 2)]
    for state in states:
        writer.save(state)
    writer.wait()
    whole, found = path.read_bytes(), Counter()
    for number in range(300):
        content = bytearray(whole)
        list(damages())[number % 3](content, chance)
        path.unlink()
        path.write_bytes(content)
        loaded = checkpoints.load(path)
        said = capsys.readouterr().err
        kept = states[loaded["epoch"] - 1]
        assert torch.equal(loaded["weights"], kept["weights"])
        assert int(loaded["step"]) == loaded["epoch"]
        assert (loaded["epoch"] == 1) == ("Going on from" in said)
        found[loaded["epoch"]] += 1
    assert found[1] > 200


def test_a_run_goes_on_from_the_checkpoint_before(
    tmp_path: Path, whole: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit flipped in the last checkpoint costs the steps since the one before, and no bit of the result."""
    broken = tmp_path / "broken"
    with monkeypatch.context() as patched:
        at_step(patched, 11, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(RECIPE, broken, quiet=True)
    checkpoint = broken / "checkpoint.pt"
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 4
    checkpoint.unlink()
    checkpoint.write_bytes(content)
    train(RECIPE, broken, quiet=True, resume=True)
    assert "is damaged" in capsys.readouterr().err
    assert written(broken) == whole
    assert not (broken / "checkpoint.previous.pt").exists()


# -- SIGKILL ---------------------------------------------------------------------------------------------------------

#: Trains in a forked process that kills itself at a moment, then goes on in another; prints what every run wrote.
KILLING = """
import hashlib, json, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from pareback import files
from pareback.lab.train import outcome
from pareback.lab.models import build
from pareback.lab.recipe.reading import read
from pareback.runs.folder import RunFolder
from pareback.lab.data.sources import open_source
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train

recipe, folder = read(Path(sys.argv[1])), Path(sys.argv[2])
import torch._dynamo  # what every fork would import
open_source(recipe.data, torch.device("cpu"))

def die_at(owner, name, number, before):
    function, calls = getattr(owner, name), iter(range(1, 10_000))
    def dying(*args, **kwargs):
        here = next(calls) == number
        if here and before:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*args, **kwargs)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(owner, name, dying)

def in_a_fork(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

moments = [  # what is called, the how manieth time, and whether it dies before it
    (files, "write", 1, True),             # nothing is written yet
    (files, "write_text", 3, True),        # everything but the recipe
    (TrainStep, "__call__", 3, False),          # in the first epoch
    (RunFolder, "append", 1, False),       # metrics without a checkpoint
    (os, "replace", 4, True),              # the first checkpoint is written but not in place
    (os, "replace", 4, False),             # it is
    (torch, "save", 2, True),              # the second is begun
    (TrainStep, "__call__", 13, True),
    (RunFolder, "append", 4, False),       # after the last epoch
    (outcome, "save", 1, True),            # at its landing
    (outcome, "save", 2, False),           # all but the result
    (files, "write_json", 2, True),
]
found = []
for number, moment in enumerate(moments):
    out = folder / str(number)
    def first():
        die_at(*moment)
        train(recipe, out, quiet=True)
    died = in_a_fork(first)
    # A kill while nothing but the folder exists leaves nothing to go on with: the same command begins again.
    went_on = in_a_fork(lambda: train(recipe, out, quiet=True, resume=True))
    names = ("model.safetensors", "model-ema.safetensors")
    digests = [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names]
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    found.append([str(moment), died, went_on, digests, epochs, (out / "result.json").exists()])
print(json.dumps(found))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path, whole: list[bytes]) -> None:
    """SIGKILL between any two writes, in a step or at the landing: the resumed run is the uninterrupted one."""
    (tmp_path / "recipe.yaml").write_text(to_yaml(RECIPE), encoding="utf-8")
    argv = [sys.executable, "-c", KILLING, str(tmp_path / "recipe.yaml"), str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    wanted = [hashlib.sha256(content).hexdigest() for content in whole]
    found = json.loads(done.stdout)
    assert len(found) == 12
    for moment, died, went_on, digests, numbers, complete in found:
        assert died == signal.SIGKILL, moment
        assert (went_on, digests, numbers, complete) == (0, wanted, [1, 2, 3, 4], True), moment


@pytest.mark.slow
@pytest.mark.killed
def test_the_command_killed_and_interrupted(tmp_path: Path) -> None:
    """A real process: SIGKILL while it trains, --resume, Ctrl-C, the printed command, and the same weights."""
    recipe = override(RECIPE, {"train.epochs": 80})
    (tmp_path / "long.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    train(recipe, tmp_path / "whole", quiet=True)
    out = tmp_path / "parts"

    def started(*argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pareback", "train", *argv]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
        )

    def wait_for_epochs(process: subprocess.Popen[str], count: int) -> None:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if (out / "checkpoint.pt").exists() and len((out / "metrics.jsonl").read_bytes().splitlines()) >= count:
                return
            time.sleep(0.002)
        pytest.fail(f"ended early or hung: {process.communicate()}")

    first = started("long.yaml", "--out", "parts")
    wait_for_epochs(first, 10)
    first.kill()
    first.communicate()
    second = started("--resume", "parts")
    wait_for_epochs(second, 25)
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 130
    said = re.search(r"saved after step \d+ of 400\. Go on with: pareback train --resume parts\n$", err)
    assert said, err
    third = started("--resume", "parts")
    output, err = third.communicate(timeout=240)
    assert (third.returncode, err) == (0, "")
    assert "Everything is in parts." in output
    assert written(out) == written(tmp_path / "whole")
    assert epochs(out) == list(range(1, 81))
    assert result_of(out)["resumed"] == 2


@pytest.mark.slow
def test_a_reader_who_is_gone_ends_the_run_quietly(tmp_path: Path, whole: list[bytes]) -> None:
    """As in ``pareback train ... | head -1``: the epoch is saved, and going on ends with the same bits."""
    (tmp_path / "recipe.yaml").write_text(to_yaml(RECIPE))
    command = [sys.executable, "-m", "pareback", "train", "recipe.yaml", "--out", "run"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=120) == 141
    assert re.fullmatch(r"\nStopped; saved after step \d+ of 20. Go on with: pareback train --resume run\n", said)
    train(RECIPE, tmp_path / "run", resume=True, quiet=True)
    assert written(tmp_path / "run") == whole
