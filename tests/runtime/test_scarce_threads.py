"""Where the system has no room for threads, or takes their processor away, calls end all the same and are right."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_toys import distance, pruned
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
        reason="needs Linux and two processors",
    ),
]

#: No user has this number, and so no other threads that would count.
NOBODY = 54321


class Case:
    """An engine, what it is called with and what it has to return."""

    def __init__(self, model: nn.Module, x: Tensor, threads: int) -> None:
        with torch.no_grad():
            self.truth = copy.deepcopy(pruned(model)).double()(x.double())
        self.engine, self.x = compiled(model, x, threads=threads), x

    def check(self) -> None:
        """Call the engine."""
        y = self.engine.run_sparse(self.x)
        assert distance(y, self.truth) < 1e-5


def _divided_program(threads: int) -> Case:
    layers = nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)
    return Case(nn.Sequential(*layers), torch.randn(1, 3, 32, 32), threads)


def _divided_inputs(threads: int) -> Case:
    return Case(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(1800, 128), threads)


WAYS = [functools.cache(_divided_program), functools.cache(_divided_inputs)]


def _in_a_child(work: Callable[[], None]) -> None:
    """Fork a process that has an engine's threads to itself, and is killed if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child does without the parent's threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        torch.set_num_threads(1)  # as PyTorch's are not there
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _threads() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc/self/task"))


def _call_until_there_are(threads: int, case: Case) -> None:
    """Calls go on alone for a while where a thread lost its processor, as it may to other tests."""
    until = time.monotonic() + 20
    case.check()
    while len(_threads()) != threads and time.monotonic() < until:
        time.sleep(0.01)
        case.check()
    assert len(_threads()) == threads


@contextlib.contextmanager
def _no_more_threads() -> Iterator[None]:
    """Let the system refuse this process any thread, which it does for no root."""
    if os.getuid() == 0:
        os.setuid(NOBODY)
    before, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
    yield
    resource.setrlimit(resource.RLIMIT_NPROC, (before, most))


@pytest.mark.parametrize("way", WAYS)
def test_no_room_for_threads(way: Callable[[int], Case]) -> None:
    """The caller does everything itself, until there is room."""
    case = way(4)

    def work() -> None:
        with _no_more_threads():
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threading.Thread(target=print).start()
            for _ in range(5):
                case.check()
            assert len(_threads()) == 1
        _call_until_there_are(4, case)

    _in_a_child(work)


@pytest.mark.parametrize("way", WAYS)
def test_room_for_some_threads(way: Callable[[int], Case]) -> None:
    """Those there are help."""
    few, many = way(2), way(4)

    def work() -> None:
        _call_until_there_are(2, few)
        with _no_more_threads():
            for _ in range(5):
                many.check()
                few.check()
            assert len(_threads()) == 2
        _call_until_there_are(4, many)

    _in_a_child(work)


@pytest.mark.parametrize("way", WAYS)
def test_threads_are_moved_at_work(way: Callable[[int], Case]) -> None:
    """From one processor to another, and all to a single one, by somebody who does not ask."""
    case = way(4)
    processors = sorted(os.sched_getaffinity(0))
    places = [*({one} for one in processors), set(processors)]
    done, moves = threading.Event(), [0]

    def move_others() -> None:
        while not done.is_set():
            for thread in _threads():
                if thread != threading.get_native_id():
                    os.sched_setaffinity(thread, places[moves[0] % len(places)])
            moves[0] += 1
            time.sleep(0.0007 * (1 + moves[0] % 4))

    def work() -> None:
        mover, calls = threading.Thread(target=move_others), 0
        mover.start()
        while calls < 100 or moves[0] < 100:
            case.check()
            calls += 1
        done.set()
        mover.join()

    _in_a_child(work)


@pytest.mark.parametrize("way", WAYS)
def test_another_program_takes_the_processor(way: Callable[[int], Case]) -> None:
    """Where a busy program comes first, the thread that helps hardly gets on."""
    case = way(2)
    here, there = sorted(os.sched_getaffinity(0))[:2]

    def work() -> None:
        os.sched_setaffinity(0, {here, there})
        case.check()
        (helper,) = set(_threads()) - {os.getpid()}
        with contextlib.suppress(OSError):  # not every system knows that policy
            os.sched_setscheduler(helper, os.SCHED_IDLE, os.sched_param(0))
        with _busy(there):
            until, calls = time.monotonic() + 0.5, 0
            while calls < 5 or time.monotonic() < until:
                os.sched_setaffinity(helper, {there})
                case.check()
                calls += 1

    _in_a_child(work)


@contextlib.contextmanager
def _busy(processor: int) -> Iterator[None]:
    """Keep a processor busy, from another process."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.sched_setaffinity(0, {processor})
        while os.getppid() == parent and time.process_time() < 30:
            pass
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_thread_that_is_waited_for_may_run_where_the_caller_did(tmp_path: Path) -> None:
    """Its own processor may be another program's, and the caller's is idle: nobody waits longer than he has to."""
    source, program = Path(__file__).with_name("set_free.cpp"), tmp_path / "set_free"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{Path(native.__file__).parent}"]
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True, env=alone)
    subprocess.run([program], check=True, timeout=30, env=alone)
