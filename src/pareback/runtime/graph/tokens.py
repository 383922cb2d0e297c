"""Finds what in a model works on tokens and can stay in lanes: linear layers, layer norms, attention, sums."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .capture import CapturedModel
from .operation import Operation, TorchCall, ValueName, last_readers
from .ops import Add, Attention, AttentionHeads, LayerNorm, Linear
from .views import MOVES, SIZES, TokenNumbering, TokenView, moved

aten = torch.ops.aten

#: What moves numbers about is tried with batches of these sizes; shapes are compared for the others as well.
_TRIED = (2, 3)
_SHAPED = (1, 1009)


@dataclass
class _AttentionScores:
    """Scores of keys, or with ``softened`` the weights made of them, that exist nowhere in memory."""

    query: AttentionHeads
    key: AttentionHeads
    heads: int
    scale: float
    softened: bool = False


@dataclass
class TokenWalk:
    """Goes through the operations and notes which of them work on tokens."""

    captured: CapturedModel
    banned: set[str]
    converted: dict[str, Operation] = field(default_factory=dict)  #: by result
    free: set[str] = field(default_factory=set)  #: what only moves numbers, or is a part of attention
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  #: tokens and channels of what is in lanes
    ordered: set[str] = field(default_factory=set)  #: what lies in memory as it would in lanes, turned over

    def __post_init__(self) -> None:
        self._views: dict[int, dict[str, TokenView | int]] = {batch: {} for batch in _TRIED}
        self._scores: dict[str, _AttentionScores] = {}
        self._counting: dict[tuple[int, int], TokenNumbering] = {}

    def walk(self, operations: list[Operation]) -> bool:
        """Return whether anything was found; a value that is changed while there are views of it ends the search."""
        everything = {name for operation in operations for name in (operation.out, *operation.reads)}
        for operation, done in zip(operations, last_readers([o.reads for o in operations], everything), strict=True):
            if isinstance(operation, TorchCall) and self._follow(operation):
                self.free.add(operation.out)
            elif operation.out not in self.banned and (found := self._converted(operation)) is not None:
                self.converted[operation.out] = found
            else:
                for name in operation.reads:  # scores that anything else reads have to exist, and may be changed
                    self._scores.pop(name, None)
                if isinstance(operation, TorchCall) and operation.changes_its_argument:
                    changed = operation.args[0]
                    if isinstance(changed, ValueName) and changed.text in self._views[_TRIED[0]]:
                        return False
            for name, batch in itertools.product(done, _TRIED):  # they may be large
                self._views[batch].pop(name, None)
        return bool(self.converted)

    # -- values ------------------------------------------------------------------------------------------------------

    def _count(self, batch: int, tokens: int) -> TokenNumbering:
        return self._counting.setdefault((batch, tokens), TokenNumbering(batch, tokens))

    def _view(self, name: str, batch: int) -> TokenView | None:
        """Return a value as numbers of tokens; one that comes from elsewhere may be tokens itself."""
        if name not in self._views[batch]:
            self._enter(name)
        value = self._views[batch].get(name)
        return value if isinstance(value, TokenView) else None

    def _enter(self, name: str) -> None:
        if name in self.captured.constants or name in self.captured.unforeseen:
            return
        if self.captured.dtypes.get(name) != torch.float32:
            return
        shapes = {batch: self.captured.shape(name, batch) for batch in (*_TRIED, *_SHAPED)}
        sizes = shapes[1][1:]
        if len(sizes) != 2 or any(shape != (batch, *sizes) for batch, shape in shapes.items()):
            return
        tokens, channels = sizes
        self.sizes[name] = tokens, channels
        for batch in _TRIED:
            self._views[batch][name] = TokenView(name, self._count(batch, tokens).of(channels))

    def _is_whole(self, name: str, tokens: int, channels: int) -> bool:
        """Whether a value has as many numbers as all tokens, for any batch."""
        return all(math.prod(self.captured.shape(name, batch)) == batch * tokens * channels for batch in _SHAPED)

    def _rows(self, argument: Any) -> tuple[str, dict[int, Tensor]] | None:
        """Return whose tokens a value has as rows, and in which order."""
        name = argument.text if isinstance(argument, ValueName) else argument
        if not isinstance(name, str):
            return None
        orders, bases = {}, set()
        for batch in _TRIED:
            view = self._view(name, batch)
            if view is None or view.factor != 1.0 or not isinstance(view.index, Tensor):
                return None
            tokens, channels = self.sizes[view.base]
            rows = self._count(batch, tokens).rows(view.index, channels)
            if rows is None or not self._is_whole(name, tokens, channels):
                return None
            orders[batch] = rows
            bases.add(view.base)
        return bases.pop(), orders

    def _make(self, out: str, tokens: int, channels: int, index: dict[int, Tensor]) -> bool:
        """Note where the numbers of a result lie, if its shape is as expected."""
        if any(tuple(index[batch].shape) != self.captured.shape(out, batch) for batch in _TRIED):
            return False
        if not self._is_whole(out, tokens, channels):
            return False
        self.sizes[out] = tokens, channels
        for batch in _TRIED:
            self._views[batch][out] = TokenView(out, index[batch])
        if all(torch.equal(index[batch].flatten(), torch.arange(index[batch].numel())) for batch in _TRIED):
            self.ordered.add(out)
        return True

    def _make_rows(self, out: str, tokens: int, channels: int, orders: dict[int, Tensor]) -> bool:
        index = {}
        for batch, rows in orders.items():
            all_of_them = self._count(batch, tokens).of(channels)
            if torch.equal(rows.flatten(), torch.arange(rows.numel())):
                index[batch] = all_of_them.reshape(*rows.shape, channels)
            else:
                index[batch] = all_of_them.reshape(-1, channels)[rows]
        return self._make(out, tokens, channels, index)

    # -- what computes nothing ---------------------------------------------------------------------------------------

    def _follow(self, operation: TorchCall) -> bool:
        """Note what an operator does that only moves numbers about or is a part of attention."""
        if operation.target is aten.sym_size.int:
            name, dimension = operation.args
            for batch in _TRIED:
                self._views[batch][operation.out] = self.captured.shape(name.text, batch)[dimension]
            return True
        return self._moves(operation) or self._scales(operation) or self._scores_keys(operation)

    def _moves(self, operation: TorchCall) -> bool:
        if operation.target not in MOVES | SIZES:
            return False
        for name in operation.reads:
            if name not in self._views[_TRIED[0]]:
                self._enter(name)
        results = {}
        for batch in _TRIED:
            try:
                result = moved(operation, self._views[batch])
            except (RuntimeError, IndexError, TypeError):
                return False
            if result is None:
                return False
            results[batch] = result
        for batch, result in results.items():
            self._views[batch][operation.out] = result
        return True

    def _scales(self, operation: TorchCall) -> bool:
        """A product with a number, of queries, keys or scores."""
        if operation.target not in (aten.mul.Tensor, aten.div.Tensor) or operation.kwargs:
            return False
        x, number = operation.args
        if not isinstance(x, ValueName) or not isinstance(number, int | float) or number == 0:
            return False
        factor = float(number) if operation.target is aten.mul.Tensor else 1.0 / number
        if x.text in self._scores and not self._scores[x.text].softened:
            scores = self._scores[x.text]
            self._scores[operation.out] = replace(scores, scale=scores.scale * factor)
            return True
        for batch in _TRIED:
            view = self._views[batch].get(x.text)
            if not isinstance(view, TokenView):
                return False
            self._views[batch][operation.out] = replace(view, factor=view.factor * factor)
        return True

    def _scores_keys(self, operation: TorchCall) -> bool:
        """The first parts of attention that is written out: a product of queries and keys, and its softmax."""
        if operation.kwargs:
            return False
        if operation.target is aten.softmax.int:
            scores = self._scores.get(operation.args[0].text)
            dimension = operation.args[1]
            if scores is None or scores.softened or dimension not in (-1, 3) or any(operation.args[2:]):
                return False
            self._scores[operation.out] = replace(scores, softened=True)
            return True
        if operation.target is not aten.matmul.default:
            return False
        query, key = self._heads(operation.args[0]), self._heads(operation.args[1], turned=True)
        if query is None or key is None or not _fit(query[1], key[1], query[0], key[0]):
            return False
        if self.sizes[query[1].name][0] != self.sizes[key[1].name][0]:
            return False
        self._scores[operation.out] = _AttentionScores(query[1], key[1], query[0], query[2] * key[2])
        return True

    def _heads(self, argument: Any, turned: bool = False) -> tuple[int, AttentionHeads, float] | None:
        """Return how many heads a value holds and where, and its factor."""
        if not isinstance(argument, ValueName):
            return None
        found = set()
        for batch in _TRIED:
            view = self._view(argument.text, batch)
            if view is None or not isinstance(view.index, Tensor) or view.index.ndim != 4:
                return None
            tokens, channels = self.sizes[view.base]
            index = view.index.transpose(2, 3) if turned else view.index
            heads = self._count(batch, tokens).heads(index, channels)
            if heads is None or not self._is_whole(argument.text, tokens, heads[0] * heads[3]):
                return None
            found.add((heads[0], AttentionHeads(view.base, *heads[1:]), view.factor))
        return found.pop() if len(found) == 1 else None

    # -- what computes -----------------------------------------------------------------------------------------------

    def _converted(self, operation: Operation) -> Operation | None:
        if isinstance(operation, Linear):
            return self._linear(operation)
        if not isinstance(operation, TorchCall):
            return None
        if operation.target is aten.layer_norm.default:
            return self._layer_norm(operation)
        if operation.target in (aten.add.Tensor, aten.add_.Tensor):
            return self._add(operation)
        if operation.target is aten.scaled_dot_product_attention.default:
            return self._attention(operation)
        if operation.target is aten.matmul.default:
            return self._written_out(operation)
        return None

    def _linear(self, operation: Linear) -> Operation | None:
        found = self._rows(operation.x)
        if found is None or operation.residual is not None:
            return None
        base, orders = found
        tokens, channels = self.sizes[base]
        outputs, inputs = operation.taps.weight.shape[:2]
        if inputs != channels or not self._make_rows(operation.out, tokens, outputs, orders):
            return None
        return replace(operation, x=base)

    def _layer_norm(self, operation: TorchCall) -> Operation | None:
        given = operation.args
        x, shape, weight, bias, eps = (*given, *(None, None, 1e-5)[len(given) - 2 :])[:5]
        found = self._rows(x)
        if found is None or operation.kwargs:
            return None
        base, orders = found
        tokens, channels = self.sizes[base]
        scale = self._constant(weight, torch.ones(channels, dtype=torch.float32))
        shift = self._constant(bias, torch.zeros(channels, dtype=torch.float32))
        if list(shape) != [channels] or scale is None or shift is None:
            return None
        if not self._make_rows(operation.out, tokens, channels, orders):
            return None
        return LayerNorm(operation.out, base, scale, shift, float(eps))

    def _constant(self, argument: Any, otherwise: Tensor) -> Tensor | None:
        if argument is None:
            return otherwise
        value = self.captured.constants.get(argument.text) if isinstance(argument, ValueName) else None
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != otherwise.shape:
            return None
        return value.detach().clone()

    def _add(self, operation: TorchCall) -> Operation | None:
        if operation.kwargs.get("alpha", 1) != 1 or len(operation.args) != 2:
            return None
        if operation.target is aten.add_.Tensor and not self._may_change(operation.args[0]):
            return None
        one, other = self._rows(operation.args[0]), self._rows(operation.args[1])
        if one is None or other is None or self.sizes[one[0]] != self.sizes[other[0]]:
            return None
        if any(not torch.equal(one[1][batch], other[1][batch]) for batch in _TRIED):
            return None
        if not self._make_rows(operation.out, *self.sizes[one[0]], one[1]):
            return None
        return Add(operation.out, one[0], other[0])

    def _may_change(self, argument: Any) -> bool:
        """Whether a value is the engine's own, and no view of it would show the change."""
        if not isinstance(argument, ValueName) or argument.text not in self.converted:
            return False
        return not any(
            name != argument.text and isinstance(view, TokenView) and view.base == argument.text
            for name, view in self._views[_TRIED[0]].items()
        )

    def _attention(self, operation: TorchCall) -> Operation | None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
        if given.get("attn_mask") is not None or given.get("dropout_p", 0.0) != 0.0 or given.get("enable_gqa", False):
            return None
        query, key, value = (self._heads(given[name]) for name in names[:3])
        if query is None or key is None or not _fit(query[1], key[1], query[0], key[0]):
            return None
        scale = given.get("scale")
        scale = query[1].depth ** -0.5 if scale is None else float(scale)
        scores = _AttentionScores(query[1], key[1], query[0], scale * query[2] * key[2])
        return self._attended(operation.out, scores, value, bool(given.get("is_causal", False)))

    def _written_out(self, operation: TorchCall) -> Operation | None:
        """The last part of attention that is written out: weights times values."""
        weights = self._scores.get(operation.args[0].text) if isinstance(operation.args[0], ValueName) else None
        if weights is None or not weights.softened:
            return None
        return self._attended(operation.out, weights, self._heads(operation.args[1]), causal=False)

    def _attended(
        self, out: str, scores: _AttentionScores, value: tuple[int, AttentionHeads, float] | None, causal: bool
    ) -> Operation | None:
        if value is None or value[0] != scores.heads or value[2] != 1.0:
            return None
        if not scores.scale > 0.0:  # the engine looks for the largest score before it scales
            return None
        parts = (scores.query, scores.key, value[1])
        tokens = self.sizes[value[1].name][0]
        if any(self.sizes[part.name][0] != tokens for part in parts):
            return None
        channels = scores.heads * value[1].depth
        index = {
            batch: self._count(batch, tokens).of(channels).view(batch, tokens, scores.heads, -1).transpose(1, 2)
            for batch in _TRIED
        }
        if not self._make(out, tokens, channels, index):
            return None
        return Attention(out, *parts, scores.heads, scores.scale, causal)


def _fit(query: AttentionHeads, key: AttentionHeads, query_heads: int, key_heads: int) -> bool:
    return query.depth == key.depth and query_heads == key_heads
