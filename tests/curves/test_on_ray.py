"""Curves on Ray: a real cluster of two nodes whose worker is killed, an instance of its own, Ctrl-C, and refusals."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from stored_runs import RECIPE

from pareback.lab.recipe.reading import override, to_yaml
from pareback.runs import store
from pareback.runs.store import StoredRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.killed,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

#: Long enough to be killed in the middle, with a checkpoint per epoch.
BASE = override(replace(RECIPE, name="tiny"), {"train.epochs": 80, "goal.sparsity": "none", "goal.kind": "dense"})
GRID = ["--budgets", "0.2", "--goals", "exact,fixed-bs", "--measure", "weights"]

#: The command as a user has it.
COMMAND = """
import sys
from pareback import cli
from pareback.commands import curve
cli.COMMANDS.setdefault("curve", curve.COMMAND)
sys.exit(cli.main())
"""

#: Two nodes of one CPU each, until the input ends; a line of it takes the second one away, as a lost machine is.
#: A process of its own: what Ray does to signals stays there.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=small)
second = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    sys.stdin.read()
cluster.shutdown()
"""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
#: Ray's own dozen of processes are not measured; those of a command are.
UNMEASURED = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("COVERAGE_")}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(BASE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[str, IO[str]]]:
    """The address of a cluster of two nodes, and where a line takes the second one away."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=UNMEASURED
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        said = ""
        while not re.fullmatch(r"[\d.]+:\d+\n", said):
            said = process.stdout.readline()
            assert said, "the cluster did not start"
        yield said.strip(), process.stdin
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def cluster(two_nodes: tuple[str, IO[str]]) -> str:
    return two_nodes[0]


def command(recipe: Path, root: Path, *more: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", COMMAND, "curve", str(recipe), *GRID, "--root", str(root), *more]
    # A session of its own, as a terminal gives it: a signal to the group must not reach the tests.
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=root.parent,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out, err


def until(found: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until something is there; if the command ends first, say what it said."""
    limit = time.monotonic() + 240
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "it did not come to pass in time"
        time.sleep(0.02)


def under_way(root: Path) -> list[Path]:
    """The folders of runs that have a checkpoint and are not finished."""
    folders = list(root.glob("*-*")) if root.exists() else []
    return [p for p in folders if (p / "checkpoint.pt").exists() and not (p / "result.json").exists()]


def weights(root: Path) -> dict[str, bytes]:
    found = {run.path.name: run for run in store.scan(root)}
    assert {run.state for run in found.values()} == {"finished"}
    return {name: (run.path / "model.safetensors").read_bytes() for name, run in found.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of the same curve, one run after another."""
    home = tmp_path_factory.mktemp("undisturbed")
    recipe = home / "tiny.yaml"
    recipe.write_text(to_yaml(BASE), encoding="utf-8")
    out, _ = ended(command(recipe, home / "runs", "--serial", "--quiet"), 0)
    assert "[3/3]" in out
    return weights(home / "runs")


def test_a_killed_worker_loses_nothing(
    cluster: str, recipe: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """On two nodes one run is killed in the middle: it goes on from its checkpoint and ends with the same bits."""
    root = tmp_path / "runs"
    process = command(recipe, root, "--address", cluster)
    until(lambda: under_way(root), process)
    victim = under_way(root)[0]
    os.kill(int((victim / ".lock").read_text()), signal.SIGKILL)
    out, _ = ended(process, 0)
    assert "2 machines. A run takes 1 CPUs." in out
    assert re.search(r"tiny-\S+: its worker was lost \(\w+\). Again from its last checkpoint, try 1 of 2.", out)
    assert weights(root) == undisturbed
    resumed = {run.path.name: run.result["resumed"] for run in store.scan(root) if run.result is not None}
    assert resumed[victim.name] == 1
    assert sum(resumed.values()) == 1
    assert not list(root.glob(".shared-*"))
    again, _ = ended(command(recipe, root, "--address", cluster), 0)
    assert "3 runs: 3 finished already." in again


def test_ctrl_c_saves_and_the_same_command_goes_on(recipe: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """On an instance of its own, which is stopped: no process is left, runs are resumed to the same bits."""
    root = tmp_path / "runs"
    process = command(recipe, root)
    until(lambda: under_way(root), process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = ended(process, 130)
    assert "On a Ray instance of this machine." in out
    assert re.search(
        r"Stopped; \d of 3 runs are finished, and those under way are saved. The same command goes on.", err
    )
    left: list[StoredRun] = [run for run in store.scan(root) if run.state == "unfinished"]
    assert left
    assert not [line for line in _processes() if f"/{process.pid}" in line or str(root) in line]
    out, _ = ended(command(recipe, root), 0)
    assert f"{len(left)} to go on with" in out
    assert weights(root) == undisturbed


def _processes() -> list[str]:
    """The command lines of all processes, each with the session it belongs to."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
            found.append(f"/{session} " + (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return found


def test_what_ray_cannot_do_is_said_at_once(cluster: str, recipe: Path, tmp_path: Path) -> None:
    """Nobody at an address, and runs that no machine is large enough for; nothing is left behind."""
    _, err = ended(command(recipe, tmp_path / "runs", "--address", "127.0.0.1:1"), 2)
    assert "There is no Ray cluster at '127.0.0.1:1'." in err
    _, err = ended(command(recipe, tmp_path / "runs", "--address", cluster, "--cpus-per-run", "1000"), 2)
    assert "A run takes 1000 CPUs and 0 GPUs, and no machine has as many" in err
    assert not (tmp_path / "runs").exists()


def test_a_cluster_has_to_share_the_store(cluster: str, recipe: Path, tmp_path: Path) -> None:
    """A machine that does not see the marker is named; here all see the same disk, so the question is answered no."""
    answer = "cluster.look_around = lambda marker: (False, cluster.__version__)"
    blind = COMMAND.replace("sys.exit", f"from pareback.curves import cluster\n{answer}\nsys.exit")
    argv = [sys.executable, "-c", blind, "curve", str(recipe), *GRID, "--root", str(tmp_path / "runs")]
    done = subprocess.run(
        [*argv, "--address", cluster], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 2
    assert re.search(r"The machine \S+ does not see '\S+runs'. Give a folder that all machines share", done.stderr)


def test_a_node_that_is_taken_away_loses_nothing(
    two_nodes: tuple[str, IO[str]], recipe: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """With a run on each node one of them goes: its run goes on elsewhere, and every point ends once.

    The last test: the cluster has one node after it.
    """
    root, (address, orders) = tmp_path / "runs", two_nodes
    process = command(recipe, root, "--address", address)
    until(lambda: len(under_way(root)) == 2, process)
    orders.write("\n")
    orders.flush()
    out, _ = ended(process, 0)
    assert len(re.findall(r"worker was lost \(\w+\). Again from its last checkpoint", out)) == 1
    assert weights(root) == undisturbed
    assert sum(run.result["resumed"] for run in store.scan(root) if run.result is not None) == 1
    assert len(re.findall(r"^\[\d/3\]", out, re.MULTILINE)) == 3
