"""benchmarks/soak.py and fuzz.py, for seconds: the storm and the corpus as anybody can run them for a day."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{name}_benchmark"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the storm forks")
def test_a_short_storm(tmp_path: Path) -> None:
    """Half a minute of it: nothing lost, nothing wrong, nothing hung."""
    words = [
        "--minutes",
        "0.4",
        "--storms",
        "12",
        "--seed",
        "7",
        "--steps",
        "300",
        "--calls",
        "20",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "soak.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["storms"] > 0
    assert found["faults"] == []
    assert sum(count["tried"] for count in found["attacks"].values()) > 0
    assert "| lost | wrong | hung |" in (tmp_path / "soak.md").read_text()
    assert str(tmp_path) not in json.dumps(found["attacks"])


READERS = ("pare", "weights", "checkpoint", "recipe", "result", "images", "tuned", "pbe", "code")


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return loaded("fuzz")


def test_every_reader_has_a_corpus(fuzz: ModuleType) -> None:
    assert set(fuzz.READERS) == set(READERS) == {path.name for path in fuzz.CORPUS.iterdir()}
    assert all(fuzz.corpus(name) for name in READERS)
    assert sum(path.stat().st_size for path in fuzz.CORPUS.rglob("*") if path.is_file()) < 100_000


@pytest.mark.parametrize("name", READERS)
def test_the_corpus_and_changes_of_it(name: str, fuzz: ModuleType) -> None:
    """Sentences alone: the files that once led to something else, and three hundred changed ones."""
    found = fuzz.blind(name, seconds=60.0, seed=0, faults=None, most=300)
    assert found["faults"] == {}


@pytest.mark.parametrize("name", ["pare", "weights", "checkpoint", "recipe", "images", "tuned", "pbe"])
def test_the_corpus_holds_files_that_can_be_read(name: str, fuzz: ModuleType, tmp_path: Path) -> None:
    """Changing files that are refused at once would show nothing."""
    good = 0
    for number, content in enumerate(fuzz.corpus(name)):
        (tmp_path / str(number)).mkdir()
        try:
            fuzz.READERS[name](tmp_path / str(number), content)
            good += 1
        except fuzz.UserError:
            continue
    assert good > 0


def test_a_fault_is_told_and_kept(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness would notice: a reader that lets an error of its own through."""

    def careless(place: Path, content: bytes) -> None:
        raise KeyError("shape")

    monkeypatch.setitem(fuzz.READERS, "recipe", careless)
    found = fuzz.blind("recipe", seconds=10.0, seed=0, faults=tmp_path, most=2)
    assert list(found["faults"]) == [next(iter(found["faults"]))]
    assert next(iter(found["faults"])).startswith("KeyError: 'shape' at test_soak_and_fuzz.py")
    assert len(list(tmp_path.iterdir())) == 1


def test_sealing_makes_checksums_right(fuzz: ModuleType, tmp_path: Path) -> None:
    """Else no change would get past them."""
    content = (fuzz.CORPUS / "checkpoint" / "whole.pt").read_bytes()
    place = content.index(b"epoch")
    broken = content[:place] + b"epocx" + content[place + 5 :]
    (tmp_path / "a.pt").write_bytes(broken)
    with pytest.raises(RuntimeError, match="damaged"):
        fuzz.checkpoints.load(tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(fuzz.sealed(broken))
    assert "epocx" in fuzz.checkpoints.load(tmp_path / "a.pt")


@pytest.mark.slow
def test_processes_hold_the_same_bits_after_every_step(tmp_path: Path) -> None:
    """Two of them, DDP and FSDP2, each on its own data; `benchmarks/ranks.py` takes four and 2,000 steps."""
    words = ["--ranks", "2", "--steps", "25", "--goals", "exact", "--out", str(tmp_path)]
    command = [sys.executable, str(FOLDER / "ranks.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert [(row["way"], row["parted"], row["nonzeros"]) for row in rows] == [("DDP", -1, 1050), ("FSDP2", -1, 1050)]
    assert "| FSDP2 | exact | 2 | 25 | none | 1,050 of 10,504 |" in (tmp_path / "ranks.md").read_text()
