"""A chain of operations over images, in lanes from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from . import library
from .layout import LANES, Layout
from .library import ACTIVATIONS
from .linear import linear_steps
from .memory import Memory, Places
from .operations import Affine, Average, Convolution, Largest, Operation, Regrid, Sum, reads
from .strips import BY_ROWS, Strips, in_strips, reads_by_row, runs, strips
from .tiling import Shape, tiled
from .tuning import Layer, Tuner
from .weights import aligned

KINDS = (Convolution, Affine, Sum, Largest, Average)


@dataclass(frozen=True)
class Chain:
    """Operations that follow one another, what they read and what is read of them."""

    operations: list[Operation]
    inputs: list[str]
    outputs: list[str]

    @property
    def head(self) -> Convolution | None:
        """A linear layer over the means of images, at the end."""
        last = self.operations[-1]
        return last if isinstance(last, Convolution) and last.over_rows else None

    @property
    def over_images(self) -> list[Operation]:
        """The operations before it."""
        return [operation for operation in self.operations if operation is not self.head]

    @property
    def names(self) -> list[str]:
        """Everything that is read or computed."""
        return [*self.inputs, *(operation.out for operation in self.operations)]


def _addresses(inputs: Sequence[Tensor], outputs: Sequence[Tensor], first: int) -> list[int]:
    batch = len(inputs[0])
    return [t.data_ptr() + first * (t.numel() // batch) * 4 for t in (*inputs, *outputs)]


class ImageProgram:
    """A chain for a certain number of images at once, tuned for a number of threads."""

    def __init__(self, chain: Chain, shapes: dict[str, Shape], images: int, tuner: Tuner, threads: int) -> None:
        self.images = images
        self._chain, self._shapes, self._tuner, self._threads = chain, shapes, tuner, threads
        in_lanes = {name: shape for name, shape in shapes.items() if not self._is_matrix(name)}
        tiling = tiled(chain.over_images, in_lanes, images)
        self._operations, self._layouts = tiling.operations, tiling.layouts
        self._places = Places()
        self._brought = {name: -2 - number for number, name in enumerate([*chain.inputs, *chain.outputs])}
        self._steps: list[library.Operation | library.Part] = []
        self._layers: dict[str, Layer] = {}
        self._left = {name: sum(name in reads(o) for o in self._operations) for name in self._layouts}
        for name in chain.inputs:
            self._pack(name)
        for run in runs(self._operations, self._layouts):
            self._add(run)
        if chain.head is not None:
            self._add_head(chain.head)
        self._program = library.Program(self._steps)
        self.memory = Memory(self._places.most)

    def _is_matrix(self, name: str) -> bool:
        return any(o.out == name and (isinstance(o, Average) or o is self._chain.head) for o in self._chain.operations)

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], first: int, threads: int) -> None:
        """Compute images ``first`` to ``first + self.images`` of the batch."""
        with self.memory.arena() as arena:
            self._program.run(arena, _addresses(inputs, outputs, first), threads)

    def run_each(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int) -> None:
        """Compute a whole batch, ``self.images`` at a time and each time whole on one of the threads."""
        brought = [_addresses(inputs, outputs, first) for first in range(0, len(inputs[0]), self.images)]
        with self.memory.arenas(min(threads, len(brought))) as arenas:
            self._program.run_each(arenas, brought)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _pack(self, name: str) -> None:
        layout = self._layouts[name]
        channels, height, width = self._shapes[name]
        self._steps.append(
            library.Gather(
                index=layout.pixels(channels * height * width, width),
                in_=self._brought[name],
                out=self._places.take(name, layout.floats),
                count=layout.columns * LANES,
                rows=layout.rows,
                out_row=layout.row_step * LANES,
                channels=channels,
                in_channel=height * width,
                out_channel=layout.channel_step * LANES,
                images=1,
            )
        )

    def _unpack(self, name: str) -> None:
        layout = self._layouts[name]
        channels, height, width = self._shapes[name]
        pixels = height * width
        self._steps.append(
            library.Gather(
                index=layout.places(),
                in_=self._places.of(name),
                out=self._brought[name],
                count=pixels,
                rows=1,
                channels=channels,
                in_channel=layout.channel_step * LANES,
                out_channel=pixels,
                images=self.images,
                out_image=channels * pixels,
                index_image=pixels,
            )
        )

    def _add(self, run: Sequence[Operation]) -> None:
        """Add the steps of a run. Until its end all memory is kept, as its operations go on side by side."""
        if isinstance(run[0], Average):
            self._steps.append(self._average(run[0]))
        else:
            cut = self._strips(run)
            threads = 1 if len(cut) >= self._threads else self._threads
            steps = [step for operation in run for step in self._steps_of(operation, run, threads)]
            self._steps += in_strips(steps, cut) if len(cut) >= threads else [step for step, _ in steps]
        for operation in run:
            if operation.out in self._chain.outputs and operation.out in self._layouts:
                self._unpack(operation.out)
            for name in set(reads(operation)) & set(self._left):
                self._left[name] -= 1
        for name in {name for operation in run for name in (*reads(operation), operation.out)}:
            if self._left.get(name) == 0:
                self._places.give_back(name)

    def _add_head(self, head: Convolution) -> None:
        """Add the steps of a linear layer over the means, a row for each image."""
        source, target = self._places.of(head.x), self._brought[head.out]
        self._steps += linear_steps([head], self.images, source, target, self._places, self._tuner, self._threads)

    def _strips(self, run: Sequence[Operation]) -> Strips:
        """Return how a run is cut into strips, each of them done by one thread."""
        layouts = [self._layouts[operation.out] for operation in run]
        if not all(isinstance(operation, BY_ROWS) for operation in run) or (len(run) == 1 and not layouts[0].halo):
            return []
        choices = [self._tuner.choose(self._layer(o), 1) for o in run if isinstance(o, Convolution)]
        row_bytes = sum(layout.row_step for layout in layouts) * LANES * 4
        return strips(layouts[0].tile_height, [choice.rows for choice in choices], row_bytes, self._threads)

    def _layer(self, operation: Convolution) -> Layer:
        if operation.out not in self._layers:
            source, target = self._layouts[operation.x], self._layouts[operation.out]
            activation = ACTIVATIONS[operation.activation]
            self._layers[operation.out] = Layer(operation.taps, operation.bias, source, target, activation)
        return self._layers[operation.out]

    def _steps_of(
        self, operation: Operation, run: Sequence[Operation], threads: int
    ) -> Iterator[tuple[library.Operation, Layout]]:
        layout = self._layouts[operation.out]
        yield self._step(operation, layout, run, threads), layout
        if layout.halo and not isinstance(operation, Regrid):
            ring = layout.ring()
            halo = library.Halo(
                positions=ring.positions,
                lanes=aligned(ring.lanes),
                existing=ring.existing,
                in_=self._places.of(operation.out),
                count=len(ring.positions),
                channels=layout.channels,
                plane=layout.channel_step,
            )
            yield halo, layout

    def _step(self, operation: Operation, layout: Layout, run: Sequence[Operation], threads: int) -> library.Operation:
        if isinstance(operation, Convolution):
            return self._convolution(operation, layout, run, threads)
        self._places.take(operation.out, layout.floats)
        match operation:
            case Regrid():
                return self._regrid(operation, layout)
            case Affine():
                scale, shift = operation.scale.float(), operation.shift.float()
                return self._pointwise(operation.x, None, layout, operation.out, operation.activation, scale, shift)
            case Sum():
                return self._pointwise(operation.x, operation.other, layout, operation.out, operation.activation)
            case Largest():
                source = self._layouts[operation.x]
                edge = source.halo - operation.padding
                return library.Window(
                    valid=layout.valid(),
                    in_=self._places.of(operation.x) + (edge * source.row_step + edge) * LANES,
                    out=self._inside(operation.out),
                    channels=layout.channels,
                    height=layout.tile_height,
                    width=layout.tile_width,
                    in_plane=source.channel_step,
                    in_row=source.row_step,
                    out_plane=layout.channel_step,
                    out_row=layout.row_step,
                    size=operation.size,
                    stride=operation.stride,
                )
        raise TypeError(f"{type(operation).__name__} is not over images.")

    def _convolution(
        self, operation: Convolution, layout: Layout, run: Sequence[Operation], threads: int
    ) -> library.Operation:
        layer = self._layer(operation)
        choice = self._tuner.choose(layer, threads)
        residual = operation.residual and (
            self._places.of(operation.residual),
            self._layouts[operation.residual],
        )
        if operation.residual is not None and choice.divides(layout) and self._may_overwrite(operation, run):
            place = self._places.hand_on(operation.residual, operation.out)
            del self._left[operation.residual]
        else:
            place = self._places.take(operation.out, layout.floats)
        return layer.operation(choice, self._places.of(operation.x), place, residual or None)

    def _may_overwrite(self, operation: Convolution, run: Sequence[Operation]) -> bool:
        """Whether a convolution may write where its residual is: nothing else will read that, nor reads it now."""
        name = operation.residual
        assert name is not None
        readers = [o for o in self._operations if name in reads(o)]
        return (
            name not in self._chain.outputs
            and name != operation.x
            and readers[-1] is operation
            and self._layouts[name] == self._layouts[operation.out]
            and all(reads_by_row(o, name) for o in run if o in readers)
        )

    def _regrid(self, operation: Regrid, layout: Layout) -> library.Operation:
        source = self._layouts[operation.x]
        return library.Gather(
            index=layout.places_in(source),
            in_=self._places.of(operation.x),
            out=self._places.of(operation.out),
            count=layout.columns * LANES,
            rows=layout.rows,
            out_row=layout.row_step * LANES,
            channels=layout.channels,
            in_channel=source.channel_step * LANES,
            out_channel=layout.channel_step * LANES,
            images=1,
        )

    def _pointwise(
        self,
        x: str,
        other: str | None,
        layout: Layout,
        out: str,
        activation: str,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> library.Operation:
        source = self._layouts[x]
        beside = source if other is None else self._layouts[other]
        return library.Pointwise(
            scale=scale,
            shift=shift,
            valid=layout.valid(),
            in_=self._inside(x),
            out=self._inside(out),
            other=-1 if other is None else self._inside(other),
            channels=layout.channels,
            height=layout.tile_height,
            width=layout.tile_width,
            in_plane=source.channel_step,
            in_row=source.row_step,
            out_plane=layout.channel_step,
            out_row=layout.row_step,
            other_plane=beside.channel_step,
            other_row=beside.row_step,
            activation=ACTIVATIONS[activation],
        )

    def _average(self, operation: Average) -> library.Operation:
        source, out = self._layouts[operation.x], operation.out
        wanted = out in self._brought  # by the caller, and not by the head alone
        return library.Mean(
            in_=self._inside(operation.x),
            out=self._brought[out] if wanted else self._places.take(out, source.channels * self.images),
            channels=source.channels,
            height=source.tile_height,
            width=source.tile_width,
            in_plane=source.channel_step,
            in_row=source.row_step,
            images=self.images,
            tiles=source.grid.tiles,
            factor=1.0 / (source.height * source.width),
        )

    def _inside(self, name: str) -> int:
        return self._places.of(name) + self._layouts[name].inside * LANES
