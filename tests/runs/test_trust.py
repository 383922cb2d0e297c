"""A run is data: code that it names is imported if the run is the user's own, or on an explicit word."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pareback.cli import main
from pareback.errors import InvalidUse
from pareback.lab.models.custom import home_of, import_from
from pareback.lab.recipe.schema import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runs.export import network_of
from pareback.runs.trust import UntrustedCode, admit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SOURCE = """
import math
from pathlib import Path
from torch import nn
Path(__file__).with_name("imported").touch()

def build(classes, shape, share=1.0):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 40), nn.ReLU(), nn.Linear(40, classes))
"""
NAME = "nets_for_trust"
RECIPE = Recipe(
    data=DataRecipe(batch_size=256), model=ModelRecipe(f"{NAME}:build"), train=TrainRecipe(epochs=1, device="cpu")
)
REFUSED = f"names code, {NAME}:build, and is not known to be yours. If you have read that code and trust it"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(NAME, None)


def forget() -> None:
    """As a new process would begin."""
    sys.modules.pop(NAME, None)
    sys.path[:] = [place for place in sys.path if not (Path(place) / f"{NAME}.py").exists()]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one's own, whose module lies in the folder where it was trained."""
    home = tmp_path / "home"
    home.mkdir()
    (home / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.chdir(home)
    train(RECIPE, home / "run", quiet=True)
    forget()
    (home / "imported").unlink()
    return home / "run"


@pytest.fixture
def foreign(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that somebody else sent, in a folder with a module of that name."""
    there = tmp_path / "download"
    shutil.copytree(mine, there / "run")
    (there / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    monkeypatch.chdir(there)
    return there / "run"


def commands(run: Path, out: Path) -> dict[str, list[str]]:
    return {
        "bench": ["bench", str(run), "--batch", "1", "--runtimes", "eager"],
        "evaluate": ["evaluate", str(run), "--out", str(out / "confusion.png")],
        "compile": ["compile", str(run), "-o", str(out / "model.pbe")],
        "export": ["export", str(run), "--format", "onnx", "--out", str(out / "model.onnx")],
        "teacher": ["train", "--teacher.run", str(run), "--out", str(out / "taught"), "--train.epochs", "1"],
        "curve": [
            *("curve", "--budgets", "0.5", "--teacher.run", str(run), "--root", str(out / "curve")),
            *("--train.epochs", "1", "--serial", "--quiet"),
        ],
        "resume": ["train", "--resume", str(run), "--quiet"],
    }


COMMANDS = ["bench", "compile", "evaluate", "export", "teacher", "curve", "resume"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_runs_code_is_not_imported(
    command: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever command reads the run: the sentence comes first, and --trust is the word."""
    if command == "resume":
        (foreign / "result.json").unlink()
    words = commands(foreign, tmp_path)[command]
    assert main(words) == (1 if command == "curve" else 2)  # whose runs fail one by one
    assert REFUSED in "".join(capsys.readouterr())
    assert not (foreign.parent / "imported").exists()
    assert NAME not in sys.modules
    assert main([*words, "--trust"]) == 0
    assert (foreign.parent / "imported").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_ones_own_run_works_from_another_folder(
    command: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "resume":
        (mine / "result.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{NAME}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(commands(mine, tmp_path)[command]) == 0
    assert (mine.parent / "imported").exists()


def test_a_module_that_has_moved_is_not_looked_for_anywhere(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of that name in the current folder may be anybody's."""
    there = tmp_path / "elsewhere"
    there.mkdir()
    shutil.move(mine.parent / f"{NAME}.py", there)
    monkeypatch.chdir(there)
    with pytest.raises(
        UntrustedCode, match=r"is no longer in .*home', where the run .* had it\. Put it back, or go to"
    ):
        network_of(mine)
    assert not (there / "imported").exists()
    network_of(mine, trust=True)


def test_weights_alone_need_no_code(foreign: Path, tmp_path: Path) -> None:
    """Counting them, and writing them in another form, is nobody's risk."""
    assert main(["inspect", str(foreign)]) == 0
    assert main(["export", str(foreign), "--out", str(tmp_path / "model.pare")]) == 0
    assert main(["train", "--resume", str(foreign), "--trust", "--quiet"]) == 0
    assert not (foreign.parent / "imported").exists()


def test_nothing_in_a_run_can_be_changed_for_another_name(mine: Path) -> None:
    """The seal is for one name and one folder."""
    file = mine / "code.json"
    noted = json.loads(file.read_text())
    assert noted["folder"] == str(mine.parent)
    changes = ({"model": "os:abort"}, {"folder": "/tmp"}, {"seal": None}, {"seal": "0" * 64}, {"folder": 3})
    for change in changes:
        file.write_text(json.dumps({**noted, **change}))
        with pytest.raises(UntrustedCode):
            admit(mine, str({**noted, **change}["model"]))
    for odd in ("[]", "{", "null", ""):
        file.write_text(odd)
        with pytest.raises(UntrustedCode):
            admit(mine, noted["model"])
    file.write_text(json.dumps(noted))
    admit(mine, noted["model"])


def test_a_recipe_of_ones_own_trusts_what_it_names(foreign: Path, tmp_path: Path) -> None:
    """Student and teacher are one network: the user has named that code already."""
    train(RECIPE, tmp_path / "first", quiet=True)
    network_of(foreign, known=f"{NAME}:build")
    with pytest.raises(UntrustedCode):
        network_of(foreign, known="wrn")


def test_a_run_that_was_trusted_is_ones_own(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on with a run has trained it."""
    (foreign / "result.json").unlink()
    assert main(["train", "--resume", str(foreign), "--trust", "--quiet"]) == 0
    forget()
    monkeypatch.chdir(tmp_path)
    network_of(foreign)


def test_where_no_key_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training works; what comes of it has to be trusted explicitly."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    train(RECIPE, tmp_path / "run", quiet=True)
    with pytest.raises(UntrustedCode):
        network_of(tmp_path / "run")
    network_of(tmp_path / "run", trust=True)


def test_the_key_is_for_its_user_alone(mine: Path) -> None:
    key = Path(os.environ["XDG_STATE_HOME"]) / "pareback" / "key"
    assert key.stat().st_mode & 0o077 == 0
    assert len(key.read_bytes()) == 64
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    assert mine.exists()


def test_two_modules_of_one_name_are_not_mixed_up(mine: Path, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    import_from(f"{NAME}:build", tmp_path)
    assert home_of(f"{NAME}:build") == tmp_path
    with pytest.raises(InvalidUse, match="is meant, and the one in .* is imported already. Give one of them another"):
        network_of(mine)


def test_packages_have_their_parents_folder(tmp_path: Path) -> None:
    """home_of leads to where the first word of the name is found."""
    inner = tmp_path / NAME / "inner"
    inner.mkdir(parents=True)
    (tmp_path / NAME / "__init__.py").write_text("")
    (inner / "__init__.py").write_text(SOURCE)
    import_from(f"{NAME}.inner:build", tmp_path)
    assert home_of(f"{NAME}.inner:build") == tmp_path
    sys.modules.pop(f"{NAME}.inner")


def test_a_mistake_leaves_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{NAME}.py").write_text("def build(classes, shape): return 3")
    with pytest.raises(TypeError):
        train(RECIPE, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """A downloaded folder may hold files that are called like packages."""
    for package in ("numpy", "torch"):
        (tmp_path / f"{package}.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    code = "from pareback.bench.process import Process; worker = Process('eager', 1); worker.ready(); worker.close()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
