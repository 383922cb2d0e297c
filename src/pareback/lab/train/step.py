"""One optimizer step and the sums of an epoch: launched operator by operator, or replayed as one CUDA graph."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..mutual import Mutual
from ..recipe.schema import Recipe
from ..teacher import Teacher
from .ema import WeightAverage
from .optimizers import set_rate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sums:
    """What a tally held when it was read."""

    loss: float
    correct: int
    images: int
    steps: int
    bad: int | None  #: the first step of the epoch, from 1, whose loss was not finite

    @property
    def mean_loss(self) -> float:
        """The loss per image."""
        return self.loss / self.images if self.images else math.nan

    @property
    def accuracy(self) -> float:
        """Top-1, in percent."""
        return 100.0 * self.correct / self.images if self.images else math.nan


class Tally:
    """Loss, hits, images, steps and the first bad step, in one vector of doubles."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._pinned = torch.zeros(5, dtype=torch.float64).pin_memory() if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Begin anew."""
        self.sums.zero_()
        self._copied = None  # a copy under way is of the epoch before

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch with its mean ``loss``; nothing waits. Labels may be shares of the classes."""
        images = len(labels)
        labels = labels if labels.ndim == 1 else labels.argmax(1)
        hits = (logits.argmax(1) == labels).sum()
        step = self.sums[3] + 1
        first_bad = torch.where((self.sums[4] == 0) & ~torch.isfinite(loss.detach()), step, self.sums[4])
        added = torch.stack([loss.detach().double() * images, hits.double()])
        self.sums[:2].add_(added)
        self.sums[2].add_(images)
        self.sums[3].copy_(step)
        self.sums[4].copy_(first_bad)

    def read(self) -> Sums:
        """Wait for the device and return what there is."""
        return self.sums_of(self.sums)

    def peek(self) -> Sums | None:
        """Return a recent state if one has arrived, and ask for the next; never waits for a GPU."""
        if self._pinned is None:
            return self.read()
        arrived = None
        if self._copied is not None:
            if not self._copied.query():
                return None
            arrived = self.sums_of(self._pinned)
        self._pinned.copy_(self.sums, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return arrived

    @staticmethod
    def sums_of(values: Tensor) -> Sums:
        """Return what a vector of sums says."""
        loss, correct, images, steps, bad = values.tolist()
        return Sums(loss, int(correct), int(images), int(steps), int(bad) or None)


#: Steps before a graph is captured: compilers, autotuning and the optimizer's state come to be in them.
WARM_UP = 4


@dataclass(frozen=True)
class Forward:
    """How a network is called: precision and memory format."""

    device: torch.device
    dtype: torch.dtype | None
    channels_last: bool

    @staticmethod
    def of(recipe: Recipe, device: torch.device) -> Forward:
        """Return a recipe's way; on a CPU without channels last, see :func:`warn_of_a_layout`."""
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.train.precision]
        return Forward(device, dtype, recipe.train.channels_last and device.type != "cpu")

    @property
    def memory_format(self) -> torch.memory_format:
        """How images lie in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def placed(self, net: nn.Module) -> nn.Module:
        """Move a network to the device, its weights in the memory format of the images; return it."""
        net.to(self.device)
        return net.to(memory_format=torch.channels_last) if self.channels_last else net  # type: ignore[call-overload]

    def images(self, x: Tensor) -> Tensor:
        """Return images as the network likes them."""
        return x.to(self.device, non_blocking=True).contiguous(memory_format=self.memory_format)

    def autocast(self) -> torch.autocast:
        """Return the context in which the network runs."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


def warn_of_a_layout(recipe: Recipe, device: torch.device) -> None:
    """Say so where channels last, which a recipe asks for, are not used.

    With torch 2.15 the backward pass of narrow networks in this layout corrupts memory on some processors.
    """
    if recipe.train.channels_last and device.type == "cpu":
        log.warning("train.channels_last has no effect on a CPU, where torch may crash with it. Drop it.")


class TrainStep:
    """Moves the weights by one batch. Nothing in it waits for the device."""

    def __init__(
        self,
        recipe: Recipe,
        net: nn.Module,
        optimizer: Optimizer,
        average: WeightAverage | None,
        forward: Forward,
        teacher: Teacher | None = None,
        mutual: Mutual | None = None,
    ) -> None:
        self._teacher, self._mutual = teacher, mutual
        self._net, self._optimizer, self._average, self._forward = net, optimizer, average, forward
        self._parts = recipe.train.accumulate
        self._smoothing, self._clip = recipe.train.label_smoothing, recipe.optimizer.clip
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.tally = Tally(forward.device)
        scaled = recipe.train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(forward.device.type, enabled=scaled)
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], Any] | None = None
        self._until_captured = WARM_UP if recipe.train.cuda_graph else None
        #: Whether the next step is like the others, so that the graph of those can be replayed for it.
        self.may_replay = True

    @property
    def settled(self) -> bool:
        """Whether the steps to come are like the last one: compiled, and captured if they are to be."""
        return self._until_captured is None or self._replay is not None

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> None:
        """Take a step on a batch at a learning rate."""
        set_rate(self._optimizer, rate)
        if self._until_captured is None:
            self._work(self._forward.images(x), y.to(self._forward.device, non_blocking=True))
            return
        x_here, y_here = self._static(x, y)
        if self._replay is None and self._until_captured == 0 and self.may_replay:
            self._replay = _captured(lambda: self._work(x_here, y_here))
        if self._replay is not None and self.may_replay:
            self._replay()
        else:
            self._until_captured = max(0, self._until_captured - 1)
            self._work(x_here, y_here)

    def _static(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a batch to where the graph reads it."""
        if self._inputs is None:
            images = torch.empty_like(x, device=self._forward.device, memory_format=self._forward.memory_format)
            self._inputs = images, torch.empty_like(y, device=self._forward.device)
        self._inputs[0].copy_(x, non_blocking=True)
        self._inputs[1].copy_(y, non_blocking=True)
        return self._inputs

    def _work(self, x: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        losses, answers = [], []
        for number, (images, labels) in enumerate(zip(x.chunk(self._parts), y.chunk(self._parts), strict=True), 1):
            with self._apart(number < self._parts):
                loss, logits = self._loss(images, labels)
                self.scaler.scale(loss if self._parts == 1 else loss / self._parts).backward()
            losses.append(loss.detach())
            answers.append(logits.detach())
        if self._mutual is not None:
            self._mutual.join_gradients()
        if self._clip is not None:
            self.scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        if self._parts == 1:
            self.tally.add(losses[0], answers[0], y)
        else:
            self.tally.add(torch.stack(losses).mean(), torch.cat(answers), y)
        if self._average is not None:
            self._average.update()
        if self._teacher is not None:
            self._teacher.follow()

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with self._forward.autocast():
            logits = self._net(x)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=self._smoothing)
            if self._teacher is not None:
                loss = self._teacher.loss(loss, logits, self._teacher.answers(x))
            if self._mutual is not None:
                loss = self._mutual.loss(loss, logits, x, y)
        return loss, logits

    def _apart(self, more: bool) -> AbstractContextManager[Any]:
        """Let processes exchange gradients with the last part of a batch alone."""
        alone: Callable[[], AbstractContextManager[Any]] | None = getattr(self._net, "no_sync", None)
        return alone() if more and alone is not None else nullcontext()


def _captured(work: Callable[[], None]) -> Callable[[], Any]:
    """Capture what ``work`` launches on the current stream, without running it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads do, such as pinning memory for the next batch, is not part of it.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    return graph.replay
