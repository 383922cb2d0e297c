"""Several threads on one program: right whoever does what, for several callers, on one processor; idle afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_toys import pruned
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime import native
from pareback.runtime.stages.images import ImageStage
from pareback.runtime.stages.pytorch import TorchBetween, TorchStage
from pareback.runtime.stages.torch_threads import one_torch_thread


class Wide(nn.Module):
    """Large and small images, so that rows are divided as well as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.norm, self.smaller = nn.BatchNorm2d(64), nn.Conv2d(64, 128, 3, 2, 1)
        self.last, self.head = nn.Conv2d(128, 128, 3, padding=1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.smaller(torch.relu(self.norm(x + self.second(torch.relu(x)))))
        return self.head((x + self.last(torch.relu(x))).mean((2, 3)))


def _images() -> tuple[nn.Module, Tensor]:
    return pruned(Wide()), torch.randn(1, 3, 32, 32)


def _rows() -> tuple[nn.Module, Tensor]:
    return pruned(nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.Linear(700, 90))), torch.randn(40, 300)


def _tokens() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True)
    return pruned(layer), torch.randn(1, 50, 64)


MODELS = [_images, _rows, _tokens]


def _call_at_once(calls: list[Callable[[], None]]) -> None:
    callers = [threading.Thread(target=call) for call in calls]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()


@pytest.mark.slow
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_more_threads_than_processors(build: Callable[[], tuple[nn.Module, Tensor]], threads: int) -> None:
    """Every call gives the same bits, whoever did which part, and PyTorch's numbers."""
    model, x = build()
    engine = compiled(model, x, threads=threads)
    first = engine.run_sparse(x)
    with torch.no_grad():
        torch.testing.assert_close(first, model(x), rtol=1e-4, atol=1e-5)
    for _ in range(100):
        assert torch.equal(engine.run_sparse(x), first)


@pytest.mark.slow
def test_several_callers_of_several_engines() -> None:
    """Callers share the threads there are, and none waits for another's."""
    cases = [
        (compiled(model, x, threads=threads), x) for model, x in (build() for build in MODELS) for threads in (2, 3)
    ]
    wanted = [engine.run_sparse(x) for engine, x in cases]
    wrong: list[int] = []

    def call(i: int) -> None:
        engine, x = cases[i % len(cases)]
        for _ in range(30):
            if not torch.equal(engine.run_sparse(x), wanted[i % len(cases)]):
                wrong.append(i)

    _call_at_once([lambda i=i: call(i) for i in range(2 * len(cases))])  # type: ignore[misc]
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_caller_that_has_one_processor() -> None:
    """There is nobody to help, nor anything to wait for."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    wanted, found = engine.run_sparse(x), []

    def call() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.extend(engine.run_sparse(x) for _ in range(20))

    _call_at_once([call])
    assert len(found) == 20
    assert all(torch.equal(one, wanted) for one in found)
    assert torch.equal(engine.run_sparse(x), wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """The parent's are not there, and whatever they held stays held."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    images = next(stage for stage in engine.stages if isinstance(stage, ImageStage))
    wanted = _ran(images, x)
    child = os.fork()
    if child == 0:  # where PyTorch's own threads would be waited for in vain
        os._exit(0 if _ran(images, x) == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _ran(images, x) == wanted


def _ran(stage: ImageStage, x: Tensor) -> bytes:
    (name,) = stage.chain.inputs
    values = {name: x}
    stage.run(values, 1, 2)
    return bytes(values[stage.chain.outputs[0]].numpy().tobytes())


def test_threads_are_idle_between_calls() -> None:
    """Nobody looks out for work that does not come."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    with one_torch_thread():
        engine.run_sparse(x)
    time.sleep(0.02)  # PyTorch's own threads, from before
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.05


def test_one_torch_thread_is_for_the_calling_thread_alone() -> None:
    """PyTorch has one thread inside and all again afterwards; so do other callers, all along."""
    before, elsewhere = torch.get_num_threads(), []
    with one_torch_thread():
        inside = torch.get_num_threads()
        _call_at_once([lambda: elsewhere.append(torch.get_num_threads())])
    assert (inside, torch.get_num_threads(), elsewhere) == (1, before, [before])


def test_short_work_between_stages_is_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long keeps PyTorch's threads."""
    seen: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1)

    model, x = pruned(nn.Sequential(nn.Linear(50, 60), Spy(), nn.Linear(60, 5))), torch.randn(4, 50)
    engine = compiled(model, x, threads=2)
    (between,) = (stage for stage in engine.stages if isinstance(stage, TorchBetween))
    run = TorchStage.run

    def noted(self: TorchStage, *args: object) -> None:
        seen.append(torch.get_num_threads())
        run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchStage, "run", noted)
    all_threads = torch.get_num_threads()
    for times, wanted in (([1e-5] * 3, 1), ([1.0] * 3, all_threads), ([1.0], 1)):
        between.seconds[4] = list(times)
        wanted_result = model(x).detach()
        torch.testing.assert_close(engine.run_sparse(x), wanted_result, rtol=1e-4, atol=1e-5)
        assert seen[-1] == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_no_two_threads_touch_the_same_at_once(tmp_path: Path) -> None:
    """The thread sanitizer watches teams of several callers, that come, help, leave and are called back."""
    source, program = Path(__file__).with_name("team.cpp"), tmp_path / "team"
    headers = Path(native.__file__).parent
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{headers}"]
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no other sanitizer beside it
    command = ["g++", *flags, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, env=alone)
    if built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip("no thread sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=alone)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ThreadSanitizer" not in done.stderr, done.stderr
