"""Files are written whole or not at all, and an error names the file that could not be."""

from __future__ import annotations

import builtins
import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pareback as pb
from pareback import files
from pareback.artifact import export
from pareback.errors import DiskFullError, NotPermitted


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is to be replaced, alone in its folder."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


@contextmanager
def no_larger_than(limit: int) -> Iterator[None]:
    """Let the system refuse more bytes of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def full_disk(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
    """Let bringing anything to the disk fail, as it does where writing only filled the cache."""

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)


# ---------------------------------------------------------------- whole or not at all


@pytest.mark.parametrize("alone", [False, True])
def test_a_file_is_replaced_and_nothing_left_beside_it(alone: bool, old: Path) -> None:
    files.write_text(old, "new\udc80", alone=alone)
    assert old.read_text() == "new\\udc80"
    assert os.listdir(old.parent) == ["file"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_failure_leaves_the_old_file(alone: bool, old: Path) -> None:
    def fill(file: Any) -> None:
        file.write(b"a part")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(old, fill, alone=alone)
    assert old.read_bytes() == b"old"
    assert os.listdir(old.parent) == ["file"]


def test_who_writes_alone_leaves_one_temporary_file_at_most(old: Path) -> None:
    """That of a killed process is written over."""
    (old.parent / "file.tmp").write_text("left by a killed one")
    files.write_json(old, {"loss": float("inf")}, alone=True)
    assert old.read_text() == '{\n "loss": null\n}\n'
    assert os.listdir(old.parent) == ["file"]


def test_several_may_write_one_file(old: Path) -> None:
    """Whoever is last, the file is one of theirs and whole."""
    texts = [str(number) * 100_000 for number in range(4)]
    threads = [threading.Thread(target=files.write_text, args=(old, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert old.read_text() in texts
    assert os.listdir(old.parent) == ["file"]


def test_data_reach_the_disk_before_the_name_and_the_name_too(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted(handle: int) -> None:
        done.append("folder" if os.path.samestat(os.fstat(handle), old.parent.stat()) else "data")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    files.write_text(old, "new")
    assert done == ["data", "name", "folder"]


# ---------------------------------------------------------------- what cannot be written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_saving_on_a_full_disk_names_the_file(code: int, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves what was there; it is an OSError, as any program expects."""
    full_disk(monkeypatch, code)
    with pytest.raises(pb.UserError, match="^The disk is full: '.*file' could not be written.$") as caught:
        pb.save({"weight": torch.ones(9)}, old)
    assert isinstance(caught.value, OSError)
    assert old.read_bytes() == b"old"
    assert os.listdir(old.parent) == ["file"]


def test_saving_what_the_system_refuses_names_the_file(old: Path) -> None:
    """A real refusal, in the middle of the data."""
    with no_larger_than(100_000), pytest.raises(DiskFullError, match="'.*file' could not be written: files may not"):
        pb.save({"weight": torch.ones(100_000)}, old)
    assert old.read_bytes() == b"old"
    assert os.listdir(old.parent) == ["file"]


def test_exporting_on_a_full_disk_names_the_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch)
    with pytest.raises(DiskFullError, match="The disk is full: '.*file' could not be written."):
        export({"weight": torch.ones(9)}, old, "safetensors")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_to(code: int, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named as it was given, and not the temporary one."""

    def refused(file: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code), str(file))

    monkeypatch.setattr(builtins, "open", refused)
    with pytest.raises(
        NotPermitted, match="^There is no permission to write '.*/file'. Give another place.$"
    ) as caught:
        pb.save({"weight": torch.ones(9)}, old)
    monkeypatch.undo()
    assert isinstance(caught.value, PermissionError)
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("folder", ["/", "."])
def test_a_folder_is_no_file(folder: str) -> None:
    with pytest.raises(ValueError, match="is a folder. Give the name of a file."):
        pb.save({"weight": torch.ones(9)}, folder)


def test_an_error_about_another_file_stays(old: Path) -> None:
    """What a model reads while it is exported is not what could not be written."""

    def fill(_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/another")

    with pytest.raises(PermissionError, match="Permission denied: '/another'"):
        files.write(old, fill)
