"""Transformer blocks in lanes: the tokens of one image side by side, from the first operation to the last."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import library
from .layout import LANES, Layout
from .library import ACTIVATIONS
from .listing import RowLayer
from .memory import Memory, Places
from .operations import Attention, Convolution, Encoder, Heads, Normalization, Operation, Sum, reads
from .tuning import Tuner
from .turning import into_lanes, layout_of, out_of_lanes


class EncoderProgram:
    """Operations on the tokens of one image, tuned for a number of threads."""

    def __init__(self, encoder: Encoder, tuner: Tuner, threads: int) -> None:
        self._encoder, self._tuner, self._threads = encoder, tuner, threads
        self._vectors = -(-encoder.tokens // LANES)
        self._places = Places()
        self._brought = {name: -2 - number for number, name in enumerate(encoder.inputs)}
        self._left = dict.fromkeys((*encoder.inputs, *(o.out for o in encoder.members)), 0)
        for operation in encoder.members:
            for name in set(reads(operation)):
                self._left[name] += 1
        steps = [self._turned_in(name) for name in encoder.inputs]
        for operation in encoder.members:
            self._places.take(operation.out, self._layout(operation.out).floats)
            steps.append(self._step(operation))
            if operation.out in encoder.outputs:
                steps.append(self._turned_out(operation.out))
            self._give_back(operation)
        self._program = library.Program(steps)
        self.memory = Memory(self._places.most)

    def run(self, tensors: Sequence[Tensor], threads: int) -> None:
        """Compute one image: inputs and outputs of [tokens, channels]."""
        with self.memory.arena() as arena:
            self._program.run(arena, [one.data_ptr() for one in tensors], threads)

    def run_each(self, tensors: Sequence[Tensor], threads: int) -> None:
        """Compute images of [images, tokens, channels], each whole on one of the threads."""
        brought = [[one[image].data_ptr() for one in tensors] for image in range(len(tensors[0]))]
        with self.memory.arenas(min(threads, len(brought))) as arenas:
            self._program.run_each(arenas, brought)

    def _give_back(self, operation: Operation) -> None:
        for name in set(reads(operation)):
            self._left[name] -= 1
        for name in {*reads(operation), operation.out}:
            if self._left[name] == 0:
                self._places.give_back(name)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _layout(self, name: str) -> Layout:
        return layout_of(self._encoder.channels[name], self._encoder.tokens)

    def _turned_in(self, name: str) -> library.Operation:
        layout = self._layout(name)
        place = self._places.take(name, layout.floats)
        return into_lanes(layout, self._encoder.tokens, self._brought[name], place)

    def _turned_out(self, name: str) -> library.Operation:
        target = -2 - len(self._encoder.inputs) - self._encoder.outputs.index(name)
        return out_of_lanes(self._layout(name), self._encoder.tokens, self._places.of(name), target)

    def _step(self, operation: Operation) -> library.Operation:
        match operation:
            case Convolution():
                return self._linear(operation)
            case Normalization():
                return library.Normalization(
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
            case Sum():
                return self._sum(operation)
        raise TypeError(f"{type(operation).__name__} is not over tokens.")

    def _linear(self, operation: Convolution) -> library.Operation:
        source, target = self._layout(operation.x), self._layout(operation.out)
        activation = ACTIVATIONS[operation.activation]
        layer = RowLayer(operation.taps, operation.bias, source, target, activation)
        residual = None if operation.residual is None else (self._places.of(operation.residual), target)
        return layer.operation(
            self._tuner.choose(layer, self._threads),
            self._places.of(operation.x),
            self._places.of(operation.out),
            residual,
        )

    def _attention(self, operation: Attention) -> library.Operation:
        def start(part: Heads) -> int:
            return self._places.of(part.name) + part.first * self._vectors * LANES

        return library.Attention(
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

    def _sum(self, operation: Sum) -> library.Operation:
        layout = self._layout(operation.out)
        return library.Pointwise(
            in_=self._places.of(operation.x),
            out=self._places.of(operation.out),
            other=self._places.of(operation.other),
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
