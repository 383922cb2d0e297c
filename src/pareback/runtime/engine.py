"""Compiles a pruned model for the CPU and runs it."""

from __future__ import annotations

import math
import operator
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from ..errors import InvalidType, InvalidUse, InvalidValue
from .graph.capture import CapturedModel, capture
from .graph.fuse import Folded, fused, in_lanes
from .graph.operation import ValueName, last_readers
from .graph.signature import example_of
from .lower.tuning import Tuner
from .native import bindings
from .report import EngineReport, LayerTime, report_on, times_of
from .saved.reading import read_plan
from .saved.writing import write_plan
from .stages.base import Chain, Stage
from .stages.encoder import EncoderStage
from .stages.partition import partitioned, stage_of
from .stages.plan import EngineChoices, EnginePlan, ShapeTable
from .stages.pytorch import TRIALS, TorchBetween, TorchStage
from .stages.torch_threads import one_torch_thread, wait_for_idle_threads

#: Once one way takes so many times as long as the other, no more trials are needed.
_CLEAR = 2.0

#: Fewer numbers than this PyTorch adds up in one thread anyway, and to tell it so takes as long.
_ALONE = 2**15

#: A call that takes longer says enough by itself. In seconds.
_LONG = 0.3

#: So long either way is tried for, at most 21 times. In seconds.
_TO_DECIDE = 5e-3

#: Bytes of weights that PyTorch reads in a second, at the least: how much faster each example of a larger batch can be.
_BYTES_READ = 5e9


class Engine:
    """A model compiled for this machine's CPU, called like the model; :func:`compile` makes it.

    Calls from several threads may overlap. The interpreter's lock is free while the engine works.
    """

    def __init__(self, plan: EnginePlan, threads: int) -> None:
        self._plan, self._threads = plan, threads
        self._positional = len(plan.inputs) if plan.call.positional else -1
        self._stages = [stage_of(one, plan.shapes, plan.tuner) for one in plan.stages]
        self._whole = TorchStage(Chain(plan.whole, plan.inputs, plan.names))
        between = {name for stage in self._stages for name in stage.chain.outputs} - set(plan.names)
        self._done = last_readers([stage.chain.inputs for stage in self._stages], between)
        #: By batch size, whether PyTorch's dense operators were faster for the whole model. May be set, to decide it.
        self.prefers_dense: dict[int, bool] = {}
        self._deciding = threading.Lock()
        self._dense_seconds: dict[int, float] = {}  # by batch, what PyTorch's operators took where that was measured
        self._share_choices()

    def _share_choices(self) -> None:
        """Take up what is known for so many threads, and let the plan see what is found from now on."""
        known = self._plan.chosen.get(self._threads)
        if known is not None:  # the same dicts, so that what one of two engines finds the other knows
            self.prefers_dense = known.dense
            for stage, found in zip(_each_stage(self._stages), known.stages, strict=True):
                for name, decided in found.items():
                    setattr(stage, name, decided)
        self._plan.chosen[self._threads] = self._choices()

    def _choices(self) -> EngineChoices:
        return EngineChoices(self.prefers_dense, [stage.decisions() for stage in _each_stage(self._stages)])

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Return what the model returns, for a batch of any size; inputs by position or by name, as the model takes."""
        if named or len(inputs) != self._positional:
            inputs = self._plan.call.in_order(inputs, named)
        if not torch.is_grad_enabled():
            return self._answer(inputs)
        # Not inference mode, whose tensors nobody may change; and torch.no_grad takes as long as a small layer.
        torch._C._set_grad_enabled(False)
        try:
            return self._answer(inputs)
        finally:
            torch._C._set_grad_enabled(True)

    def _answer(self, inputs: tuple[Tensor, ...]) -> Any:
        self._check(inputs)
        if any(x.is_neg() for x in inputs):  # a view that says "negative" and holds the opposite
            inputs = tuple(x.resolve_neg() for x in inputs)
        batch = inputs[0].shape[0]
        if batch == 0 or not all(map(_is_finite, inputs)):
            return self._densely(inputs)
        if batch not in self.prefers_dense:
            with self._deciding:
                if batch not in self.prefers_dense:
                    self.prefers_dense[batch] = self.is_faster_dense(inputs)
        return self._densely(inputs) if self.prefers_dense[batch] else self._sparsely(inputs)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What the model was divided into, in order: ``kind`` and ``chain`` of each say what runs where."""
        return tuple(self._stages)

    def run_sparse(self, *inputs: Tensor) -> Any:
        """Return what the stages compute, whether or not PyTorch's dense operators are faster for the whole model.

        Inputs are in the graph's order. Neither NaN nor infinity may be among them: zeros are skipped.
        """
        self._check(inputs)
        return self._sparsely(inputs) if inputs[0].shape[0] else self._densely(inputs)  # of nothing there is no program

    def with_threads(self, threads: int) -> Engine:
        """Return an engine of the same model, with the weights it had, for another number of threads."""
        return Engine(self._plan, _checked(threads))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine to a file that :func:`load_engine` reads: tuned, and ready without compiling.

        It holds the model's weights, its operations as data, and what was measured: for every batch size that the
        engine was called with, and for every number of threads that it was made for, see :meth:`with_threads`. On
        another processor the same file is tuned again. A model of which PyTorch runs something that is not among the
        plain operators that such a file can name is refused.

        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3))
        >>> engine, x = compile(model, torch.randn(1, 20), threads=1), torch.randn(1, 20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     engine.save(f"{folder}/model.pbe")
        ...     torch.equal(load_engine(f"{folder}/model.pbe")(x), engine(x))
        True
        """
        self._plan.chosen[self._threads] = self._choices()  # which may have been set
        write_plan(self._plan, Path(path), self._threads)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """An engine holds addresses in this process's memory."""
        raise InvalidType(
            "An engine cannot be copied or pickled. Write engine.save('model.pbe'), and pb.load_engine('model.pbe') "
            "where it is to run."
        )

    def report(self, *inputs: Tensor, **named: Tensor) -> EngineReport:
        """Return what runs where; with inputs, as in a call, how long each layer takes besides.

        Layers are timed one by one, on one thread and as the stages run them, even where PyTorch's dense operators are
        faster for the whole model.
        """
        dense = [batch for batch, faster in self.prefers_dense.items() if faster]
        times = self._times(self._plan.call.in_order(inputs, named)) if inputs or named else []
        return report_on(self._stages, dense, self._threads, times)

    def _times(self, inputs: tuple[Tensor, ...]) -> list[LayerTime]:
        self._check(inputs)
        if not inputs[0].shape[0]:
            raise InvalidValue("A batch of no examples takes no time. Give a batch as it will come.")
        found: list[LayerTime] = []
        with torch.no_grad():
            values = self._values(tuple(x.clone() for x in inputs))
            for stage in self._stages:
                found += times_of(stage, self._plan.shapes, values, inputs[0].shape[0], self._threads)
        return found

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        plan, shown = self._plan, self._plan.call.names
        for number, (name, x) in enumerate(zip(plan.inputs, inputs, strict=True)):
            if not isinstance(x, Tensor) or not x.is_cpu or x.dtype != plan.dtypes[name]:
                raise InvalidType(f"{shown[number]} must be a {plan.dtypes[name]} tensor on the CPU.")
            wanted = plan.shapes.of(name, inputs[0].shape[0] if inputs[0].ndim else 0)
            if x.shape != wanted:
                same = ", the same for all inputs" if len(inputs) > 1 else ""
                raise InvalidValue(
                    f"{shown[number]} has shape {tuple(x.shape)}; "
                    f"the engine was compiled for {wanted}, any batch{same}."
                )

    def _values(self, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
        return {**self._plan.constants, **dict(zip(self._plan.inputs, inputs, strict=True))}

    def _sparsely(self, inputs: tuple[Tensor, ...]) -> Any:
        values = self._values(inputs)
        for stage, done in zip(self._stages, self._done, strict=True):
            stage.run(values, inputs[0].shape[0], self._threads)
            for name in done:
                del values[name]
        return self._result(values)

    def _densely(self, inputs: tuple[Tensor, ...]) -> Any:
        values = self._values(inputs)
        self._whole.run(values, inputs[0].shape[0], self._threads)
        return self._result(values)

    def _result(self, values: dict[str, Any]) -> Any:
        if isinstance(self._plan.outputs, ValueName):
            return values[self._plan.outputs.text]
        return torch.utils._pytree.tree_map(
            lambda leaf: values[leaf.text] if isinstance(leaf, ValueName) else leaf, self._plan.outputs
        )

    def is_faster_dense(self, inputs: tuple[Tensor, ...]) -> bool:
        """Try both ways on a batch of this size, unless a smaller one has shown which is faster."""
        batch = inputs[0].shape[0]
        for _ in range(2):  # the first time makes and tunes what it needs, which may take longer than PyTorch's way
            sparsely = _seconds(self._sparsely, inputs)
            if self._is_far_slower_dense(batch, sparsely):
                return False
        if self._threads > 1 and any(isinstance(stage, TorchBetween) for stage in self._stages):
            for _ in range(TRIALS - 1):  # afterwards they know how many threads PyTorch is to use
                self._sparsely(tuple(x.clone() for x in inputs))
        if self._dense_seconds and sparsely > _LONG:  # beside which it is short what PyTorch does once for new sizes
            densely = _seconds(self._densely, inputs)
        else:
            sparsely, densely = self._in_turn(inputs)
        self._dense_seconds[batch] = densely
        return densely < sparsely

    def _in_turn(self, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
        """Return how long the stages and PyTorch's operators take: tried often if calls are short, else until clear."""
        times: dict[bool, list[float]] = {False: [], True: []}
        while len(times[True]) < _rounds(times[True]):
            for dense, run in ((False, self._sparsely), (True, self._densely)):
                wait_for_idle_threads(self._threads)
                times[dense].append(_seconds(run, inputs))
            # The first calls do not count, unless they are long beside what PyTorch does once for new sizes.
            first = 0 if self._dense_seconds and times[True][0] > _LONG else 1
            if _is_clear(times[False][first:], times[True][first:]):
                break
        return statistics.median(times[False][first:]), statistics.median(times[True][first:])

    def _is_far_slower_dense(self, batch: int, sparsely: float) -> bool:
        """Whether what PyTorch took for a smaller batch says enough: an example takes as long, but for reading weights.

        To try a large batch as well would let its first call wait for ten seconds and more.
        """
        reading = self._plan.weight_bytes / _BYTES_READ
        known = [(seconds - reading) / few for few, seconds in self._dense_seconds.items() if few < batch]
        return batch * max(known, default=0.0) > _CLEAR * sparsely


def _seconds(run: Callable[[tuple[Tensor, ...]], Any], inputs: tuple[Tensor, ...]) -> float:
    """Time a call on copies, as a model may change its input."""
    mine = tuple(x.clone() for x in inputs)
    began = time.perf_counter()
    run(mine)
    return time.perf_counter() - began


def _is_finite(x: Tensor) -> bool:
    """Whether an input has neither NaN nor infinity, with which skipping products with zeros would not be exact.

    Their sum says so in one pass; one that overflows is taken for infinite, and answered by PyTorch as well.

    >>> _is_finite(torch.ones(3)), _is_finite(torch.tensor([1.0, torch.nan])), _is_finite(torch.tensor([3]))
    (True, False, True)
    """
    if not x.is_floating_point():
        return True
    with nullcontext() if x.numel() < _ALONE else one_torch_thread():
        return math.isfinite(x.sum().item())


def _rounds(times: list[float]) -> int:
    """Return how often to try: four times, or more where that takes a few milliseconds.

    >>> _rounds([]), _rounds([0.3, 0.2]), _rounds([0.3, 1e-3]), _rounds([0.3, 5e-5])
    (4, 4, 6, 21)
    """
    return max(4, min(21, int(_TO_DECIDE / min(times)) + 1)) if times else 4


def _is_clear(sparsely: list[float], densely: list[float]) -> bool:
    """Whether one of two is far faster, every time; of short times two each are the least that shows it.

    >>> _is_clear([1.0, 1.0], [5.0, 6.0]), _is_clear([1.0, 1.0], [5.0, 1.5]), _is_clear([0.1], [0.3]), _is_clear([], [])
    (True, False, False, False)
    """
    if len(sparsely) < (1 if max(sparsely + densely, default=0.0) > _LONG else 2):
        return False
    return max(sparsely) * _CLEAR < min(densely) or max(densely) * _CLEAR < min(sparsely)


def _each_stage(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield all stages, in the order of :meth:`EnginePlan.each_stage`."""
    for stage in stages:
        yield stage
        yield from stage.stages_apart if isinstance(stage, EncoderStage) else ()


def planned(captured: CapturedModel) -> EnginePlan:
    """Divide a captured model into stages."""
    names = [leaf.text for leaf in torch.utils._pytree.tree_leaves(captured.outputs) if isinstance(leaf, ValueName)]
    folded: Folded = {}
    whole = fused(captured.operations, names, folded=folded)
    stages = partitioned(in_lanes(captured, names, folded), captured, names)
    read = {name for operation in whole for name in operation.reads} | set(names)
    read |= {name for stage in stages for name in stage.chain.inputs}
    constants = {
        name: value.detach().clone() if isinstance(value, Tensor) else value  # few: layers hold their weights
        for name, value in captured.constants.items()
        if name in read
    }
    dtypes = {name: captured.dtypes[name] for name in captured.inputs}
    shapes = ShapeTable(captured.shapes)
    return EnginePlan(
        captured.inputs, dtypes, captured.call, captured.outputs, names, shapes, constants, whole, stages, Tuner()
    )


def compile(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    threads: int | None = None,
) -> Engine:
    """Compile a pruned model for this machine's CPU.

    Args:
        model: any module that ``torch.export`` can read, with float32 weights on the CPU. It is not changed.
        example_inputs: a batch like those the engine will be called with, of any size; a tuple for several inputs, or
            a dict of keyword arguments.
        threads: how many threads a call may use; by default as many as torch uses.

    The engine holds a copy of the weights: compile again after changing them.

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    >>> engine = compile(model, torch.randn(1, 3, 8, 8), threads=1)
    >>> x = torch.randn(5, 3, 8, 8)
    >>> torch.allclose(engine(x), model(x), atol=1e-5)
    True
    """
    _check_built()
    if not isinstance(model, nn.Module):
        raise InvalidType(f"compile takes a torch.nn.Module, not {type(model).__name__}.")
    number = _checked(threads)
    example = example_of(model, example_inputs)
    _warn_of_other_types(model)
    modes = {module: module.training for module in model.modules()}  # a batch norm may be frozen in a model that trains
    model.eval()
    try:
        with torch.no_grad():
            engine = Engine(planned(capture(model, example)), number)
    finally:
        for module, training in modes.items():
            module.training = training
    engine(*example.args, **example.named)
    return engine


def load_engine(path: str | os.PathLike[str], threads: int | None = None) -> Engine:
    """Read an engine that :meth:`Engine.save` wrote, ready to be called.

    Args:
        path: the file. It is checked before anything is made of it, and nothing in it is run but operators of a closed
            list: BadFile is raised where it is damaged or forged.
        threads: how many threads a call may use; by default as many as torch uses if the file was tuned for that
            number, and else as many as the engine had that was saved.

    Results are bit for bit those of the saved engine, for the batch sizes it had been called with. Another batch size
    or number of threads is measured at its first call, as it is with :func:`compile`; so is everything, with a warning,
    where the file was tuned on another processor or by another version of pareback.
    """
    _check_built()
    if threads is not None:
        _checked(threads)
    with one_torch_thread():  # its threads wait for one another longer than these small pieces take
        plan, before = read_plan(Path(path))
    wanted = _checked(threads)
    return Engine(plan, wanted if threads is not None or wanted in plan.chosen else before)


def _check_built() -> None:
    if not bindings.available():
        raise InvalidUse(
            "The engine was not built, as no C++ compiler was found. Install g++ or clang++ and install pareback again."
        )


def _checked(threads: Any) -> int:
    """Return how many threads to use.

    >>> _checked(2)
    2
    """
    if threads is None:
        first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # the others are for nested regions
        return (int(first) if first.isdigit() else 0) or torch.get_num_threads()
    sentence = f"threads={threads!r} is not a whole number of at least 1. Leave it out for as many as torch uses."
    if isinstance(threads, bool) or not hasattr(threads, "__index__"):
        raise InvalidType(sentence)
    if operator.index(threads) < 1:
        raise InvalidValue(sentence)
    return operator.index(threads)


def _warn_of_other_types(model: nn.Module) -> None:
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    others = ", ".join(sorted(str(one).removeprefix("torch.") for one in types - {torch.float32}))
    if others:
        what = "those layers whose weights are" if torch.float32 in types else "everything here, as its weights are"
        warnings.warn(
            f"The engine runs float32 only: PyTorch runs {what} {others}. "
            "Call model.float() before compiling to let the engine run it.",
            UserWarning,
            stacklevel=3,
        )
