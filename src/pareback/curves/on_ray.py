"""Runs what is left of a curve on Ray, several at once, on one machine or many."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..lab.train.interrupts import Interrupts
from .cluster import Needs, Share, check_machines, connected, share_of
from .planning import Task
from .running import LostWorkerError, Progress, work_apart

#: Runs that Ray knows of at a time: enough to fill a large cluster, and few enough to be cancelled at once.
_IN_FLIGHT = 1000
#: Seconds between two looks at whether somebody wants to stop.
_LOOK = 0.5
#: Seconds that runs have for their last checkpoint when they are stopped.
_PATIENCE = 60.0


def run_on_ray(tasks: Sequence[Task], progress: Progress, needs: Needs, root: Path, trust: bool = False) -> None:
    """Run tasks as Ray's; a run whose worker dies is tried again, and Ctrl-C lets every run save where it is."""
    with connected(needs) as ray:
        share = share_of(ray, needs)
        if needs.address is not None:
            machines = check_machines(ray, root)
            progress.say(f"On the Ray cluster at {needs.address}: {machines} machines. {_takes(share)}")
        else:
            progress.say(f"On a Ray instance of this machine. {_takes(share)}")
        interrupts = Interrupts()
        with interrupts.listening():
            _Queue(ray, tasks, progress, share, trust).run(interrupts)


def _takes(share: Share) -> str:
    gpus = f" and {share.gpus:g} GPUs" if share.gpus else ""
    return f"A run takes {share.cpus:g} CPUs{gpus}."


class _Queue:
    def __init__(self, ray: Any, tasks: Sequence[Task], progress: Progress, share: Share, trust: bool) -> None:
        self._ray, self._progress, self._share, self._trust = ray, progress, share, trust
        self._waiting, self._running = deque(tasks), dict[Any, Task]()
        # A worker that dies is this queue's business, so that it can be told: Ray itself tries nothing again.
        self._work = ray.remote(work_apart).options(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0)

    def run(self, interrupts: Interrupts) -> None:
        while self._waiting or self._running:
            while self._waiting and len(self._running) < _IN_FLIGHT:
                self._submit(self._waiting.popleft())
            self._collect(_LOOK)
            if interrupts.asked is not None:
                self._stop()
                raise self._progress.interrupted(interrupts.asked)
            if self._progress.hopeless:
                self._stop()
                return

    def _submit(self, task: Task) -> None:
        share = {"threads": self._share.threads, "gpus": self._share.gpus}
        said = {"home": str(Path.cwd()), "argv": sys.argv, "trust": self._trust}
        reference = self._work.remote(task.point.recipe, str(task.path.absolute()), **share, **said)
        self._running[reference] = task

    def _collect(self, seconds: float) -> None:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        for reference in ready:
            task = self._running.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                if self._progress.lost(task, self._cause(error)):
                    self._waiting.append(task)
            else:
                self._progress.done(task)

    def _cause(self, error: Any) -> BaseException:
        """Return what went wrong in a run itself, or that its worker is gone."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception) and not isinstance(cause, self._ray.exceptions.RayError):
            return cause
        return LostWorkerError(f"its worker was lost ({type(error).__name__})")

    def _stop(self) -> None:
        """Ask every run to save and stop, and wait until they have."""
        self._waiting.clear()
        for reference in self._running:
            self._ray.cancel(reference, force=False)
        until = time.monotonic() + _PATIENCE
        while self._running and time.monotonic() < until:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK)
            for reference in ready:
                task = self._running.pop(reference)
                try:
                    self._ray.get(reference)
                except self._ray.exceptions.RayError:
                    continue
                self._progress.done(task)
