"""The parent's end of a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


class WorkerError(RuntimeError):
    """A runtime that could not do what it was asked."""


class Process:
    """A runtime in its own process. Requests may be sent ahead; answers come in their order."""

    def __init__(self, runtime: str, threads: int, source: Path | None = None) -> None:
        """Start it, with pareback from a folder of sources if one is given, whose cache is beside them."""
        folders = [str(source) if source else "", *sys.path]
        environment = {
            **os.environ,
            **({"PAREBACK_CACHE": str(source.parent / "cache")} if source else {}),
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),  # where the model's class was found
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its pool of compilers would stay beside what is timed
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            # -P: a file in the current folder that is called like a package is not taken for it.
            [sys.executable, "-P", "-m", "pareback.bench.worker", runtime, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._send({})  # begin to import at once

    def ready(self) -> None:
        """Wait until the runtime has been imported."""
        self._receive()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        self._send({"do": do, **request})
        return self._receive()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer will be missing, which says it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"its process ended ({self._last_words()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        return said[-1][:200] if said else f"code {code}"
