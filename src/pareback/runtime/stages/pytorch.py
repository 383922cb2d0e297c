"""Stages left to PyTorch: the whole model, or what is between the engine's own stages."""

from __future__ import annotations

import time
from typing import Any

from ..graph.operation import last_readers
from .base import Chain, Stage
from .torch_threads import one_torch_thread

#: What PyTorch does between the engine's stages on one thread, if that takes no longer; in seconds, by so many trials.
_SHORT = 1e-3
TRIALS = 3


class TorchStage(Stage):
    """Operations left to PyTorch."""

    kind = "torch"

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        names = [operation.reads for operation in chain.operations]
        own = {operation.out for operation in chain.operations} - set(chain.outputs)
        self._steps = [
            (operation.out, operation.in_torch(), done)
            for operation, done in zip(chain.operations, last_readers(names, own), strict=True)
        ]

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        for out, compute, done in self._steps:
            values[out] = compute(values)
            for name in done:
                del values[name]

    def seconds_by_value(self, values: dict[str, Any], batch: int, threads: int) -> dict[str, float]:
        found = {}
        inside = dict(values)  # from which nothing is taken away that another stage's trial may read
        for out, compute, _ in self._steps:
            began = time.perf_counter()
            inside[out] = compute(inside)
            found[out] = time.perf_counter() - began
        values.update((name, inside[name]) for name in self.chain.outputs)
        return found


class TorchBetween(TorchStage):
    """Operations left to PyTorch between stages of the engine: if they are short, without waking PyTorch's threads."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.seconds: dict[int, list[float]] = {}  #: by batch; what the first calls took

    def decisions(self) -> dict[str, dict[int, Any]]:
        return {"seconds": self.seconds}

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        times = self.seconds.setdefault(batch, [])
        if threads == 1 or (len(times) >= TRIALS and min(times) > _SHORT):
            return super().run(values, batch, threads)
        began = time.perf_counter()
        with one_torch_thread():
            super().run(values, batch, threads)
        if len(times) < TRIALS:
            times.append(time.perf_counter() - began)
        return None
