"""Divides a model's operations into stages: which belong together, and what kind of stage they make."""

from __future__ import annotations

from collections.abc import Iterable

from .capture import Captured
from .gathering import with_encoders
from .images import KINDS, Chain
from .operations import Average, Convolution, Encoder, Largest, Operation, reads
from .patches import over_patches
from .stages import Between, Images, Rows, Stage, Tokens
from .tiling import NoTilingError
from .tuning import Tuner

#: Weights of a last layer that is done together with what is before.
_SMALL_HEAD = 2**17


def divided(operations: list[Operation], captured: Captured, outputs: Iterable[str], threads: int) -> list[Stage]:
    """Return the stages of a model."""
    kept = set(outputs)
    operations = with_encoders(over_patches(operations, captured), captured, kept)
    return _stages(operations, captured, kept, Tuner(), threads)


def _stages(operations: list[Operation], captured: Captured, kept: set[str], tuner: Tuner, threads: int) -> list[Stage]:
    groups: list[tuple[str, list[Operation]]] = []
    for operation in operations:
        kind = _kind(operation, operations, captured)
        before, members = groups[-1] if groups else ("", [])
        if before == kind and kind != "tokens" and (kind != "rows" or _follows(members, operation, operations, kept)):
            members.append(operation)
        elif (before, kind) == ("images", "rows") and _is_head(operation, members, operations, kept):
            groups[-1] = ("headed", [*members, operation])
        else:
            groups.append((kind, [operation]))
    return [_stage(kind, members, operations, kept, captured, tuner, threads) for kind, members in groups]


def _kind(operation: Operation, operations: list[Operation], captured: Captured) -> str:
    if isinstance(operation, Encoder):
        return "tokens"
    if isinstance(operation, Convolution) and operation.over_rows:
        return "rows"
    if isinstance(operation, Largest) and not _is_positive(operation.x, operations):
        return "plain"  # the engine's halo holds zeros, which would be larger
    if any(isinstance(o, Average) and o.out in reads(operation) for o in operations):
        return "plain"  # a mean has no layout of lanes
    if not captured.is_of_images(operation.out, *reads(operation)):
        return "plain"  # the batch has become a height, a width or channels, for which a program would be made anew
    return "images" if isinstance(operation, KINDS) else "plain"


def _is_positive(name: str, operations: list[Operation]) -> bool:
    return any(o.out == name and getattr(o, "activation", "") == "relu" for o in operations)


def _follows(chain: list[Operation], operation: Operation, operations: list[Operation], outputs: set[str]) -> bool:
    """Whether a linear layer is the only reader of what the chain computes."""
    before = chain[-1].out
    readers = [o for o in operations if before in reads(o)]
    return reads(operation) == [before] and len(readers) == 1 and before not in outputs


def _is_head(operation: Operation, images: list[Operation], operations: list[Operation], outputs: set[str]) -> bool:
    """Whether a linear layer over the means of images, and small, ends a model: done with them, it costs no call."""
    assert isinstance(operation, Convolution)
    means = images[-1]
    return (
        isinstance(means, Average)
        and not means.keep_dimensions
        and operation.residual is None
        and operation.taps.density * operation.taps.weight.numel() <= _SMALL_HEAD
        and _follows(images, operation, operations, outputs)
        and not any(operation.out in reads(o) for o in operations)
    )


def _chain(members: list[Operation], operations: list[Operation], outputs: set[str]) -> Chain:
    made = [operation.out for operation in members]
    inputs = dict.fromkeys(name for o in members for name in reads(o) if name not in made)
    elsewhere = {name for o in operations if o.out not in made for name in reads(o)} | outputs
    return Chain(members, list(inputs), [name for name in made if name in elsewhere])


def _stage(
    kind: str,
    members: list[Operation],
    operations: list[Operation],
    kept: set[str],
    captured: Captured,
    tuner: Tuner,
    threads: int,
) -> Stage:
    if isinstance(members[0], Encoder):
        encoder = members[0]
        apart = _stages(encoder.apart, captured, set(encoder.outputs), tuner, threads)
        return Tokens(encoder, apart, captured, tuner)
    chain = _chain(members, operations, kept)
    if kind == "rows":
        return Rows(chain, tuner)
    if kind in ("images", "headed"):
        stage = Images(chain, captured, tuner)
        try:
            stage.program(1, threads)
        except NoTilingError:
            return Between(chain)
        return stage
    return Between(chain)
