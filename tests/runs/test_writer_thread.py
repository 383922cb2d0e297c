"""The thread that writes checkpoints: where it cannot begin, or fails, whoever waits is told."""

from __future__ import annotations

import _thread
from pathlib import Path

import pytest
import torch

from pareback.errors import InvalidUse, LittleMemory
from pareback.runs import checkpoints


def test_a_thread_that_dies_before_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit on memory Python starts one that never begins: a storm had waited for it for ever."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.05)
    writer = checkpoints.Checkpoints(tmp_path / "checkpoint.pt")
    writer.save({"weights": torch.ones(3)})
    with pytest.raises(LittleMemory, match="not enough memory to begin to write a checkpoint"):
        writer.wait()
    writer.wait()  # told once


def test_an_error_in_it_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("the tape is full")

    writer = checkpoints.Checkpoints(tmp_path / "checkpoint.pt")
    monkeypatch.setattr(torch, "save", failing)
    writer.save({"weights": torch.ones(3)})
    with pytest.raises(InvalidUse, match="could not be written: the tape is full"):
        writer.wait()
    writer.wait()
