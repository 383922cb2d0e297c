"""The PyTorch operators that a saved engine may name: a closed list, none of which does more than compute.

A file names an operator as data, and the name is looked up here. What is missing is left out on purpose: operators that
read files, run code, share or resize memory behind a tensor's back, or trust their arguments.
"""

from __future__ import annotations

import builtins
import operator
from typing import Any

import torch

#: Python's own, which graphs compute sizes with and take results apart.
_PYTHON: dict[str, Any] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "getitem")
    },
    **{f"operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
    "builtins.max": builtins.max,
    "builtins.min": builtins.min,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
}

_SHAPES = """
    view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int permute.default transpose.int
    t.default numpy_T.default squeeze.dim squeeze.dims squeeze.default unsqueeze.default expand.default
    expand_as.default repeat.default repeat_interleave.self_int tile.default contiguous.default clone.default
    alias.default select.int slice.Tensor narrow.default unbind.int chunk.default split.Tensor split.sizes
    split_with_sizes.default tensor_split.sections cat.default concat.default stack.default roll.default
    flip.default movedim.int movedim.intlist swapaxes.default unfold.default im2col.default col2im.default
    pad.default constant_pad_nd.default reflection_pad1d.default reflection_pad2d.default replication_pad1d.default
    replication_pad2d.default pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default sym_size.int
    sym_numel.default index_select.default index.Tensor gather.default take_along_dim.default masked_fill.Scalar
    masked_fill.Tensor where.self where.ScalarOther where.ScalarSelf tril.default triu.default diagonal.default
    lift_fresh_copy.default detach.default detach_.default to.dtype to.dtype_layout _to_copy.default type_as.default
    scatter.src scatter.value
"""
_ARITHMETIC = """
    add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor rsub.Scalar rsub.Tensor
    mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar div.Tensor_mode div_.Tensor
    floor_divide.default remainder.Scalar remainder.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    square.default sqrt.default rsqrt.default reciprocal.default neg.default abs.default sign.default exp.default
    exp2.default expm1.default log.default log2.default log1p.default sin.default cos.default tan.default
    tanh.default tanh_.default sigmoid.default sigmoid_.default erf.default floor.default ceil.default round.default
    trunc.default clamp.default clamp_.default clamp.Tensor clamp_min.default clamp_max.default maximum.default
    minimum.default eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
    gt.Scalar ge.Tensor ge.Scalar logical_and.default logical_or.default logical_not.default bitwise_and.Tensor
    bitwise_or.Tensor bitwise_not.default __and__.Tensor __or__.Tensor lerp.Scalar lerp.Tensor addcmul.default
    addcdiv.default isnan.default isfinite.default isinf.default nan_to_num.default fill_.Scalar zero_.default
    copy_.default
"""
_ACTIVATIONS = """
    relu.default relu_.default relu6.default relu6_.default leaky_relu.default leaky_relu_.default prelu.default
    elu.default elu_.default selu.default selu_.default celu.default celu_.default gelu.default silu.default
    silu_.default mish.default mish_.default softplus.default hardswish.default hardswish_.default
    hardsigmoid.default hardsigmoid_.default hardtanh.default hardtanh_.default softmax.int _softmax.default
    log_softmax.int _log_softmax.default log_sigmoid.default threshold.default threshold_.default glu.default
    hardshrink.default softshrink.default
"""
_REDUCTIONS = """
    sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int amax.default amin.default
    max.default max.dim max.other min.default min.dim min.other argmax.default argmin.default any.default any.dim
    all.default all.dim var.correction var.dim std.correction std.dim var_mean.correction var_mean.dim
    norm.ScalarOpt_dim linalg_vector_norm.default logsumexp.default cumsum.default cumprod.default topk.default
    sort.default argsort.default
"""
_LAYERS = """
    linear.default conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
    convolution.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input matmul.default
    mm.default bmm.default mv.default dot.default addmm.default baddbmm.default einsum.default bilinear.default
    embedding.default batch_norm.default layer_norm.default native_layer_norm.default group_norm.default
    instance_norm.default rms_norm.default cosine_similarity.default
    scaled_dot_product_attention.default lstm.input gru.input rnn_tanh.input rnn_relu.input dropout.default
    max_pool1d.default max_pool2d.default max_pool3d.default avg_pool1d.default avg_pool2d.default
    avg_pool3d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
    adaptive_max_pool1d.default adaptive_max_pool2d.default max_pool2d_with_indices.default upsample_nearest1d.vec
    upsample_nearest2d.vec upsample_nearest3d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec
    upsample_linear1d.vec upsample_trilinear3d.vec _upsample_bilinear2d_aa.vec grid_sampler.default
    grid_sampler_2d.default affine_grid_generator.default
"""
_NEW = """
    zeros.default ones.default full.default arange.default arange.start arange.start_step linspace.default
    eye.default zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default
    new_full.default scalar_tensor.default _assert_scalar.default _assert_tensor_metadata.default
    sym_constrain_range_for_size.default
"""
_ATEN = frozenset(" ".join((_SHAPES, _ARITHMETIC, _ACTIVATIONS, _REDUCTIONS, _LAYERS, _NEW)).split())

_PYTHON_NAMES = {target: name for name, target in _PYTHON.items()}


def operator_name(target: Any) -> str | None:
    """Return what a file calls an operator, or None if it is not in the list.

    >>> aten = torch.ops.aten
    >>> operator_name(aten.softmax.int), operator_name(operator.mul), operator_name(aten.from_file.default)
    ('aten.softmax.int', 'operator.mul', None)
    """
    if not isinstance(target, torch._ops.OpOverload):
        return _PYTHON_NAMES.get(target) if callable(target) else None
    name = str(target)
    return name if name.startswith("aten.") and name.removeprefix("aten.") in _ATEN else None


def operator_named(name: object) -> Any:
    """Return an operator of the list; None for any other name.

    >>> operator_named("aten.softmax.int"), operator_named("aten.from_file.default"), operator_named("os.system")
    (<OpOverload(op='aten.softmax', overload='int')>, None, None)
    """
    if not isinstance(name, str):
        return None
    if name in _PYTHON:
        return _PYTHON[name]
    room, _, rest = name.partition(".")
    if room != "aten" or rest not in _ATEN:
        return None
    packet, _, overload = rest.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)  # one that this version of torch may lack
