"""A whole step of thresholds and weights on a GPU as two CUDA graphs: launching them takes the host no time.

A loop that is not captured waits for Python more than for the device: two kernels and the controller's arithmetic took
0.9 ms of host time beside 0.06 ms of work. Where the user captures a step, these are not used: what they hold becomes
part of the user's graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..kernels import Moments, PassRecord, fused
from .controller import Controller, Rates, Recount

#: Steps before a graph is made: the first compile the controller, and find out where memory comes to lie.
_WARM_UP = 3
#: How often a graph is tried for before steps stay without: slower, not wrong.
_TRIES = 3


class GraphedStep:
    """A controller's step on tensors that stay where they are. Gradients may move; their addresses are copied then."""

    def __init__(
        self,
        controller: Controller,
        prepared: fused.PreparedFused,
        rates: Rates,
        record: PassRecord,
        recount: Recount,
        share: float,
        pull_scale: Tensor | None,
    ) -> None:
        self.prepared = prepared
        self._controller, self._rates, self._record, self._recount = controller, rates, record, recount
        self._share, self._pull_scale = share, pull_scale
        self._table = prepared.own_table()
        #: What the last step measured.
        self.moments: Moments | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._steps, self._tries = 0, 0

    def is_ready(self) -> bool:
        """Whether the graphs are there, or can be made now; counts the steps until then."""
        self._steps += 1
        if self._graphs:
            return True
        if self._steps <= _WARM_UP or self._tries == _TRIES:
            return False
        self._tries += 1
        try:
            self._graphs = [_captured(self._measure), _captured(self._advance)]
        except RuntimeError:  # something here cannot be captured, or something else got in its way
            return False
        return True

    def measure(self, grads: Sequence[Tensor | None]) -> None:
        """Let the latents take over edits of their weights, and measure them."""
        self.prepared.point_to(grads, self._table)
        self._graphs[0].replay()

    def advance(self) -> None:
        """Move the thresholds by what was measured, and prune."""
        self._graphs[1].replay()

    def _measure(self) -> None:
        moments = self.prepared.measured_at(self._table, self._controller.state.threshold, self._share)
        if self._pull_scale is not None:
            moments = moments._replace(pull=moments.pull * self._pull_scale)
        self.moments = moments

    def _advance(self) -> None:
        controller = self._controller
        assert self.moments is not None
        cut = controller.advance(self.moments, self._rates, None)
        cut = controller.rule.refine(controller, cut, self._recount, None)
        self.prepared.pruned(*cut, self._record)


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record work as a graph, without a word to other threads or to the memory that others hold."""
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside), _uncollected():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(aside)
    return graph


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector out: what it frees of CUDA's may break off the recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
