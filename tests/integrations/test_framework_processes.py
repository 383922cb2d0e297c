"""Several processes under each framework: all of them end alike, and as one process does with the same batches."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import assert_same

for framework in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(framework)

pytestmark = pytest.mark.slow

FRAMEWORKS = ["lightning", "hugging_face", "accelerated"]
#: The budget, to the weight: of the small network, and of the small decoder.
KEPT = {"lightning": 665, "hugging_face": 3072, "accelerated": 665}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a number of processes came to, started once for all tests."""
    started: dict[int, list[dict[str, Any]]] = {}

    def ranks(world: int) -> list[dict[str, Any]]:
        if world not in started:
            folder = tmp_path_factory.mktemp(f"{world}-processes")
            script = Path(__file__).parents[1] / "toys" / "framework_processes.py"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            done = subprocess.run([*torchrun, str(script), str(folder)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            started[world] = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
        return started[world]

    return ranks


def of(ranks: list[dict[str, Any]], part: str) -> list[Any]:
    for found in ranks:
        if isinstance(found[part], str):
            pytest.fail(found[part], pytrace=False)
    return [found[part] for found in ranks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one process comes to: this one."""
    accelerate = importlib.import_module("accelerate")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(torch|accelerate|lightning|transformers)")
        processes = importlib.import_module("framework_processes")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one per process, else
        yield {name: getattr(processes, name)(tmp_path_factory.mktemp(name)) for name in FRAMEWORKS}
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_several_processes_agree_with_one(name: str, world: int, launched: Any, alone: dict[str, Any]) -> None:
    """Under DDP: every rank has the same bits, one process's weights but for rounding, and exactly its count."""
    first, *others = of(launched(world), name)
    for other in others:
        assert_same(other["weights"], first["weights"])
    assert first["kept"] == alone[name]["kept"] == KEPT[name]
    for key, value in alone[name]["weights"].items():
        torch.testing.assert_close(first["weights"][key], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hugging_face", "accelerated"])
def test_two_processes_resume_bit_for_bit(name: str, launched: Any) -> None:
    for found in of(launched(2), name):
        assert_same(found["resumed"], found["weights"])


def test_accelerate_saves_all_shards(launched: Any) -> None:
    """The main process writes what is registered: each finds its own shards there, not those of the main one."""
    for found in of(launched(2), "sharded"):
        assert_same(found["loaded"], found["latents"])
        assert torch.equal(found["loaded r"], found["r"])


def test_sharding_is_refused_in_the_frameworks_words(launched: Any) -> None:
    """Transformers: FSDP in the arguments as soon as there is a trainer, and a model that is sharded already."""
    for said in of(launched(2), "refused"):
        assert "TrainingArguments(fsdp=...) shards the training" in said["arguments"]
        assert "Leave fsdp out" in said["arguments"]
        assert "Load it without tp_plan and launch it without FSDP" in said["by hand"]
