"""File systems without locks, limits on files and memory, old pickles: sentences, and nothing lost."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pareback.cli import main
from pareback.errors import FileSizeError, LittleMemory
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train
from pareback.runs import locking
from pareback.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

RECIPE = Recipe(
    data=DataRecipe(batch_size=256), goal=GoalRecipe("budget", sparsity=0.9), train=TrainRecipe(epochs=2, device="cpu")
)


# -- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EIO])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not somebody else training there: the run begins, and a sentence says what nobody will notice."""

    def refusing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locking.fcntl, "flock", refusing)
    with RunFolder(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == ""
    said = capsys.readouterr().err
    assert "has no locks (" in said
    assert "Start no other run there." in said


def test_a_lock_that_is_held_is_still_somebodys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(tmp_path), pytest.raises(RuntimeError, match="Another process .* is training in"):
        RunFolder(tmp_path).__enter__()
    assert capsys.readouterr().err == ""


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files() -> Any:
    """Files may not become larger than 300 kB for a while."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files(tmp_path: Path, small_files: None) -> None:
    """No room would help: the limit is named, and how to go on."""
    with pytest.raises(
        FileSizeError,
        match=r"checkpoint.pt' could not be written: files may not become so large here. "
        r"Raise the limit \(ulimit -f\), then go on from the first step with: pareback train --resume",
    ):
        train(RECIPE, tmp_path / "run", quiet=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    train(RECIPE, tmp_path / "run", resume=True, quiet=True)
    train(RECIPE, tmp_path / "whole", quiet=True)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


SHORT_OF_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", SHORT_OF_MEMORY, ids=lambda error: f"{type(error).__name__}-{str(error)[:20]}")
def test_too_little_memory(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever notices it, and however it is said."""
    call, seen = TrainStep.__call__, iter(range(1, 1000))

    def scarce(self: TrainStep, *args: Any) -> None:
        if next(seen) == 8:
            raise error
        call(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", scarce)
        with pytest.raises(LittleMemory, match=r"not enough memory for this training. .*from the last good check"):
            train(RECIPE, tmp_path / "run", quiet=True)
    train(RECIPE, tmp_path / "run", resume=True, quiet=True)


def test_a_command_without_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def scarce(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pareback.runs.counts.inspect_path", scarce)
    assert main(["inspect", "somewhere"]) == 1
    assert capsys.readouterr().err == (
        "pareback: error: There is not enough memory for this. Free some, or raise the limit (ulimit -v).\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is the system's")
def test_a_real_limit_on_memory(tmp_path: Path) -> None:
    """Of what is in use and a little more: the network's activations do not fit."""
    code = """
import resource, sys
from pareback import cli
import pareback.lab.trainer, sklearn.datasets, torch._dynamo, torch.utils.flop_counter
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
sys.exit(cli.main())
"""
    words = ["train", "--out", "run", "--model.name", "wrn", "--data.batch_size", "1024", "--train.device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--quiet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("pareback: error: There is not enough memory for this training.")
    assert done.stderr.count("\n") == 1


# -- old pickles -----------------------------------------------------------------------------------------------------


class OddObject:
    """What no state dict holds."""


@pytest.mark.parametrize("kind", ["pickle", "legacy", "tar"])
def test_an_old_pickle_is_answered_with_our_sentence_alone(
    kind: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own warning about it would come first, and means nothing to whoever gave the file."""
    file = tmp_path / "weights.pt"
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"a": OddObject()}))
    elif kind == "legacy":
        torch.save({"a": torch.ones(2), "b": OddObject()}, file, _use_new_zipfile_serialization=False)
    else:
        import tarfile

        with tarfile.open(file, "w") as archive:
            archive.add(__file__, "pickle")
    assert main(["inspect", str(file)]) == 2
    assert "is not a state dict that torch.load(weights_only=True) reads" in capsys.readouterr().err
    assert not recwarn.list


def test_a_lock_that_was_deleted_is_taken_again(tmp_path: Path) -> None:
    """Nobody has come: the run goes on, and the next one is kept out as before."""
    with RunFolder(tmp_path) as folder:
        (tmp_path / ".lock").unlink()
        folder.hold()
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
        with pytest.raises(RuntimeError, match="Another process .* is training in"):
            RunFolder(tmp_path).__enter__()


def test_whose_lock_was_deleted_leaves_the_run_to_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that write at once would mix up the run: of 37 storms one had ended with every epoch told twice."""
    call, seen = TrainStep.__call__, iter(range(1, 1000))
    others: list[RunFolder] = []

    def deleting(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == 7:
            (tmp_path / ".lock").unlink()
            others.append(RunFolder(tmp_path).__enter__())

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", deleting)
        with pytest.raises(RuntimeError, match="was deleted, and another process trains there now. This one stopped"):
            train(RECIPE, tmp_path, quiet=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    others[0].__exit__()
    train(RECIPE, tmp_path, resume=True, quiet=True)
