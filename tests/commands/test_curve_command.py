"""``pareback curve``: the plan, what it runs, skips and resumes, what it prints, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pareback import cli
from pareback.commands import curve
from pareback.curves import cluster, running
from pareback.curves.cluster import Needs, share_of
from pareback.lab.train import loop as training
from pareback.lab.train.interrupts import Interrupted
from pareback.runs import store
from pareback.runs.record import read_record

RECIPE = Path(__file__).parents[2] / "recipes" / "digits-curve.yaml"
SHORT = ["--train.epochs", "1", "--data.batch_size", "256"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command is there, and so is one thread."""
    monkeypatch.setitem(cli.COMMANDS, "curve", curve.COMMAND)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*argv: str, code: int = 0) -> None:
    assert cli.main(["curve", str(RECIPE), *SHORT, "--serial", "--quiet", *argv]) == code


def test_peers_stand_on_the_same_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and three others at the same share of weights, each exact."""
    run("--budgets", "0.1", "--goals", "exact,feather,rigl,gmp", "--measure", "weights")
    assert "5 runs: 5 to begin." in capsys.readouterr().out
    found = {one.result["name"]: one.result for one in store.scan(tmp_path / "runs") if one.result is not None}
    for name in ("exact", "feather", "rigl", "gmp"):
        result = found[f"digits-{name}-0.1"]
        assert result["pruned_nonzeros"] == result["pruned_weights"] // 10


def test_a_curve_is_planned_run_and_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every run is in its folder with its record; the table has a line per method and budget, means over seeds."""
    grid = ["--budgets", "0.3,0.1", "--goals", "exact,unconstrained", "--lambdas", "10", "--dense-equivalents"]
    run(*grid, "--seeds", "2")
    out = capsys.readouterr().out
    assert "12 runs: 12 to begin." in out
    assert "[12/12] " in out
    runs = {found.path.name: found for found in store.scan(tmp_path / "runs")}
    assert len(runs) == 12
    assert all(found.state == "finished" and (found.path / "record.json").exists() for found in runs.values())
    exact = next(found for name, found in runs.items() if name.startswith("digits-exact-0.1-1-"))
    assert exact.result is not None
    assert exact.result["nonzeros"] <= 5061
    assert read_record(exact.path / "record.json").name == "digits-exact-0.1"
    lines = [line.split() for line in out.splitlines()]
    pair = [f.result for n, f in runs.items() if n.startswith("digits-exact-0.1-") and f.result is not None]
    line = next(line for line in lines if line[:2] == ["exact", "0.1"])
    assert line[2:4] == ["2", f"{(pair[0]['accuracy'] + pair[1]['accuracy']) / 2:.2f}"]
    assert line[-3:-2] == [f"{100 * 2 * (5061 - 410) / 100_400:.2f}"]
    assert next(line for line in lines if line[:2] == ["thin", "0.3"])[2] == "2"
    assert "pareback runs runs  lists them\n  pareback page runs  draws them" in out


def test_the_recipe_says_how_to_run_it() -> None:
    """The command in its first lines is the one of the manual, and makes 51 runs."""
    about, line = RECIPE.read_text(encoding="utf-8").splitlines()[:2]
    assert about.startswith("# A trade-off curve on a laptop")
    argv = line.removeprefix("#   pareback ").split()
    manual = (RECIPE.parents[1] / "docs" / "curves.md").read_text(encoding="utf-8").replace("\\\n    ", "")
    assert f"pareback {' '.join(argv)}\n" in manual
    argv[1] = str(RECIPE)
    assert cli.main([*argv, "--dry-run"]) == 0


def test_what_is_done_is_skipped_and_what_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second run: the same command resumes it first, and a third time there is nothing to do."""
    grid = ["--budgets", "0.3", "--train.epochs", "3"]
    append, told = training.RunFolder.append, iter(range(100))

    def interrupting(self: training.RunFolder, row: dict[str, object]) -> None:
        append(self, row)
        if next(told) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training.RunFolder, "append", interrupting)
        run(*grid, code=130)
    err = capsys.readouterr().err
    assert "Stopped; 1 of 2 runs are finished, and those under way are saved. The same command goes on." in err
    run(*grid)
    out = capsys.readouterr().out
    assert "2 runs: 1 finished already, 1 to go on with." in out
    assert "[1/1] digits-exact-0.3-0: " in out
    run(*grid)
    assert "2 runs: 2 finished already." in capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--budgets", "0.3,0.15,0.05,0.02", "--goals", "exact,fixed-ga,unconstrained", "--seeds", "3", "--dry-run")
    out = capsys.readouterr().out
    assert "39 runs: 39 to begin." in out
    assert re.search(r"fixed-ga +0.02 +2 +to begin +digits-fixed-ga-0.02-2-[0-9a-f]{10}", out)
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_recipe_are_the_curves(capsys: pytest.CaptureFixture[str]) -> None:
    """The name begins every run's, other fields are in their recipes; conditions of the base hold for all."""
    run("--budgets", "0.3", "--name", "mine", "--goal.min_size", "5000", "--root", "there", "--seeds", "7,")
    found = store.scan(Path("there"))
    assert {each.recipe.name for each in found if each.recipe is not None} == {"mine-dense", "mine-exact-0.3"}
    assert {each.recipe.seed for each in found if each.recipe is not None} == {7}
    exact = next(each for each in found if "exact" in each.path.name)
    assert exact.asked["goal"]["min_size"] == 5000
    assert exact.result is not None
    assert exact.result["pruned_weights"] == 49_200


def test_without_ray_it_says_so_and_runs_serially(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "has_ray", lambda: False)
    argv = ["curve", str(RECIPE), *SHORT, "--budgets", "0.3", "--quiet"]
    assert cli.main([*argv, "--cpus-per-run", "1"]) == 0
    out = capsys.readouterr().out
    assert "Ray is not installed (pip install 'pareback[curves]'): runs take place one after another." in out
    assert "[2/2]" in out
    assert cli.main([*argv, "--seeds", "2", "--address", "auto"]) == 2
    assert "--address auto cannot be used: Ray is not installed" in capsys.readouterr().err


def test_failures_are_named_and_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What works is done; what does not is told, also what was not tried."""

    def failing(recipe: object, path: Path, quiet: bool) -> None:
        raise ValueError("There is nothing to learn.")

    monkeypatch.setattr(running, "work", failing)
    run("--budgets", "0.3,0.2,0.1,0.05", code=1)
    out, err = capsys.readouterr()
    assert "Nothing has worked so far: 2 runs were not tried." in out
    assert "3 of 5 runs failed (digits-dense-0, digits-exact-0.3-0, digits-exact-0.2-0); the same command" in err


def test_what_is_in_the_way_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign folder in a run's place; the others are run."""
    run("--budgets", "0.3", "--dry-run")
    name = capsys.readouterr().out.split()[-1]
    (Path("runs") / name).mkdir(parents=True)
    (Path("runs") / name / "cat.png").write_text("")
    run("--budgets", "0.3", code=1)
    out, err = capsys.readouterr()
    assert f"{name} is not a run: it holds no recipe.yaml." in out
    assert "2 runs: 1 to begin, 1 blocked." in out
    assert f"1 of 2 runs could not begin: remove 'runs/{name}'." in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "exact needs budgets. Write --budgets 0.3,0.15,0.05,0.02."),
        (["--budgets", "0.3", "--goals", "exat"], "There is no goal 'exat'. Did you mean 'exact'?"),
        (["--budgets", "0.3", "--lambdas", "1"], "--lambdas are unconstrained's."),
        (["--goals", "unconstrained", "--lambdas", "a"], "--lambdas 'a' cannot be read. Write --lambdas 0.1,10."),
        (["--budgets", "0.3", "--seeds", "0"], "--seeds 0 is none. Write how many, such as 3"),
        (["--budgets", "0.3", "--seeds", "x"], "--seeds 'x' cannot be read."),
        (["--budgets", "0.3", "--seed", "5"], "A curve has seeds. Write --seeds 5, with the comma"),
        (["--budgets", "2.5"], "params=2.5 is outside (0, 1]."),
        (["--budgets", "0.0001"], "The budget 0.0001 cannot be met: "),
        (["--budgets", "0.3,1e-9", "--measure", "weights", "--goals", "gmp"], "The budget 1e-09 cannot be met: "),
        (["--budgets", "1e-20", "--measure", "weights", "--goals", "gmp"], "The budget 1e-20 leaves no weight"),
        (["--budgets", "2", "--goals", "rigl"], "A budget of 2 is less than what is not pruned: 0.0081 of the network"),
        (
            ["--budgets", "0.5M,0.3", "--goals", "rigl"],
            "The budget 0.5M leaves nothing to prune: the dense network has",
        ),
        (["--budgets", "0.3", "--goals", ""], "--goals '' names none. Write --goals exact, or leave it out"),
        (["--budgets", "0.3", "--model.thin", "0.5"], "model.thin is what --dense-equivalents chooses."),
        (["--budgets", "0.3", "--model.name", "timm/x", "--dense-equivalents"], "model.thin does not know"),
        (["--budgets", "0.3", "--train.epochs", "0"], "train.epochs=0 must be at least 1."),
        (["--budgets", "0.3", "--retries", "-1"], "--retries -1 must be at least 0."),
        (["--budgets", "0.3", "--cpus-per-run", "-1"], "--cpus-per-run -1 must be at least 0."),
        (["--budgets", "0.3", "--retries", "-1", "--dry-run"], "--retries -1 must be at least 0."),
        (["--budgets", "0.3", "--cpus-per-run", "0"], "--cpus-per-run 0 leaves a run nothing to work with."),
        (["--budgets", "0.3", "--goal.sparsity", "0.5"], "Write --measure weights --budgets 0.3,0.05."),
        (["--budgets", "0.3", "--goal.kind", "budget"], "--goal.kind has no effect: a curve sets it for each of its"),
        (
            ["--budgets", "0.3", "--goals", "feather,gmp", "--goal.ramp", "0.75"],
            "--goal.ramp is exact's and has no effect with --goals feather,gmp. Add exact to them, or leave it out.",
        ),
        (["--budgets", "0.3", "--goal.weight", "5"], "--goal.weight is budget's and has no effect with --goals exact."),
        (
            ["--budgets", "0.3", "--goals", "gmp", "--goal.straight_through", "false"],
            "is that of exact, fixed-ga, fixed-bs, budget and unconstrained and has no effect with --goals gmp.",
        ),
        (["--budgets", "0.3", "--data.path", "x.npz"], "data.path='x.npz' has no effect with data.kind=digits."),
        (["--budgets", "0.3", "--address", "ray://x:1"], "is that of Ray's client."),
        (["--budgets", "0.3", "--address", "auto"], "--address auto cannot be used: --serial needs none."),
        (["--budgets", "0.3", "--budget", "1"], "There is no option '--budget'. Did you mean '--budgets'?"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*argv, code=2)
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class _Machines:
    """What Ray says of a cluster's machines."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._resources = resources

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": each} for each in self._resources] + [{"Alive": False, "Resources": {}}]


@pytest.mark.parametrize(
    ("needs", "cpus", "gpus", "threads"),
    [
        (Needs(), 4.0, 1.0, 4),
        (Needs(gpus=0.5), 2.0, 0.5, 2),
        (Needs(gpus=0.0), 1.0, 0.0, 1),
        (Needs(cpus=0.5), 0.5, 1.0, 1),
        (Needs(cpus=3.0, gpus=2.0), 3.0, 2.0, 3),
    ],
)
def test_what_a_run_takes(needs: Needs, cpus: float, gpus: float, threads: int) -> None:
    """A GPU where there are any with its part of the CPUs, else one CPU; and what was asked."""
    share = share_of(_Machines({"CPU": 16.0, "GPU": 4.0}), needs)
    assert (share.cpus, share.gpus, share.threads) == (cpus, gpus, threads)
    assert share_of(_Machines({"CPU": 2.0}), Needs()).cpus == 1.0


def test_what_no_machine_has_is_refused() -> None:
    with pytest.raises(ValueError, match="A run takes 1 CPUs and 8 GPUs, and no machine has as many: the larg"):
        share_of(_Machines({"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0}), Needs(cpus=1.0, gpus=8.0))


def test_interrupted_is_one_error() -> None:
    """With the signal that asked for it, which becomes the exit code."""
    assert running.Progress(3, 2).interrupted(15).number == 15
    assert isinstance(running.Progress(3, 2).interrupted(2), Interrupted)
