"""Count the floating operations of a forward pass, weight by weight.

The count is taken where the work happens: a dispatch mode watches every tensor operation of one
real forward pass, so a weight may be used by a module, a function or an operator alike.

>>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
>>> count = count_flops(model, torch.zeros(8, 3))
>>> {name: int(flops) for name, flops in count.per_parameter.items()}
{'0.weight': 30, '0.bias': 0, '2.weight': 20, '2.bias': 0}
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..errors import InvalidType, InvalidValue

__all__ = ["FlopCount", "count_flops"]


@dataclass(frozen=True)
class FlopCount:
    """Floating operations of one forward pass, per example.

    Attributes:
        per_parameter: for every name in ``model.named_parameters()``, the operations of the matrix
            products and convolutions whose weight is that parameter (0 for biases and lookups).
        total: the sum of those, plus products without a weight, such as attention scores.
        batch: the number of examples found in the example inputs.
    """

    per_parameter: dict[str, Fraction]
    total: Fraction
    batch: int


def count_flops(model: nn.Module, example_inputs: Tensor | Sequence[Any] | Mapping[str, Any]) -> FlopCount:
    """Run ``model`` once and count 2 operations per multiply-add, divided by the batch size.

    ``example_inputs`` is a tensor, a tuple or list of positional arguments, or a dict of keyword
    arguments; if none of it is on the model's device, it is copied there. The pass runs in eval
    mode, without gradients or autocast. Buffers, attributes, training flags and the random state
    are put back afterwards.

    The batch size is dim 0 of the first tensor, unless a module with a ``batch_first`` attribute
    (``nn.LSTM``, ``nn.MultiheadAttention``, ...) shows otherwise. It is dim 1 if such a module has
    ``batch_first=False`` and receives a 3-D input that agrees with the first tensor in the first
    two dims. It is 1 if such a module receives an unbatched 2-D input that is as long as the first
    tensor, which is 1-D or 2-D. It is the size of a packed sequence that was made of the first
    tensor. Other modules must receive batched inputs.

    A weight is recognised through views and copies, and in tensors computed from it and from other
    constants (masks, parametrizations). A product of two weights counts for the right one. Padding,
    masked positions and zeros count like other values. An operation that neither this module nor
    ``torch.utils.flop_counter`` knows counts 0.

    >>> tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> count = count_flops(tied, torch.zeros(2, 7, dtype=torch.long))
    >>> count.per_parameter == {'0.weight': 7 * 2 * 4 * 10}, count.batch
    (True, 2)
    """
    state = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in state):
        raise InvalidValue("the model has lazy parameters: run it once to give them a shape")
    devices = list(dict.fromkeys(tensor.device for tensor in state))
    args, kwargs = _own_copy(_as_call(example_inputs), devices)
    first = next((t for t in _tensors((args, kwargs)) if t.dim() > 0), torch.empty(0))
    if first.shape[0] == 0:
        raise InvalidValue("example_inputs holds no examples: pass a tensor with a batch dimension")

    # The pass writes to copies of the buffers, so that the model's own stay as they are.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = chain.from_iterable(vars(module).values() for module in model.modules())
    constants = [*buffers.values(), *filter(torch.is_tensor, attributes)]
    parameters = dict(model.named_parameters())
    recorder = _FlopRecorder(_WeightOrigins(parameters, constants))
    with _undisturbed(model, devices), _revealed_batches(model, first) as batches:
        try:
            with recorder:
                torch.func.functional_call(model, buffers, args, kwargs)
        except Exception as error:
            raise InvalidValue(
                f"example_inputs did not fit {type(model).__name__}.forward: pass a tensor if it"
                " takes one argument, a tuple of its positional arguments, or a dict of its keyword"
                f" arguments. The forward pass failed with {type(error).__name__}: {error}"
            ) from error

    batch = next(iter(batches), first.shape[0])
    per_parameter = {name: Fraction(recorder.flops[name], batch) for name in parameters}
    return FlopCount(per_parameter, Fraction(recorder.flops.total(), batch), batch)


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, (Tensor, PackedSequence)):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Mapping) and all(isinstance(key, str) for key in example_inputs):
        return (), dict(example_inputs)
    raise InvalidType(
        "example_inputs must be a tensor, a tuple of positional arguments such as (x, mask) or a"
        f" dict of keyword arguments such as {{'x': x}}, not {type(example_inputs).__name__}"
    )


def _own_copy(call: Any, devices: Sequence[torch.device]) -> Any:
    """Copy the inputs, as a model may overwrite them, to the model's device.

    If some are there already, the others have their reason: sequence lengths must be on the CPU.
    """
    move = bool(devices) and all(tensor.device not in devices for tensor in _tensors(call))

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().clone()
        movable = isinstance(leaf, (Tensor, PackedSequence))
        return leaf.to(devices[0]) if move and movable else leaf

    return tree_map(copy, call, is_leaf=lambda value: isinstance(value, PackedSequence))


@contextmanager
def _revealed_batches(model: nn.Module, first: Tensor) -> Iterator[list[int]]:
    """Collect the batch sizes that sequence modules reveal about the first input tensor."""
    batches: list[int] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        fed = next(chain(args, kwargs.values()), None)
        if isinstance(fed, PackedSequence):
            size = int(fed.batch_sizes[0])  # the first step holds every example
            if size in first.shape[:2] or fed.data.shape == first.shape:
                batches.append(size)
        elif isinstance(fed, Tensor) and fed.dim() == 2:
            if first.dim() <= 2 and fed.shape[0] == first.shape[0]:
                batches.append(1)
        elif isinstance(fed, Tensor) and not module.batch_first and fed.shape[:2] == first.shape[:2]:
            batches.append(fed.shape[1])

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(getattr(module, "batch_first", None), bool):
                hooks.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield batches


@contextmanager
def _undisturbed(model: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """Evaluate without fused attention, and leave no trace in the model or in torch's state."""
    kinds = {device.type for device in devices} | {"cpu"}
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_restore_attributes, module, dict(vars(module)))
            stack.callback(setattr, module, "training", module.training)  # TorchScript keeps it elsewhere
            module.training = False  # not model.eval(), which may be overridden to merge weights
        fast_path = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        if "cuda" in kinds:
            # Flash attention pads the head size to a multiple of 8, which would count as work.
            stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
        for kind in filter(torch.amp.is_autocast_available, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        cuda = [device for device in devices if device.type == "cuda"]
        stack.enter_context(torch.random.fork_rng(devices=cuda, device_type="cuda"))
        stack.enter_context(torch.no_grad())
        yield


def _restore_attributes(module: nn.Module, saved: dict[str, Any]) -> None:
    current = vars(module)
    current.update(saved)
    for name in current.keys() - saved.keys():
        del current[name]


class _WeightOrigins:
    """Knows which tensors are constant, and from which parameter their values come, if any.

    Constant are parameters, buffers and whatever is computed from constants alone. A view is known
    by its storage and its place in it, as all weights of a CUDA LSTM may be cut from one storage.
    """

    def __init__(self, parameters: Mapping[str, Tensor], constants: Sequence[Tensor]) -> None:
        # A weak reference as key: while it exists, no new storage can have the same address.
        self._spans: dict[StorageWeakRef | None, list[tuple[int, int, str | None]]] = {}
        for name, tensor in parameters.items():
            storage, start = _place(tensor)
            if storage is not None:
                strides = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + sum((size - 1) * stride for size, stride in strides)
                span = (start, start + length * tensor.itemsize, name)
                self._spans.setdefault(storage, []).append(span)
        self._parameter_storages = frozenset(self._spans)
        self.follow([], constants, writes=False, inherits=False)

    def first_name(self, tensors: Sequence[Tensor]) -> str | None:
        """The parameter that the first tensor made from a parameter was made from."""
        for storage, position in map(_place, tensors):
            for start, end, name in self._spans.get(storage, ()):
                if name is not None and start <= position < end:
                    return name
        return None

    def follow(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool, inherits: bool) -> None:
        """Note what an operation made of its inputs; ``writes`` if it wrote into one of them."""
        sources = {_place(tensor)[0] for tensor in inputs}
        # A scalar does not turn a weight into something else, wherever it comes from.
        constant = all(tensor.dim() == 0 or _place(tensor)[0] in self._spans for tensor in inputs)
        for output in outputs:
            storage, _ = _place(output)
            is_view = storage in sources and not writes
            if is_view or storage is None or storage in self._parameter_storages:
                continue
            if constant:
                # The weight among several inputs is the one not broadcast (a scale may be).
                whole = [t for t in inputs if len(inputs) == 1 or t.numel() >= output.numel()]
                name = self.first_name(whole) if inherits else None
                self._spans[storage] = [(0, sys.maxsize, name)]
            else:
                self._spans.pop(storage, None)


def _place(tensor: Tensor) -> tuple[StorageWeakRef | None, int]:
    """The storage of a tensor and the byte at which the tensor begins in it."""
    if tensor.layout != torch.strided:
        return None, 0
    return StorageWeakRef(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.itemsize


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _FlopRecorder(TorchDispatchMode):
    """Adds up the cost of the operations that run while it is active, by parameter name."""

    def __init__(self, origins: _WeightOrigins) -> None:
        super().__init__()
        self.flops: Counter[str | None] = Counter()  # None: products without a weight
        self._origins = origins

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _formula(func, kwargs)
        if formula is None:
            # In inference mode, composite operations such as linear arrive here in one piece.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        for flops, weights in formula(args, result) if formula else ():
            self.flops[self._origins.first_name(weights)] += flops
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        self._origins.follow(inputs, outputs, func._schema.is_mutable, inherits=formula is None)
        return result


# The cost of each product, and the tensors that may be its weight, likeliest first.
_Products = list[tuple[int, Sequence[Tensor]]]
# From the arguments and the result of an operation to the products that it computed.
_Formula = Callable[[Sequence[Any], Any], _Products]


def _matrix_product(at: int, args: Sequence[Any], result: Tensor) -> _Products:
    left, right = args[at : at + 2]
    columns = right.shape[-1] if right.dim() > 1 else 1
    return [(2 * left.numel() * columns, (right, left))]


def _convolution(args: Sequence[Any], result: Tensor) -> _Products:
    source, weight, transposed = args[0], args[1], args[6]
    # Each entry of the weight (smaller by the number of groups) is used once per position of the
    # output or, transposed, of the input.
    batch, _, *space = (source if transposed else result).shape
    return [(2 * weight.numel() * batch * prod(space), (weight,))]


def _fused_rnn(args: Sequence[Any], result: Any) -> _Products:
    # Each entry of a weight matrix is used once per step and example. Biases are 1-D, states 3-D.
    steps = prod(args[0].shape[:-1])
    matrices = [tensor for tensor in _tensors(args[1:3]) if tensor.dim() == 2]
    return [(2 * matrix.numel() * steps, (matrix,)) for matrix in matrices]


def _bilinear(args: Sequence[Any], result: Tensor) -> _Products:
    left, weight, right = args[:3]
    # left @ weight is a vector for each output, and the output that vector @ right.
    first, second = left.shape[0] * weight.numel(), weight.shape[0] * right.numel()
    return [(2 * first, (weight,)), (2 * second, ())]


def _attention(args: Sequence[Any], result: Any) -> _Products:
    query, key, value = args[:3]
    scores = prod(query.shape[:-1]) * key.shape[-2]  # query heads may share keys and values
    return [(2 * scores * (query.shape[-1] + value.shape[-1]), ())]


def _registered(cost: Any, kwargs: Any, args: Sequence[Any], result: Any) -> _Products:
    matrices = [tensor for tensor in _tensors((args, kwargs)) if tensor.dim() > 1]
    return [(cost(*args, **kwargs, out_val=result), matrices)]


_aten = torch.ops.aten
_PLAIN_PRODUCTS = (_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.vdot, _aten._grouped_mm)
_ADDED_PRODUCTS = (_aten.addmm, _aten.baddbmm, _aten.addmv, _aten.addbmm)
_FUSED_RNNS = (_aten._cudnn_rnn, _aten.miopen_rnn, _aten.mkldnn_rnn_layer, _aten._lstm_mps)
_FORMULAS: dict[Any, _Formula] = {
    **dict.fromkeys(_PLAIN_PRODUCTS, partial(_matrix_product, 0)),
    **dict.fromkeys(_ADDED_PRODUCTS, partial(_matrix_product, 1)),
    **dict.fromkeys(_FUSED_RNNS, _fused_rnn),
    **dict.fromkeys((_aten.convolution, _aten._convolution), _convolution),
    _aten._trilinear: _bilinear,
}


def _formula(func: Any, kwargs: Mapping[str, Any]) -> _Formula | None:
    packet, name = func._overloadpacket, func._schema.name
    if packet in _FORMULAS:
        return _FORMULAS[packet]
    if name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward"):
        return _attention
    return partial(_registered, flop_registry[packet], kwargs) if packet in flop_registry else None
