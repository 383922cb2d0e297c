"""One runtime in a process of its own, which prepares a batch and times calls as it is told, a JSON object per line.

A process each keeps thread pools and memory apart, while the parent lets the runtimes take turns.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from .runtimes import RUNTIMES, Call


class Worker:
    """Answers the parent's requests; each public method is one."""

    def __init__(self, name: str, threads: int) -> None:
        self._runtime, self._threads = RUNTIMES[name], threads
        torch.set_num_threads(threads)
        for package in self._runtime.packages[-1:]:
            importlib.import_module(package)
        self._before = resident()
        self._call: Call | None = None
        self._batch: Any = None

    def prepare(self, model: str, batch: int, inputs: str, output: str) -> dict[str, Any]:
        """Make the model ready for a batch size, and write what came out for all whole batches of the inputs."""
        self._call = None
        _tidy()
        chunks = [chunk for chunk in _chunks(numpy.load(inputs), batch) if len(chunk) == batch]
        self._batch = chunks[0]
        began = time.perf_counter()
        self._call, remark = self._runtime.start(Path(model), self._batch, self._threads)
        results = [numpy.array(self._call(self._batch))]
        ready = time.perf_counter() - began
        results += [numpy.array(self._call(chunk)) for chunk in chunks[1:]]
        numpy.save(output, numpy.concatenate(results))
        _tidy()
        _forget_peak()
        self._call(self._batch)
        return {"ready": ready, "remark": remark, "seconds": self._timed(1)[0]}

    def time(self, calls: int, untimed: int) -> dict[str, Any]:
        """Time each of so many calls, after some that are not timed."""
        self._timed(untimed)
        return {"seconds": self._timed(calls)}

    def memory(self) -> dict[str, Any]:
        """Return the bytes by which this process grew, at most, to hold the model and run it."""
        peak = _status("VmHWM")
        return {"bytes": None if peak is None or self._before is None else max(0, peak - self._before)}

    def _timed(self, calls: int) -> list[float]:
        assert self._call is not None
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            self._call(self._batch)
            seconds.append(time.perf_counter() - began)
        return seconds


def _chunks(array: Any, size: int) -> list[Any]:
    return [array[begin : begin + size] for begin in range(0, len(array), size)]


def serve(worker: Callable[[], Worker], requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more; a failure is an answer, too."""
    own: Worker | None = None
    for line in requests:
        request = json.loads(line)
        try:
            own = own or worker()
            answer = getattr(own, request.pop("do"))(**request) if request else {}
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            answer = {"error": text[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def resident() -> int | None:
    """Return the bytes of memory this process holds, where the system says."""
    return _status("VmRSS")


def _status(field: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])
    return None


def _forget_peak() -> None:
    """Let the system count the peak from here on: compiling may take more than running."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _tidy() -> None:
    """Hand freed memory back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main(name: str, threads: str) -> None:
    """Serve the parent through the standard streams; what a runtime prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    serve(lambda: Worker(name, int(threads)), sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
