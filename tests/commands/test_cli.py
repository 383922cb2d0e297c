"""The command: help, exit codes, one-sentence errors, and what train and inspect print."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pareback
from pareback import __version__, _early_interrupt
from pareback.cli import COMMANDS, USES, main
from pareback.errors import InvalidUse
from pareback.lab.recipe import reading
from pareback.lab.train.interrupts import Interrupted

QUICK = ["--train.epochs", "1", "--data.batch_size", "256", "--goal.kind", "budget", "--goal.sparsity", "0.9"]


def fails(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """Run a command that must fail with ``code`` and one line on stderr, and return that line."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("pareback: error: ")
    return err.removeprefix("pareback: error: ").strip()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that the command made."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "--out", str(out), "--quiet", *QUICK]) == 0
    return out


# -- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``pareback --help`` lists them with what they do."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert command.about in " ".join(out.split())


def test_help_begins_with_what_people_want_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    out = capsys.readouterr().out
    wants = ["See it work", "Train a network", "Prune a network that you have", "Compare", "Look", "Deploy", "Repeat"]
    places = [*(out.index(f"  {want}") for want in wants), out.index("\ncommands:"), out.index("\noptions:")]
    assert places == sorted(places)


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long choices, usages and notes are wrapped; a wide terminal does not make lines that nobody reads."""
    monkeypatch.setenv("COLUMNS", columns)
    main([*filter(None, [name]), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_the_commonest_sections_of_a_recipe_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    out = capsys.readouterr().out
    headings = ["options", "the run", "goal", "data", "model", "train", "optimizer", "schedule", "teacher"]
    places = [out.index(f"\n{heading}:\n") for heading in headings]
    assert places == sorted(places)
    assert out.index("--train.epochs") < out.index("--train.device") < out.index("--train.label_smoothing")


#: What shortens an example's work and leaves what it shows.
_SHORTER = {"train": ["--train.epochs", "1"], "curve": ["--train.epochs", "1", "--serial", "--quiet"]}


def test_the_examples_of_the_help_work_when_they_are_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in an empty folder; the demo and the timing have tests of their own, the paper needs data."""
    pytest.importorskip("vl_convert", reason="needs the extra page: pip install 'pareback[page]'")
    monkeypatch.chdir(tmp_path)
    done = []
    for line in (line for lines in USES.values() for line in lines):
        program, name, *rest = shlex.split(line.replace("\\\n", " "))
        assert program == "pareback"
        if name not in ("demo", "bench", "reproduce"):
            assert main([name, *rest, *_SHORTER.get(name, [])]) == 0
        done.append(name)
    assert set(done) == set(COMMANDS) - {"inspect"}
    assert {"report.html", "runs"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And leaves with success."""
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: pareback {name}")


def test_help_of_train_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Each field of a recipe is there with the words of the dataclass."""
    main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for field in reading.entries():
        assert f"--{field.key} " in said
        assert field.about in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``pareback --version`` prints the package's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pareback {__version__}\n"


def test_the_command_is_installed_and_a_module() -> None:
    """The script that pip installs and ``python -m pareback`` call the same function."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["pareback"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_python_m_runs_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its exit code."""
    monkeypatch.setattr(sys, "argv", ["pareback", "nonsense"])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(Path(pareback.__file__).with_name("__main__.py")), run_name="__main__")
    assert leaving.value.code == 2
    assert "There is no command 'nonsense'" in capsys.readouterr().err


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "There is no command. Write one of: train, evaluate"),
        (["trian"], "There is no command 'trian'. Did you mean 'train'?"),
        (
            ["prune"],
            "There is no command 'prune'. Networks are pruned as they train: pareback train --goal.kind budget",
        ),
        (["train", "--goal.kind", "budget", "--goal.sparsity", "95%"], "Write a number. For 95% write 0.95."),
        (["reproduce"], "EXPERIMENT is missing. See pareback reproduce --help."),
        (["train", "--goal.sparsty", "0.9"], "no option '--goal.sparsty'. Did you mean '--goal.sparsity'?"),
        (["train", "--sparsity=0.9"], "no option '--sparsity'. Did you mean '--goal.sparsity'?"),
        (["train", "--epochs", "3"], "no option '--epochs'. Did you mean '--train.epochs'?"),
        (["train", "--resum"], "no option '--resum'. Did you mean '--resume'?"),
        (["train", "--zzzzzzzz"], "no option '--zzzzzzzz'. See pareback train --help."),
        (["train", "a.yaml", "b.yaml"], "'b.yaml' is one argument too many."),
        (["train", "no.yaml"], "There is no recipe 'no.yaml'."),
        (["train", "train.epochs=3"], "'train.epochs=3' is not an option. Write --train.epochs 3."),
        (
            ["train", "train.compile=true", "train.cuda_graph=true"],
            "Write --train.compile true --train.cuda_graph true.",
        ),
        (["curve", "epoch=3"], "'epoch=3' is not an option. Did you mean --train.epochs 3?"),
        (["train", "zzzzzzzz=3"], "There is no recipe 'zzzzzzzz=3'."),
        (["train", "--data.path", "my.npz"], "data.path='my.npz' has no effect with data.kind=digits."),
        (["train", "--optimizer.lr", "fast"], "optimizer.lr='fast' has the wrong type. Write a number."),
        (["train", "--optimizer.lr"], "Argument --optimizer.lr: expected one argument."),
        (["train", "--goal.kind", "buget"], "goal.kind='buget' is not known."),
        (["train", "--train.cuda_graph", "--train.device", "cpu"], "train.cuda_graph needs a GPU"),
        (["train", "--data.kind", "npz", "--data.path", "no.npz"], "no.npz"),
        (["train", "--resume", "--force"], "Write one of them."),
        (["train", "--resume", "a", "--out", "b"], "--resume a and --out b are two folders."),
        (["train", "--resume", "no-run"], "There is no run in 'no-run' to go on with."),
        (["train", "--out", ""], "Argument --out: '' is no path."),
        (["demo", "--out", " "], "Argument --out: ' ' is no path."),
        (["train", "--seed", "9" * 23], f"seed={'9' * 23} must be at most 9223372036854775807. Write seed=0."),
        (["inspect"], "FILE_OR_RUN is missing."),
        (["inspect", "no.safetensors"], "There is no 'no.safetensors'."),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, nothing on stdout, no traceback, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, 2, *argv)
    assert list(tmp_path.iterdir()) == []


def test_a_file_may_have_an_equals_sign_in_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a recipe where it is there."""
    monkeypatch.chdir(tmp_path)
    Path("seed=1").write_text("sed: 1")
    assert "seed=1: A recipe has no 'sed'." in fails(capsys, 2, "train", "seed=1")


@pytest.mark.parametrize(
    ("argv", "code"), [(["-m", "pareback", "runs"], 130), (["pareback", "runs"], 130), (["mine.py"], -signal.SIGINT)]
)
def test_an_interrupt_during_the_imports_is_quiet_in_the_command_alone(
    argv: list[str], code: int, tmp_path: Path
) -> None:
    """However the command is started; a program that imports the package gets its KeyboardInterrupt."""
    (tmp_path / "torch.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n")
    (tmp_path / "pareback").write_text("from pareback.cli import main\nmain()\n")
    (tmp_path / "mine.py").write_text("import pareback\n")
    path = os.pathsep.join([str(tmp_path), str(Path(pareback.__file__).parents[1])])
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == code, done.stderr
    assert (done.stderr == "\nInterrupted.\n") == (code == 130), done.stderr


def test_the_command_takes_interrupts_over_from_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "-m", "pareback"])
        _early_interrupt.guard()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        main(["nonsense"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
def test_too_little_memory_for_torch_is_a_sentence() -> None:
    """Under ``ulimit -v`` the linker's words came with a traceback."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (600_000_000, 600_000_000))

    command = [sys.executable, "-m", "pareback", "runs"]
    done = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "pareback: error: There is not enough memory to load PyTorch. Free some, or raise the limit (ulimit -v).\n"
    )


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """PAREBACK_TRACEBACK=1 lets the error through."""
    monkeypatch.setenv("PAREBACK_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="There is no recipe"):
        main(["train", "no.yaml"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidUse("The disk is full."), 1, "pareback: error: The disk is full.\n"),
        (RuntimeError("CUDA error"), 1, "pareback: error: RuntimeError: CUDA error\nSet PAREBACK_TRACEBACK=1"),
        (FloatingPointError("The loss is not finite."), 1, "pareback: error: The loss is not finite.\n"),
        (ZeroDivisionError("by zero"), 1, "pareback: error: ZeroDivisionError: by zero\nSet PAREBACK_TRACEBACK=1"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
        (Interrupted("Stopped; go on.", 15), 143, "\nStopped; go on.\n"),
    ],
)
def test_failures_have_codes_of_their_own(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 for what failed, 130 after Ctrl-C; an error that nobody foresaw is named by its type."""

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pareback.lab.trainer.train", failing)
    assert main(["train"]) == code
    assert capsys.readouterr().err.startswith(message)


def test_of_several_processes_one_complains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About input that is the same for all; a failure of its own, each process reports."""
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "no.yaml"]) == 2
    assert capsys.readouterr().err == ""


# -- train and inspect -----------------------------------------------------------------------------------------------


def test_train_reads_a_recipe_and_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line has the last word; the resolved recipe is in the folder, and the last line sums up."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\ntrain: {epochs: 7, ema: 0.5}\ndata: {batch_size: 256}\n", encoding="utf-8")
    assert main(["train", str(recipe), "--train.epochs", "1", "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    resolved = reading.read(tmp_path / "run" / "recipe.yaml")
    assert (resolved.name, resolved.train.epochs, resolved.train.ema) == ("mine", 1, 0.5)
    *header, epoch, last = out.splitlines()
    assert [line.split()[0] for line in header] == ["data", "model", "goal", "train"]
    assert "digits: 1,347 images to train on, 450 to test with, 10 classes, 1×8×8" in header[0]
    assert all(len(line) <= 80 for line in (*header, epoch))
    assert re.match(r"epoch 1/1  loss [\d.]+  train [\d.]+ %  test [\d.]+ %$", epoch)
    assert re.match(r"mine: [\d.]+ % accuracy, 50,610 of 50,610 parameters non-zero, [\d.]+ s. Everything is", last)


def test_the_last_line_says_every_limit_asked_and_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 50,200 prunable weights a fifth, and of 50,610 parameters 30 %: 10,040 and 15,183.

    410 biases are kept beside the weights.
    """
    goal = ["--goal.kind", "budget", "--goal.sparsity", "0.8", "--goal.params", "0.3"]
    assert main(["train", "--quiet", "--train.epochs", "1", *goal, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "Weights: 10,040 allowed, 10,040 kept; Parameters: 15,183 allowed, 10,450 kept." in said


def test_the_default_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/NAME-SEED in the current folder; a bare --resume finds it again."""
    monkeypatch.chdir(tmp_path)
    argv = ["train", "--quiet", "--name", "tiny", "--seed", "4", "--train.epochs", "1"]
    assert main(argv) == 0
    assert (tmp_path / "runs" / "tiny-4" / "result.json").exists()
    assert main([*argv, "--resume"]) == 0


def test_the_current_folder_ends_a_sentence_with_one_full_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--out", ".", "--quiet", *QUICK]) == 0
    assert capsys.readouterr().out.endswith(" Everything is in '.'.\n")


def test_a_quiet_training_still_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with accuracy and zeros."""
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--quiet", *QUICK]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "% accuracy" in said
    assert "pruned tensors 90.000 % sparse" in said
    assert said.endswith(f"Everything is in {out}.\n")


def test_a_finished_run_is_not_trained_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command says so and succeeds; another recipe in the same folder is refused."""
    before = (run / "result.json").read_bytes()
    assert main(["train", "--out", str(run), *QUICK]) == 0
    assert "holds this run already" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert "Everything is in" in capsys.readouterr().out
    assert (run / "result.json").read_bytes() == before
    other = fails(capsys, 2, "train", "--out", str(run), *QUICK, "--seed", "1")
    assert "holds a run of another recipe (seed is 0 there and 1 here)" in other


def test_inspect_counts_a_run_and_its_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder, the safetensors file, the checkpoint and a plain state dict give the exact non-zeros."""
    weights = load_file(run / "model.safetensors")
    zeros = sum(int((value == 0).sum()) for value in weights.values())
    total = sum(value.numel() for value in weights.values())
    plain, nested = tmp_path / "plain.pt", tmp_path / "nested.pt"
    torch.save(weights, plain)
    torch.save({"state_dict": {**weights, "norm.running_mean": torch.zeros(3)}, "epoch": 3}, nested)
    for path in (run, run / "model.safetensors", plain, nested):
        assert main(["inspect", str(path)]) == 0
        last = capsys.readouterr().out.splitlines()[-2:]
        assert last[0].startswith(f"whole model:    {total - zeros:,} of all {total:,} parameters non-zero")
        assert last[1].startswith("pruned tensors: 5,020 of 50,200 weights non-zero (90.000 % sparse)")
    assert main(["inspect", str(run / "checkpoint.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == total


def test_inspect_refuses_what_holds_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder, a broken file, a file of something else: each gets its sentence."""
    broken, odd, pickled = tmp_path / "broken.safetensors", tmp_path / "odd.pt", tmp_path / "text.pt"
    save_file({"a": torch.ones(100)}, broken)
    broken.write_bytes(broken.read_bytes()[:-50])
    torch.save([1, 2], odd)
    pickled.write_text("no weights")
    (tmp_path / "empty").mkdir()
    assert "holds no model.safetensors and no checkpoint.pt" in fails(capsys, 2, "inspect", str(tmp_path / "empty"))
    assert "is not a whole safetensors file" in fails(capsys, 2, "inspect", str(broken))
    assert "holds no weights by name" in fails(capsys, 2, "inspect", str(odd))
    assert "is not a state dict" in fails(capsys, 2, "inspect", str(pickled))


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["train", "--help"], ["reproduce", "--help"]])
def test_help_does_not_wait_for_torch(argv: list[str]) -> None:
    """Which takes more than a second to import."""
    command = [sys.executable, "-X", "importtime", "-m", "pareback", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(("usage: pareback", "pareback 0."))
    assert "cli" in done.stderr
    assert not {"torch", "numpy", "yaml"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_what_is_no_recipe_is_told_from_one_that_is_missing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's folder and a file of weights are there, and what people want of them is said."""
    told = fails(capsys, 2, "train", str(run))
    assert f"is the folder of a run. To go on with it, write --resume {run}" in told
    assert f"--model.pretrained {run}." in told
    assert "is a folder. Give the path of a YAML file." in fails(capsys, 2, "train", str(tmp_path))
    weights = run / "model.safetensors"
    told = fails(capsys, 2, "train", str(weights))
    assert "holds weights, and a recipe is a YAML file." in told
    assert f"write --model.pretrained {weights}." in told


@pytest.mark.parametrize("command", ["runs", "page"])
def test_a_file_of_weights_is_no_store_of_runs(
    command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = fails(capsys, 2, command, str(run / "model.safetensors"))
    assert "is a file, and no record of a run (.json). Give the folder that holds the runs" in told
    assert list(tmp_path.iterdir()) == []


def test_an_empty_store_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "There are no runs" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--state", "finished"]) == 0
    assert capsys.readouterr().out == "0 runs.\n"


def test_nothing_is_collected_from_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of nothing in a folder of a wrong name would look like a result."""
    monkeypatch.chdir(tmp_path)
    for experiment in ("table2", "peers", "imagenette"):
        assert "There are no rows in 'results/paper/rows'." in fails(capsys, 2, "reproduce", experiment, "--collect")
    assert list(tmp_path.iterdir()) == []


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "what do you want to do?" in capsys.readouterr().out
    assert main(["help", "runs"]) == 0
    assert capsys.readouterr().out.startswith("usage: pareback runs")
