"""A chain of operations over images, in lanes from beginning to end: one by one, together, or that from somewhere on.

One image in sixteen lanes fits the caches best. Where images have become small, sixteen lanes no longer divide one
evenly, and several side by side waste none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..graph.ops import Convolution
from ..lower.layout import LANES
from ..lower.tiling import Shape, Tiling, cut_points, tiled
from ..lower.tuning import Tuner
from .base import Chain, Stage, addresses, empty, faster, floats_of
from .image_program import ImageProgram
from .plan import ShapeTable
from .torch_threads import one_torch_thread

#: Of several images together it is tried how fast they are if each of them is thought to take so much of the time that
#: one takes alone, or less. Of ten networks from there to 0.98 eight were 3 to 75 % slower together; VGG-11 gained 8 %
#: at batch 16, ShuffleNetV2 25 % at batch 8. To tune them would take ten seconds.
_WORTH_A_TRIAL = 0.75

#: To go together from somewhere on is tried if that is thought to save this share of the time, or more.
_WORTH_A_SPLIT = 0.03

#: Of the places to go together from, the last one is tried that is thought to save this share of what the best saves:
#: large images, which come first, are slower together than is thought. At batch 16 ResNet-50 and -18 gained 6 % so,
#: EfficientNet-B0 8 %, DenseNet-121 1 %; WRN-16-8 and MobileNetV2 nothing.
_SHARE_SAVED = 0.75

#: So long the tilings of one image's layers are looked for, about, and those of several: a first call waits for it.
_SECONDS_ALONE, _SECONDS_TOGETHER = 12.0, 2.0

#: Instead of a value's name: all images go together from the start.
FROM_THE_START = ""


def _together(batch: int) -> int:
    """Return how many images of a batch are done at once, if more than one is.

    >>> _together(7), _together(40)
    (4, 16)
    """
    return min(LANES, 1 << (batch.bit_length() - 1))


def image_shape(name: str, shapes: ShapeTable, images: int) -> Shape:
    """Return channels, height and width; of a matrix the last two are 1."""
    channels, height, width = (*shapes.of(name, images)[1:], 1, 1)[:3]
    return channels, height, width


def _image_shapes(chain: Chain, shapes: ShapeTable, images: int) -> dict[str, Shape]:
    matrices = chain.matrices
    return {name: image_shape(name, shapes, images) for name in chain.names if name not in matrices}


def chain_tiling(chain: Chain, shapes: ShapeTable, images: int, cuts: Sequence[str] | None = None) -> Tiling:
    """Return how so many images at once are cut into lanes, as was found before or the best."""
    return tiled(chain.over_images, _image_shapes(chain, shapes, images), images, cuts)


def divided(chain: Chain, name: str) -> tuple[Chain, Chain]:
    """Return what comes until a value and what comes after it, where all that comes after depends on that alone."""
    end = [operation.out for operation in chain.operations].index(name) + 1
    before, after = chain.operations[:end], chain.operations[end:]
    made = {operation.out for operation in before}
    outputs = list(dict.fromkeys([name, *(one for one in chain.outputs if one in made)]))
    early, late = ({one for operation in part for one in operation.reads} for part in (before, after))
    return (
        Chain(before, [one for one in chain.inputs if one in early], outputs),
        Chain(after, [name, *(i for i in chain.inputs if i in late)], [o for o in chain.outputs if o not in made]),
    )


class ImagePart:
    """A chain with its programs: for one image or several at once, and numbers of threads."""

    def __init__(self, chain: Chain, shapes: ShapeTable, tuner: Tuner, cuts: dict[int, list[str]], layers: int) -> None:
        """Programs are tuned for their share of the time, of so many layers."""
        self.chain = chain
        self._shapes, self._tuner, self._cuts, self._layers = shapes, tuner, cuts, layers
        self._programs: dict[tuple[int, int], ImageProgram] = {}
        self.lock = threading.RLock()

    def program(self, images: int, threads: int) -> ImageProgram:
        """Return the chain for so many images at once, tuned for so many threads, made when it is first asked for."""
        with self.lock:
            if (images, threads) not in self._programs:
                with one_torch_thread():
                    self._programs[images, threads] = self._made(images, threads)
                self._tuner.save()
            return self._programs[images, threads]

    def _made(self, images: int, threads: int) -> ImageProgram:
        shapes = {name: image_shape(name, self._shapes, images) for name in self.chain.names}
        tiling = chain_tiling(self.chain, self._shapes, images, self._cuts.get(images))
        self._cuts[images] = tiling.cuts
        self._tuner.allow(_SECONDS_ALONE if images == 1 else _SECONDS_TOGETHER, self._layers)
        return ImageProgram(self.chain, shapes, images, self._tuner, threads, tiling)

    def cost(self, images: int) -> float:
        """Estimate the work for each of so many images at once."""
        return chain_tiling(self.chain, self._shapes, images, self._cuts.get(images)).cost / images

    def run(self, values: dict[str, Any], batch: int, threads: int, together: bool) -> None:
        """Add the results to ``values``."""
        inputs = [floats_of(values, name, self._shapes.of(name, batch)) for name in self.chain.inputs]
        outputs = [empty(self._shapes.of(name, batch)) for name in self.chain.outputs]
        if together:
            first, last = 0, len(inputs[0])  # an example may be several images
            while first < last:  # sixteen images at a time, then by powers of two
                images = _together(last - first)
                self.program(images, threads).run(inputs, outputs, first, threads)
                first += images
        else:
            self.program(1, 1).run_each(inputs, outputs, threads)
        values.update(zip(self.chain.outputs, outputs, strict=True))

    def seconds(self, values: dict[str, Any], batch: int, threads: int, together: bool) -> dict[str, float]:
        """Return how long each value takes for a batch, whose results are among ``values``."""
        tensors = [floats_of(values, name, self._shapes.of(name, batch)) for name in self.chain.inputs]
        tensors += [values[name] for name in self.chain.outputs]
        images = _together(len(tensors[0])) if together else 1
        found = self.program(images, threads if together else 1).seconds_at(addresses(tensors))
        return {name: len(tensors[0]) / images * one for name, one in found.items()}


class ImageStage(Stage):
    """A chain over images, for any number of them, in whichever way is fastest."""

    kind = "images"

    def __init__(self, chain: Chain, shapes: ShapeTable, tuner: Tuner, cuts: dict[int, list[str]]) -> None:
        super().__init__(chain)
        self._shapes, self._tuner, self._cuts = shapes, tuner, cuts
        self._layers = sum(isinstance(operation, Convolution) for operation in chain.operations)
        self.whole = ImagePart(chain, shapes, tuner, cuts, self._layers)
        self._parts: dict[str, tuple[ImagePart, ImagePart]] = {}
        #: By batch, the value after which images go together; from the start if it is "", never if None.
        self.together_after: dict[int, str | None] = {}
        self._lock = threading.RLock()

    def decisions(self) -> dict[str, dict[int, Any]]:
        return {"together_after": self.together_after}

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        self._run(self._decided(values, batch, threads), values, batch, threads)

    def seconds_by_value(self, values: dict[str, Any], batch: int, threads: int) -> dict[str, float]:
        found: dict[str, float] = {}
        inside = dict(values)
        for part, together in self._ways(self._decided(values, batch, threads)):
            part.run(inside, batch, threads, together)
            for name, seconds in part.seconds(inside, batch, threads, together).items():
                found[name] = found.get(name, 0.0) + seconds
        values.update((name, inside[name]) for name in self.chain.outputs)
        return found

    def _decided(self, values: dict[str, Any], batch: int, threads: int) -> str | None:
        """Return after which value images go together, tried now if that is not known."""
        if not self._has_decided(batch):
            with self._lock:
                if not self._has_decided(batch):
                    self.together_after[batch] = self._fastest(values, batch, threads)
                    used = set(self.together_after.values())  # what was only tried need not be kept
                    self._parts = {name: parts for name, parts in self._parts.items() if name in used}
        return self.together_after[batch]

    def _run(self, after: str | None, values: dict[str, Any], batch: int, threads: int) -> None:
        ways = self._ways(after)
        found = values if len(ways) == 1 else dict(values)
        for part, together in ways:
            part.run(found, batch, threads, together)
        for name in self.chain.outputs:
            values[name] = found[name]

    def _ways(self, after: str | None) -> list[tuple[ImagePart, bool]]:
        if not after:
            return [(self.whole, after is not None)]
        return list(zip(self._divided(after), (False, True), strict=True))

    def _divided(self, name: str) -> tuple[ImagePart, ImagePart]:
        known = self._parts.get(name)
        if known is not None:  # without the lock, which is held for seconds while another batch is tried
            return known
        with self._lock:
            if name not in self._parts:
                cuts = {images: names for images, names in self._cuts.items() if images == 1}
                before, after = (
                    ImagePart(part, self._shapes, self._tuner, dict(cuts), self._layers)
                    for part in divided(self.chain, name)
                )
                self._parts[name] = before, after
            return self._parts[name]

    def _has_decided(self, batch: int) -> bool:
        """Whether it is known how to run a batch; a file may name a place that there is not."""
        if batch not in self.together_after:
            return False
        after = self.together_after[batch]
        return not after or after in self._parts or after in self.places()

    def places(self) -> list[str]:
        """Return the values after which images may go together."""
        return cut_points(self.chain.over_images, _image_shapes(self.chain, self._shapes, 1))

    # -- which way is fastest ----------------------------------------------------------------------------------------

    def _fastest(self, values: dict[str, Any], batch: int, threads: int) -> str | None:
        """Try the ways that may be worth it, in turn; of a large batch, on some of the examples."""
        images = self._shapes.of(self.chain.inputs[0], batch)[0]
        if images == 1:
            return FROM_THE_START
        ways = [None, *self._worth_a_trial(_together(images), images < threads)]
        if len(ways) == 1:
            return None
        if batch > LANES:
            batch = LANES
            values = {name: values[name][: self._shapes.of(name, batch)[0]] for name in self.chain.inputs}
        return ways[faster([partial(self._run, way) for way in ways], values, batch, threads)]

    def _worth_a_trial(self, images: int, few: bool = False) -> list[str]:
        """Return ways in which so many images together might gain: where one image does not fill the lanes.

        They read all weights less often, too, but what they compute no longer fits the caches. Few are fewer than
        threads, of which some would be idle.
        """
        alone = self.whole.cost(1)
        found = [FROM_THE_START] if few or self.whole.cost(images) <= _WORTH_A_TRIAL * alone else []
        saved: dict[str, float] = {}
        for name in self.places():
            after = self._divided(name)[1]
            saved[name] = after.cost(1) - after.cost(images)
        best = max(saved.values(), default=0.0)
        if best > _WORTH_A_SPLIT * alone:
            found.append([name for name, one in saved.items() if one >= _SHARE_SAVED * best][-1])
        return found
