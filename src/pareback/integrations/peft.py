"""Adapters of PEFT on a pruned model: merged so that its zeros stay zeros.

``merge_and_unload`` adds a dense product of two small matrices to every weight and fills the zeros. Here what would
fall on a zero is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..costs.selection import plain_names
from ..errors import InvalidType, InvalidValue
from ..messages import listed
from ..pruning.options import is_adapter

#: A tensor with fewer zeros than this share was not pruned: what is zero in it is chance.
_PRUNED = 0.01


def merge_and_unload(model: Any, **options: Any) -> nn.Module:
    """Merge a PEFT model's adapters into its pruned base, keep the zeros, and return the base.

    ``options`` are those of PEFT's own ``merge_and_unload``. The adapters were trained with their whole product, so
    that what is left out of it may cost something: evaluate the model again.
    """
    bases = _bases(model)
    merged_already = [name for name, module in model.named_modules() if getattr(module, "merged", False)]
    if merged_already:
        raise InvalidValue(
            f"The adapters of {listed(merged_already)} are merged already, which filled the zeros of the base. Call "
            "model.unmerge_adapter() first."
        )
    zeros = {id(p): p.detach() == 0 for p in bases.values() if _is_pruned(p)}
    if not zeros:
        raise InvalidValue("The model under the adapters has no zeros to keep. Use its own merge_and_unload().")
    shapes = {name: p.shape for name, p in bases.items()}
    merged = model.merge_and_unload(**options)
    after = dict(plain_names(merged))
    lost = [name for name, p in bases.items() if id(p) in zeros and not any(p is q for q in after.values())]
    if lost:
        raise InvalidValue(
            f"{listed(lost)} was replaced when the adapters were merged, so its zeros cannot be kept. Merge LoRA "
            f"adapters of a base in float32, float16 or bfloat16 (of shape {tuple(shapes[lost[0]])} here)."
        )
    with torch.no_grad():
        for p in bases.values():
            if id(p) in zeros:
                p.masked_fill_(zeros[id(p)], 0.0)
    return merged  # type: ignore[no-any-return]


def _bases(model: Any) -> dict[str, nn.Parameter]:
    if not callable(getattr(model, "merge_and_unload", None)):
        raise InvalidType(
            f"{type(model).__name__} is not a PEFT model with adapters. Give what peft.get_peft_model returned."
        )
    return {name: p for name, p in plain_names(model).items() if not is_adapter(name)}


def _is_pruned(parameter: nn.Parameter) -> bool:
    if parameter.ndim < 2 or not parameter.is_floating_point():
        return False
    return int((parameter.detach() == 0).sum()) > _PRUNED * parameter.numel()
