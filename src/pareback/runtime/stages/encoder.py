"""Transformer blocks in lanes: the tokens of one image side by side, from the first operation to the last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..graph.operation import Operation
from ..graph.ops import Add, Attention, AttentionHeads, Encoder, LayerNorm, Linear
from ..lower.layout import LANES, Layout, rows_layout
from ..lower.linear import into_lanes, out_of_lanes
from ..lower.linear_many_rows import TiledLinear
from ..lower.memory import ArenaPlanner
from ..lower.tuning import Tuner
from ..native import bindings
from ..native.bindings import ACTIVATIONS, NativeOperation
from . import base
from .base import Chain, Stage, StageProgram, addresses, empty, floats_of
from .plan import ShapeTable
from .torch_threads import one_torch_thread

#: Where layer by layer takes so many times as long, more images at once will not make it faster by much. ViT-B/16 at
#: 90 %: 1.19 with one image, 1.09 with four and 1.11 with eight.
_CLEAR_LEAD = 1.15


class EncoderProgram(StageProgram):
    """Operations on the tokens of one image, tuned for a number of threads."""

    def __init__(self, encoder: Encoder, tuner: Tuner, threads: int) -> None:
        self._encoder, self._tuner, self._threads = encoder, tuner, threads
        self._vectors = -(-encoder.tokens // LANES)
        self._places = ArenaPlanner()
        self._brought = {name: -2 - number for number, name in enumerate(encoder.inputs)}
        self._left = dict.fromkeys((*encoder.inputs, *(o.out for o in encoder.members)), 0)
        for operation in encoder.members:
            for name in set(operation.reads):
                self._left[name] += 1
        owners: dict[int, str] = {}
        steps = [self._pack(name) for name in encoder.inputs]
        for operation in encoder.members:
            self._places.take(operation.out, self._layout(operation.out).floats)
            steps.append(self._step(operation))
            owners[id(steps[-1])] = operation.out
            if operation.out in encoder.outputs:
                steps.append(self._unpack(operation.out))
            self._give_back(operation)
        super().__init__(steps, self._places.most)
        self.owners = owners

    def run(self, tensors: Sequence[Tensor], threads: int) -> None:
        """Compute one image: inputs and outputs of [tokens, channels]."""
        self.run_at([one.data_ptr() for one in tensors], threads)

    def run_each(self, tensors: Sequence[Tensor], threads: int) -> None:
        """Compute images of [images, tokens, channels], each whole on one of the threads."""
        self.run_each_at([addresses(tensors, image) for image in range(len(tensors[0]))], threads)

    def _give_back(self, operation: Operation) -> None:
        for name in set(operation.reads):
            self._left[name] -= 1
        for name in {*operation.reads, operation.out}:
            if self._left[name] == 0:
                self._places.give_back(name)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _layout(self, name: str) -> Layout:
        return rows_layout(self._encoder.channels[name], self._encoder.tokens)

    def _pack(self, name: str) -> NativeOperation:
        layout = self._layout(name)
        place = self._places.take(name, layout.floats)
        return into_lanes(layout, self._encoder.tokens, self._brought[name], place)

    def _unpack(self, name: str) -> NativeOperation:
        target = -2 - len(self._encoder.inputs) - self._encoder.outputs.index(name)
        return out_of_lanes(self._layout(name), self._encoder.tokens, self._places.of(name), target)

    def _step(self, operation: Operation) -> NativeOperation:
        match operation:
            case Linear():
                return self._linear(operation)
            case LayerNorm():
                return bindings.NativeLayerNorm(
                    scale=operation.scale,
                    shift=operation.shift,
                    in_=self._places.of(operation.x),
                    out=self._places.of(operation.out),
                    channels=self._encoder.channels[operation.x],
                    vectors=self._vectors,
                    eps=operation.eps,
                )
            case Attention():
                return self._attention(operation)
            case Add():
                return self._add(operation)
        raise TypeError(f"{type(operation).__name__} is not over tokens.")

    def _linear(self, operation: Linear) -> NativeOperation:
        source, target = self._layout(operation.x), self._layout(operation.out)
        activation = ACTIVATIONS[operation.activation]
        layer = TiledLinear(operation.taps, operation.bias, source, target, activation)
        residual = None if operation.residual is None else (self._places.of(operation.residual), target)
        return layer.operation(
            self._tuner.choose(layer, self._threads),
            self._places.of(operation.x),
            self._places.of(operation.out),
            residual,
        )

    def _attention(self, operation: Attention) -> NativeOperation:
        def start(part: AttentionHeads) -> int:
            return self._places.of(part.name) + part.first * self._vectors * LANES

        return bindings.NativeAttention(
            query=start(operation.query),
            key=start(operation.key),
            value=start(operation.value),
            out=self._places.of(operation.out),
            query_head=operation.query.step,
            key_head=operation.key.step,
            value_head=operation.value.step,
            heads=operation.heads,
            depth=operation.query.depth,
            value_depth=operation.value.depth,
            tokens=self._encoder.tokens,
            vectors=self._vectors,
            scale=operation.scale,
            causal=int(operation.causal),
        )

    def _add(self, operation: Add) -> NativeOperation:
        layout = self._layout(operation.out)
        return bindings.NativePointwise(
            in_=self._places.of(operation.x),
            out=self._places.of(operation.out),
            other=self._places.of(operation.other),
            gate=-1,
            channels=layout.channels,
            height=1,
            width=layout.plane,
            in_plane=layout.plane,
            in_row=layout.plane,
            out_plane=layout.plane,
            out_row=layout.plane,
            other_plane=layout.plane,
            other_row=layout.plane,
            activation=ACTIVATIONS[operation.activation],
        )


class EncoderStage(Stage):
    """Transformer blocks: an image at a time in lanes, or layer by layer as other stages do it; whichever is faster."""

    kind = "encoder"

    def __init__(self, chain: Chain, encoder: Encoder, apart: list[Stage], shapes: ShapeTable, tuner: Tuner) -> None:
        super().__init__(chain)
        self.stages_apart = apart
        self.tokens = encoder.tokens
        self.prefers_apart: dict[int, bool] = {}  #: by batch; whether layer by layer was faster
        self._encoder, self._shapes, self._tuner = encoder, shapes, tuner
        self._leads: dict[int, float] = {}  # by batch, how many times as long layer by layer took
        self._programs: dict[int, EncoderProgram] = {}
        self._lock = threading.RLock()

    def program(self, threads: int) -> EncoderProgram:
        """Return the blocks for one image, tuned for so many threads, made when it is first asked for."""
        with self._lock:
            if threads not in self._programs:
                with one_torch_thread():  # whose threads wait for one another longer than the small pieces take
                    self._programs[threads] = EncoderProgram(self._encoder, self._tuner, threads)
                self._tuner.save()
            return self._programs[threads]

    def decisions(self) -> dict[str, dict[int, Any]]:
        return {"prefers_apart": self.prefers_apart}

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        if batch not in self.prefers_apart:
            with self._lock:
                if batch not in self.prefers_apart:
                    self.prefers_apart[batch] = self._is_faster_apart(values, batch, threads)
        (self._run_apart if self.prefers_apart[batch] else self._run_together)(values, batch, threads)

    def seconds_by_value(self, values: dict[str, Any], batch: int, threads: int) -> dict[str, float]:
        self.run(values, batch, threads)
        if self.prefers_apart[batch]:
            inside, found = dict(values), dict[str, float]()
            for stage in self.stages_apart:
                for name, one in stage.seconds_by_value(inside, batch, threads).items():
                    found[name] = found.get(name, 0.0) + one
            return found
        tensors = [values[name].contiguous() for name in (*self._encoder.inputs, *self.chain.outputs)]
        program = self.program(1 if batch >= threads else threads)
        places = [one.data_ptr() for one in tensors]
        return {name: batch * one for name, one in program.seconds_at(places).items()}

    def _is_faster_apart(self, values: dict[str, Any], batch: int, threads: int) -> bool:
        """Try both ways, unless a smaller batch has shown it: layer by layer, many images gain a little on few."""
        if any(few < batch and lead > _CLEAR_LEAD for few, lead in self._leads.items()):
            return False
        together, apart = base.seconds_of([self._run_together, self._run_apart], values, batch, threads)
        self._leads[batch] = apart / together
        return apart < together

    def _run_together(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inputs = [floats_of(values, name, self._shapes.of(name, batch)) for name in self._encoder.inputs]
        outputs = [empty(self._shapes.of(name, batch)) for name in self.chain.outputs]
        tensors = [one.view(batch, self._encoder.tokens, -1) for one in (*inputs, *outputs)]
        alone = batch - batch % threads  # so many images keep every thread busy with its own
        if alone:
            self.program(1).run_each([one[:alone] for one in tensors], threads)
        for image in range(alone, batch):
            self.program(threads).run([one[image] for one in tensors], threads)
        values.update(zip(self.chain.outputs, outputs, strict=True))

    def _run_apart(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inside = dict(values)
        for stage in self.stages_apart:
            stage.run(inside, batch, threads)
        values.update((name, inside[name]) for name in self.chain.outputs)
