"""Memory while a file is read: the tensor that is filled, its stored bytes, and little more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pruned_examples import sparse
from torch import nn

from pareback.artifact import save

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc of Linux"),
]

#: Run in a process of its own, which tells by how many megabytes its memory grew at most during each piece of work.
MEASURED = """
import json, sys, torch
from pareback.artifact import describe, load

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

def growth(work, *given):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what is there
    start = peak()
    kept = work(*given)
    return peak() - start

large, small = sys.argv[1:]
load(small), describe(small)  # code and allocators are in place
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3)))
found = {"describe": growth(describe, large), "model": growth(load, large, model), "state dict": growth(load, large)}
for layer in model:
    layer.weight.data = layer.weight.data.T.contiguous().T
found["turned model"] = growth(load, large, model)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def growths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Megabytes, for a file of three layers of 64 MB each: two of them 95 % sparse, one dense."""
    large, small = (tmp_path_factory.mktemp("streaming") / f"{name}.pare" for name in ("large", "small"))
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight[torch.rand_like(layer.weight) >= 0.05] = 0.0
    save(model, large)
    assert large.stat().st_size < 75 << 20
    save({"x": sparse(1000, 1000, density=0.1), "y": torch.randn(9)}, small)
    command = [sys.executable, "-c", MEASURED, str(large), str(small)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    growths: dict[str, int] = json.loads(done.stdout)
    return growths


def test_filling_a_model_needs_no_second_one(growths: dict[str, int]) -> None:
    """The stored bytes of one layer (4 MB) and a few blocks, not a dense layer of 64 MB."""
    assert growths["model"] < 25


def test_a_model_in_another_memory_format_neither(growths: dict[str, int]) -> None:
    """Its layers are filled where they are."""
    assert growths["turned model"] < 25


def test_a_state_dict_is_all_there_is(growths: dict[str, int]) -> None:
    """Three layers of 64 MB and no copy of any."""
    assert 150 < growths["state dict"] < 192 + 25


def test_describing_needs_no_tensor_at_all(growths: dict[str, int]) -> None:
    """Counting goes through the file in blocks."""
    assert growths["describe"] < 25
