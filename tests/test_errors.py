"""Errors that are meant for users have one base, and the command tells them from failures of its own."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import pareback as pb
from pareback.artifact.export import export
from pareback.bench.masks import mask_uniformly_
from pareback.cli import main
from pareback.commands.arguments import Parser
from pareback.curves.cluster import Needs, connected
from pareback.errors import InvalidType, InvalidUse, InvalidValue, MissingFile
from pareback.files import DiskFullError
from pareback.lab.optional import optional
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.distributed import team
from pareback.page.references import references
from pareback.runs import checkpoints
from pareback.runs.folder import result_of
from pareback.runs.query import condition
from pareback.runs.results import NUMBERS

SOURCE = Path(pb.__file__).parent
QUICK = ["--train.epochs", "1", "--data.batch_size", "256"]

# -- who raises what -------------------------------------------------------------------------------------------------

#: Where every error is to be one of ``pareback.errors``, below ``src/pareback``.
ROOMS = (".",)

#: The built-in errors that may be left there: nobody's mistake, or never seen by anybody.
INTERNAL = {
    ("lab/recipe/reading.py", "TypeError"): "tells value_of that a value is of another type; the sentence is made",
    ("lab/train/loop.py", "RuntimeError"): "a source that breaks its promise",
    ("runtime/graph/operation.py", "TypeError"): "an operation that the capture does not make",
    ("runtime/lower/image_ops.py", "TypeError"): "an operation that the capture does not make",
    (
        "runtime/native/bindings.py",
        "RuntimeError",
    ): "a kernel that was not built, which tuning asks for and does without",
    ("runtime/stages/encoder.py", "TypeError"): "an operation that the capture does not make",
}


def built_in(path: Path) -> Iterator[str]:
    """Yield the built-in errors that a module makes, raised at once or handed on."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        made = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if isinstance(made, ast.Name) and made.id in ("ValueError", "TypeError", "RuntimeError", "FileNotFoundError"):
            yield made.id


@pytest.mark.slow
def test_errors_are_those_for_users() -> None:
    """A plain ValueError would be taken for a failure of the program: use InvalidValue, or say above why not."""
    places = [SOURCE / room for room in ROOMS]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    found = {(file.relative_to(SOURCE).as_posix(), name) for file in files for name in built_in(file)}
    assert found == set(INTERNAL)


def damaged(folder: Path) -> Path:
    (folder / "a.pare").write_bytes(b"no weights")
    return folder / "a.pare"


#: A mistake in each room, and the built-in error that it is as well.
MISTAKES: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "a field that is not there": (lambda _: override(Recipe(), {"goal.sparsty": 0.9}), ValueError),
    "a field of another type": (lambda _: override(Recipe(), {"train.epochs": 2.5}), TypeError),
    "a damaged file": (lambda folder: pb.load(damaged(folder)), ValueError),
    "a missing file": (lambda folder: pb.load(folder / "no.pare"), FileNotFoundError),
    "a missing folder": (lambda folder: pb.save({"a": torch.ones(1)}, folder / "no" / "a.pare"), FileNotFoundError),
    "nothing to save": (lambda folder: pb.save(3, folder / "a.pare"), TypeError),  # type: ignore[arg-type]
    "weights alone": (lambda folder: export({"a": torch.ones(1)}, folder / "a.onnx", "onnx"), ValueError),
    "no model": (lambda _: pb.compile(3, torch.ones(1, 4)), TypeError),  # type: ignore[arg-type]
    "no threads": (lambda _: pb.compile(nn.Linear(4, 2), torch.ones(1, 4), threads=0), ValueError),
    "other inputs": (lambda _: pb.compile(nn.Linear(4, 2), torch.ones(1, 4))(torch.ones(1, 5)), ValueError),
    "an option": (lambda _: Parser(prog="pareback").parse(["--no"]), ValueError),
    "a package": (lambda _: optional("not_there"), RuntimeError),
    "a checkpoint": (lambda folder: checkpoints.load(damaged(folder)), RuntimeError),
    "a condition": (lambda _: condition("goal.knd=budget"), ValueError),
    "references": (lambda folder: references(str(folder / "no.yaml")), FileNotFoundError),
    "zeros alone": (lambda _: mask_uniformly_(nn.Linear(4, 2), 1.0, torch.ones(1, 4)), ValueError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_is_a_user_error(mistake: str, tmp_path: Path) -> None:
    """And what Python's own habits ask for: ``except ValueError`` goes on working."""
    make, usual = MISTAKES[mistake]
    with pytest.raises(pb.UserError) as caught:
        make(tmp_path)
    assert isinstance(caught.value, usual)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("kind", [InvalidValue, InvalidType, InvalidUse, MissingFile, pb.BadFile, DiskFullError])
def test_errors_travel_between_processes(kind: type[pb.UserError]) -> None:
    """As the first process of a training tells the others what is wrong."""
    again = pickle.loads(pickle.dumps(kind("Give another one.")))
    assert (type(again), str(again)) == (kind, "Give another one.")


# -- what the command makes of them ----------------------------------------------------------------------------------


def code_of_failing(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a training in which something deep inside raises an error."""

    def failing(*_: object) -> float:
        raise error

    monkeypatch.setattr("pareback.lab.train.loop.rate", failing)
    return main(["train", "--out", str(folder / "run"), *QUICK])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("math domain error"), "ValueError: math domain error"),
        (TypeError("'NoneType' object is not iterable"), "TypeError: 'NoneType' object is not iterable"),
        (KeyError("shape"), "KeyError: 'shape'"),
        (RuntimeError("CUDA error: the device is gone"), "RuntimeError: CUDA error: the device is gone"),
    ],
)
def test_what_fails_inside_is_no_mistake_of_the_user(
    error: Exception,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Deep in a training: exit code 1, the error's type, and how to see where it came from."""
    assert code_of_failing(error, tmp_path, monkeypatch) == 1
    assert capsys.readouterr().err == (
        f"pareback: error: {message}\nSet PAREBACK_TRACEBACK=1 to see where it came from.\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidValue("Give another one."), 2),
        (InvalidType("Give another one."), 2),
        (MissingFile("Give another one."), 2),
        (FileNotFoundError("Give another one."), 2),
        (InvalidUse("Give another one."), 1),
        (DiskFullError("Give another one."), 1),
        (OSError("Give another one."), 1),
        (FloatingPointError("Give another one."), 1),
    ],
)
def test_what_was_foreseen_is_told_by_its_sentence(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without its type; 2 is for what is wrong in what was given."""
    assert code_of_failing(error, tmp_path, monkeypatch) == code
    err = capsys.readouterr().err
    assert err.startswith("pareback: error: Give another one.")
    assert err.count("\n") == 1


# -- what libraries say of a user's input ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 2024-13-01", "has a value that cannot be read (month must be in 1..12). Write it in quotes."),
        (f"seed: {'9' * 5000}", "has a value that cannot be read (Exceeds the limit (4300 digits)"),
        ("seed: !!int five", "has a value that cannot be read (invalid literal for int()"),
        ("seed: !!bool perhaps", "has a value that cannot be read ('perhaps')"),
        ("name: !!timestamp soon", "has a value that cannot be read ("),
        ("goal: " + "[" * 5000, "is nested too deeply."),
        ('name: "a\\0b"', "has the wrong type. Write text."),
        ("data: {kind: npz, path: ~nobody-lives-here/a.npz}", "There is no file ~nobody-lives-here/a.npz"),
        ("teacher: {run: ~nobody-lives-here/run}", "'~nobody-lives-here/run' holds no finished run."),
    ],
)
def test_a_recipe_that_a_library_refuses(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is answered in a sentence, with exit code 2."""
    (tmp_path / "a.yaml").write_text(text + "\n", encoding="utf-8")
    assert main(["train", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--name", "\udcff"], "name='\\udcff' has the wrong type. Write text."),
        (["train", "--optimizer.lr", "inf"], "optimizer.lr=inf must be above 0 and finite. Write optimizer.lr=0.1."),
        (["train", "--out", "\udcff"], "Argument --out: '\\udcff' is not UTF-8."),
        (["bench", "a.yaml", "--batch", "²"], "--batch '²' is not a list of whole numbers above 0."),
        (["bench", "a.yaml", "--batch", "9" * 5000], "is not a list of whole numbers above 0."),
        (["bench", "a.yaml", "--out", "."], "'.' is a folder. Give the name of a file with --out."),
        (["bench", "a.yaml", "--out", "no/a.json"], "There is no folder 'no'. Make it first."),
        (["reproduce", "ste", "--data.path", "a.npz", "--seeds", "²"], "--seeds '²' cannot be read."),
        (["curve", "--budgets", "0.3", "--seeds", "²"], "--seeds '²' cannot be read."),
    ],
)
def test_arguments_that_a_library_refuses(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Likewise."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_bytes_in_the_command_line_that_are_no_text(tmp_path: Path) -> None:
    """A recipe may be called anything, and what is written of the command can be read again."""
    recipe, out = tmp_path / "caf\udce9.yaml", tmp_path / "run"
    recipe.write_text("train: {epochs: 1}\ndata: {batch_size: 256}\n")
    path = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, "-m", "pareback", "train", str(recipe), "--out", str(out), "--quiet"]
    subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=True)
    assert result_of(out)["environment"]["argv"][-4] == str(recipe)


def finished(folder: Path) -> dict[str, Any]:
    """Make a folder look like that of a finished run, and return what its result holds."""
    export({"a": torch.ones(2, 2)}, folder / "model.safetensors", "safetensors")
    content: dict[str, Any] = {
        **dict.fromkeys(NUMBERS, 1),
        **{"name": "a", "environment": {}, "seconds": {"total": 1.0}, "complete": True},
        **{"recipe": {"data": {}, "model": {}, "goal": {}, "train": {}}, "tensors": [{"name": "a", "pruned": True}]},
        **{"classes": 2, "shape": [1, 1, 2]},
    }
    (folder / "result.json").write_text(json.dumps(content))
    return content


@pytest.mark.parametrize("text", ["{", "[1]", "{}", "[" * 100_000, '{"seed": "x"}'])
def test_a_damaged_result_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that reads it."""
    finished(tmp_path)
    (tmp_path / "result.json").write_text(text)
    for argv in (["inspect"], ["export", "--format", "onnx"], ["bench"]):
        assert main([argv[0], str(tmp_path), *argv[1:]]) == 2
        err = capsys.readouterr().err
        assert "result.json' is " in err
        assert "Put the right one back, or train anew with --force." in err


@pytest.mark.parametrize(
    ("argv", "change", "message"),
    [
        (["inspect"], {"tensors": [3]}, "is not whole: it lacks tensors."),
        (["inspect"], {"tensors": [{"name": "b", "pruned": True}]}, "are of two runs."),
        (["bench"], {"shape": None}, "does not say what images the network is for."),
        (["export", "--format", "onnx"], {"classes": "2"}, "does not say what images the network is for."),
    ],
)
def test_a_result_of_something_else_is_named(
    argv: list[str], change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text(json.dumps({**finished(tmp_path), **change}))
    assert main([argv[0], str(tmp_path), *argv[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("text", ["- 2024-13-01", "- !!bool perhaps", "[" * 5000, "- {error: 1, nonzeros: .inf}"])
def test_references_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InvalidValue, match="Write "):
        references(str(tmp_path / "a.yaml"))


def test_names_of_classes_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = numpy.zeros((4, 8, 8, 1), "uint8"), numpy.arange(4) % 2
    arrays = {"train_x": images, "train_y": labels, "test_x": images, "test_y": labels}
    numpy.savez(tmp_path / "a.npz", classes=numpy.array([b"a", b"\xff"]), **arrays)
    assert main(["train", "--data.kind", "npz", "--data.path", str(tmp_path / "a.npz"), "--out", "no"]) == 2
    assert "holds bytes that are not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number. Start the processes with torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK='' is no whole number."),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "The processes cannot meet (.*MASTER_ADDR"),
    ],
)
def test_processes_that_were_not_started_by_torchrun(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidValue, match=message.replace("(", r"\(")), team("cpu"):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a..b:6379", "There is no Ray cluster at 'a..b:6379'."),
        ("nonsense", "--address nonsense cannot be used: Invalid address format: nonsense. Write auto or HOST:6379."),
        ("host:²", "--address host:² cannot be used: Unable to parse port number"),
    ],
)
def test_an_address_that_is_none(address: str, message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InvalidValue, match=message), connected(Needs(address)):
        pass


def test_a_network_that_changed_since_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What torch says of shapes becomes what to do."""
    monkeypatch.chdir(tmp_path)
    builder = "from torch import nn\n\ndef build(classes, shape):\n    return nn.Sequential(nn.Flatten(), {})\n"
    small = "nn.Linear(64, classes)"
    large = f"nn.Linear(64, 64), {small}"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets_before.py").write_text(builder.format(small))
    (tmp_path / "nets_after.py").write_text(builder.format(large))
    argv = ["train", *QUICK, "--out", "run", "--quiet"]
    assert main([*argv, "--model.name", "nets_before:build"]) == 0
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("nets_before", "nets_after"))
    (tmp_path / "run" / "result.json").unlink()
    capsys.readouterr()
    assert main([*argv, "--model.name", "nets_after:build", "--resume"]) == 1
    err = capsys.readouterr().err
    assert "does not fit the recipe's network, which may have changed since." in err
    assert err.count("\n") == 1
