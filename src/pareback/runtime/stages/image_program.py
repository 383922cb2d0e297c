"""The program of a chain over images: which steps it takes, in which order, and where everything lies in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..graph.operation import Operation
from ..graph.ops import Convolution, GateLayer, GlobalMean, GroupNorm, Linear, Regrid
from ..lower.activation import activation_fields
from ..lower.convolution import TiledConvolution
from ..lower.image_ops import ImageMemory, halo_step, image_step, image_steps, pack_step, unpack_step
from ..lower.layout import VECTOR_BYTES, Layout
from ..lower.linear import linear_steps
from ..lower.memory import ArenaPlanner
from ..lower.strips import Strips, in_strips, runs, strips
from ..lower.tiling import Shape, Tiling
from ..lower.tuning import Tuner
from ..native.bindings import NativeOperation, NativePart
from .base import Chain, StageProgram, addresses


class ImageProgram(StageProgram):
    """A chain for a certain number of images at once, tuned for a number of threads."""

    def __init__(
        self, chain: Chain, shapes: dict[str, Shape], images: int, tuner: Tuner, threads: int, tiling: Tiling
    ) -> None:
        self.images = images
        self._chain, self._tuner, self._threads = chain, tuner, threads
        self._operations, self._layouts = tiling.operations, tiling.layouts
        self._places = ArenaPlanner()
        self._brought = {name: -2 - number for number, name in enumerate([*chain.inputs, *chain.outputs])}
        self._memory_plan = ImageMemory(images, shapes, self._layouts, self._brought, self._places)
        self._steps: list[NativeOperation | NativePart] = [
            pack_step(name, self._memory_plan) for name in chain.inputs if name in self._layouts
        ]
        self._owners: dict[int, str] = {}
        self._layers: dict[str, TiledConvolution] = {}
        self._left = {name: sum(name in o.reads for o in self._operations) for name in self._layouts}
        for run in runs(self._operations, self._layouts):
            self._add(run)
        if chain.head is not None:
            self._add_head(chain.head)
        super().__init__(self._steps, self._places.most)
        self.owners = self._owners

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], first: int, threads: int) -> None:
        """Compute images ``first`` to ``first + self.images`` of the batch."""
        self.run_at(addresses((*inputs, *outputs), first), threads)

    def run_each(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int) -> None:
        """Compute a whole batch, ``self.images`` at a time and each time whole on one of the threads."""
        tensors = (*inputs, *outputs)
        self.run_each_at([addresses(tensors, first) for first in range(0, len(tensors[0]), self.images)], threads)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _add(self, run: Sequence[Operation]) -> None:
        """Add the steps of a run. Until its end all memory is kept, as its operations go on side by side."""
        if isinstance(run[0], GlobalMean):
            self._steps.append(image_step(run[0], self._memory_plan))
            self._owners[id(self._steps[-1])] = run[0].out
        elif isinstance(run[0], GateLayer):
            self._add_gate_layer(run[0])
        else:
            cut = self._strips(run)
            threads = 1 if len(cut) >= self._threads else self._threads
            steps = []
            for operation in run:
                own = list(self._steps_of(operation, run, threads))
                self._owners.update((id(step), operation.out) for step, _ in own)
                steps += own
            self._steps += in_strips(steps, cut) if len(cut) >= threads else [step for step, _ in steps]
        for operation in run:
            if operation.out in self._chain.outputs and operation.out in self._layouts:
                self._steps.append(unpack_step(operation.out, self._memory_plan))
            for name in set(operation.reads) & set(self._left):
                self._left[name] -= 1
        for name in {name for operation in run for name in (*operation.reads, operation.out)}:
            if self._left.get(name) == 0:
                self._places.give_back(name)

    def _add_gate_layer(self, layer: GateLayer) -> None:
        """Add the steps of a layer over the means of images, a row for each of them."""
        outputs = layer.taps.weight.shape[0]
        if layer.out not in self._brought:
            self._places.take(layer.out, outputs * self.images)
        source, target = self._memory_plan.matrix(layer.x), self._memory_plan.matrix(layer.out)
        linear = Linear(layer.out, layer.x, layer.taps, layer.bias, layer.activation)
        self._add_linear(linear, source, target)

    def _add_linear(self, linear: Linear, source: int, target: int) -> None:
        steps = linear_steps([linear], self.images, source, target, self._places, self._tuner, self._threads)
        self._owners.update((id(step), linear.out) for step in steps)
        self._steps += steps

    def _add_head(self, head: Linear) -> None:
        """Add the steps of a linear layer over the means, a row for each image."""
        self._add_linear(head, self._places.of(head.x), self._brought[head.out])

    def _strips(self, run: Sequence[Operation]) -> Strips:
        """Return how a run is cut into strips, each of them done by one thread."""
        layouts = [self._layouts[operation.out] for operation in run]
        if not all(operation.in_strips for operation in run) or (len(run) == 1 and not layouts[0].halo):
            return []
        choices = [self._tuner.choose(self._layer(o), 1) for o in run if isinstance(o, Convolution)]
        row_bytes = sum(layout.row_step for layout in layouts) * VECTOR_BYTES
        return strips(layouts[0].tile_height, [choice.rows for choice in choices], row_bytes, self._threads)

    def _layer(self, operation: Convolution) -> TiledConvolution:
        if operation.out not in self._layers:
            source, target = self._layouts[operation.x], self._layouts[operation.out]
            follows = activation_fields(operation.activation)
            self._layers[operation.out] = TiledConvolution(operation.taps, operation.bias, source, target, **follows)
        return self._layers[operation.out]

    def _steps_of(
        self, operation: Operation, run: Sequence[Operation], threads: int
    ) -> Iterator[tuple[NativeOperation, Layout]]:
        layout = self._layouts[operation.out]
        if isinstance(operation, Convolution):
            yield self._convolution(operation, layout, run, threads), layout
        else:
            if isinstance(operation, GroupNorm) and self._may_overwrite(operation, operation.x, run):
                self._places.share(operation.x, operation.out)  # what is read last is in the cache to be written
            else:
                self._places.take(operation.out, layout.floats)
            for step in image_steps(operation, self._memory_plan):
                yield step, layout
        if layout.halo and not isinstance(operation, Regrid):
            yield halo_step(operation.out, self._memory_plan), layout

    def _convolution(
        self, operation: Convolution, layout: Layout, run: Sequence[Operation], threads: int
    ) -> NativeOperation:
        layer = self._layer(operation)
        choice = self._tuner.choose(layer, threads)
        residual = operation.residual and (
            self._places.of(operation.residual),
            self._layouts[operation.residual],
        )
        if (
            operation.residual is not None
            and operation.residual != operation.x
            and choice.divides(layout)
            and self._may_overwrite(operation, operation.residual, run)
        ):
            place = self._places.hand_on(operation.residual, operation.out)
            del self._left[operation.residual]
        else:
            place = self._places.take(operation.out, layout.floats)
        return layer.operation(choice, self._places.of(operation.x), place, residual or None)

    def _may_overwrite(self, operation: Operation, name: str, run: Sequence[Operation]) -> bool:
        """Whether an operation may write where something it reads is: nothing else will read that, nor does now."""
        readers = [o for o in self._operations if name in o.reads]
        return (
            name not in self._chain.outputs
            and readers[-1] is operation
            and self._layouts[name] == self._layouts[operation.out]
            and (len(run) == 1 or all(o.reads_by_row(name) for o in run if o in readers))
        )
