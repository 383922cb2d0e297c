"""Groups operations on tokens into encoders: what can stay in lanes together becomes one stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .capture import CapturedModel
from .fuse import fused
from .operation import Operation
from .ops import Attention, Encoder, LayerNorm, Linear
from .tokens import TokenWalk

#: Fewer tokens leave most lanes empty.
_FEWEST = 9


def with_encoders(operations: list[Operation], captured: CapturedModel, outputs: Iterable[str]) -> list[Operation]:
    """Return the operations with those that can stay in lanes put together as :class:`Encoder`."""
    kept = set(outputs)
    banned: set[str] = set()
    while True:
        found = TokenWalk(captured, banned)
        if not found.walk(operations):
            return operations
        plan = _EncoderPlan(operations, found, kept)
        if not plan.unordered:
            return plan.operations
        banned |= plan.unordered


class _EncoderPlan:
    """Puts neighbours together that work on the same number of tokens."""

    def __init__(self, operations: list[Operation], walk: TokenWalk, outputs: set[str]) -> None:
        self._walk = walk
        groups = self._groups(operations)
        needed = self._needed(groups, outputs)
        self.unordered = {
            o.out
            for group in groups
            if isinstance(group, _EncoderGroup)
            for o in group.members(walk)
            if o.out in needed and o.out not in walk.ordered
        }
        self.operations: list[Operation] = []
        for group in groups if not self.unordered else []:
            if isinstance(group, Operation):
                self.operations.append(group)
            else:
                self.operations += self._together(group, needed)

    def _groups(self, operations: list[Operation]) -> list[Operation | _EncoderGroup]:
        """Divide into groups, from the first of their members to the last, and what is between them."""
        found: list[Operation | _EncoderGroup] = []
        waiting: list[Operation] = []  # what moves numbers about after a group's last member so far
        for operation in operations:
            if operation.out in self._walk.converted:
                tokens = self._walk.sizes[operation.out][0]
                if found and isinstance(found[-1], _EncoderGroup) and found[-1].tokens == tokens:
                    found[-1].all += [*waiting, operation]
                else:
                    found += [*waiting, _EncoderGroup(tokens, [operation])]
                waiting = []
            elif operation.out in self._walk.free:
                waiting.append(operation)
            else:
                found += [*waiting, operation]
                waiting = []
        divided: list[Operation | _EncoderGroup] = []
        for one in [*found, *waiting]:
            worthwhile = not isinstance(one, _EncoderGroup) or one.is_worthwhile(self._walk)
            divided += [one] if worthwhile or not isinstance(one, _EncoderGroup) else one.all
        return divided

    def _needed(self, groups: list[Operation | _EncoderGroup], outputs: set[str]) -> set[str]:
        """Return what is read outside the group that computes it."""
        needed = set(outputs)
        for group in reversed(groups):
            if isinstance(group, Operation):
                needed.update(group.reads)
                continue
            inside = {o.out for o in group.all}
            for operation in reversed(group.all):
                if operation.out in self._walk.free and operation.out in needed:
                    needed.update(operation.reads)
            members = group.members(self._walk)
            needed.update(name for o in [*members, *group.all] for name in o.reads if name not in inside)
        return needed

    def _together(self, group: _EncoderGroup, needed: set[str]) -> list[Operation]:
        members = group.members(self._walk)
        made = {o.out for o in members}
        inputs = dict.fromkeys(name for o in members for name in o.reads if name not in made)
        outputs = [o.out for o in members if o.out in needed]
        channels = {name: self._walk.sizes[name][1] for name in (*inputs, *made)}
        later = [o for o in group.all if o.out in self._walk.free and o.out in needed]
        steps = fused(members, outputs, over_tokens=True)
        run = Encoder(members[-1].out, steps, list(inputs), outputs, group.tokens, channels, group.all)
        return [run, *later]


@dataclass
class _EncoderGroup:
    tokens: int
    all: list[Operation]

    def members(self, walk: TokenWalk) -> list[Operation]:
        return [walk.converted[o.out] for o in self.all if o.out in walk.converted]

    def is_worthwhile(self, walk: TokenWalk) -> bool:
        """Linear layers by themselves can have tokens of all images in their lanes."""
        kinds = {type(o) for o in self.members(walk)}
        return self.tokens >= _FEWEST and Linear in kinds and bool(kinds & {Attention, LayerNorm})
