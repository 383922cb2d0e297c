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
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime import stages
from pareback.runtime.engine import Engine
from pareback.runtime.quiet import quiet


def _pruned(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(torch.rand_like(p) < 0.2)
    return model.eval()


class Residual(nn.Module):
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
    return _pruned(Residual()), torch.randn(1, 3, 32, 32)


def _rows() -> tuple[nn.Module, Tensor]:
    return _pruned(nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.Linear(700, 90))), torch.randn(40, 300)


def _tokens() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True)
    return _pruned(layer), torch.randn(1, 50, 64)


MODELS = [_images, _rows, _tokens]


def _call_at_once(calls: list[Callable[[], None]]) -> None:
    callers = [threading.Thread(target=call) for call in calls]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_more_threads_than_processors(build: Callable[[], tuple[nn.Module, Tensor]], threads: int) -> None:
    """Every call gives the same bits, whoever did which part, and PyTorch's numbers."""
    model, x = build()
    engine = compiled(model, x, threads=threads)
    first = engine._sparsely((x,))
    with torch.no_grad():
        torch.testing.assert_close(first, model(x), rtol=1e-4, atol=1e-5)
    for _ in range(100):
        assert torch.equal(engine._sparsely((x,)), first)


def test_several_callers_of_several_engines() -> None:
    """Callers share the threads there are, and none waits for another's."""
    cases = [
        (compiled(model, x, threads=threads), x) for model, x in (build() for build in MODELS) for threads in (2, 3)
    ]
    wanted = [engine._sparsely((x,)) for engine, x in cases]
    wrong: list[int] = []

    def call(i: int) -> None:
        engine, x = cases[i % len(cases)]
        for _ in range(30):
            if not torch.equal(engine._sparsely((x,)), wanted[i % len(cases)]):
                wrong.append(i)

    _call_at_once([lambda i=i: call(i) for i in range(2 * len(cases))])  # type: ignore[misc]
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_caller_that_has_one_processor() -> None:
    """There is nobody to help, nor anything to wait for."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    wanted, found = engine._sparsely((x,)), []

    def call() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.extend(engine._sparsely((x,)) for _ in range(20))

    _call_at_once([call])
    assert len(found) == 20
    assert all(torch.equal(one, wanted) for one in found)
    assert torch.equal(engine._sparsely((x,)), wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """The parent's are not there, and whatever they held stays held."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    images = next(stage for stage in engine._stages if isinstance(stage, stages.Images))
    wanted = _ran(images, engine, x)
    child = os.fork()
    if child == 0:  # where PyTorch's own threads would be waited for in vain
        os._exit(0 if _ran(images, engine, x) == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _ran(images, engine, x) == wanted


def _ran(stage: stages.Images, engine: Engine, x: Tensor) -> bytes:
    values = engine._values((x,))
    stage.run(values, 1, 2)
    return bytes(values[stage.chain.outputs[0]].numpy().tobytes())


def test_threads_are_idle_between_calls() -> None:
    """Nobody looks out for work that does not come."""
    model, x = _images()
    engine = compiled(model, x, threads=2)
    with quiet():
        engine._sparsely((x,))
    time.sleep(0.02)  # PyTorch's own threads, from before
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.05


def test_quiet_is_for_the_calling_thread_alone() -> None:
    """PyTorch has one thread inside and all again afterwards; so do other callers, all along."""
    before, elsewhere = torch.get_num_threads(), []
    with quiet():
        inside = torch.get_num_threads()
        _call_at_once([lambda: elsewhere.append(torch.get_num_threads())])
    assert (inside, torch.get_num_threads(), elsewhere) == (1, before, [before])


def test_short_work_between_stages_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long keeps PyTorch's threads."""
    seen: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1)

    model, x = _pruned(nn.Sequential(nn.Linear(50, 60), Spy(), nn.Linear(60, 5))), torch.randn(4, 50)
    engine = compiled(model, x, threads=2)
    (between,) = (stage for stage in engine._stages if isinstance(stage, stages.Between))
    run = stages.Plain.run

    def noted(self: stages.Plain, *args: object) -> None:
        seen.append(torch.get_num_threads())
        run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(stages.Plain, "run", noted)
    all_threads = torch.get_num_threads()
    for times, wanted in (([1e-5] * 3, 1), ([1.0] * 3, all_threads), ([1.0], 1)):
        between._times[4] = list(times)
        wanted_result = model(x).detach()
        torch.testing.assert_close(engine._sparsely((x,)), wanted_result, rtol=1e-4, atol=1e-5)
        assert seen[-1] == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_no_two_threads_touch_the_same_at_once(tmp_path: Path) -> None:
    """The thread sanitizer watches teams of several callers, that come, help, leave and are called back."""
    source, program = Path(__file__).with_name("team.cpp"), tmp_path / "team"
    headers = Path(stages.__file__).parent
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
