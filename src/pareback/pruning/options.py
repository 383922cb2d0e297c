"""Checks of what a pruner is built with; each says what to write instead."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidType, InvalidValue
from ..goals.goal import Goal, MaskGoal
from ..messages import listed, one_of
from ..shrink import EXPONENTS

if TYPE_CHECKING:
    from ..freeze import Frozen
    from .attachment import Attachment

#: How the parameters of adapters are named in PEFT.
_ADAPTERS = ("lora_", "hada_", "lokr_", "oft_", "ia3_", "adaption_", "vera_")
#: The pruners at work, so that no two fight over a parameter. Weak references to the parameters themselves would keep
#: torch.utils.swap_tensors from working on them.
active: weakref.WeakSet[Attachment] = weakref.WeakSet()
#: What keeps the zeros of a model: they are to be kept by an optimizer that is made later, too.
frozen_here: weakref.WeakKeyDictionary[nn.Module, list[Frozen]] = weakref.WeakKeyDictionary()
#: The models that were pruned to their end in this process: their zeros are no surprise.
pruned_here: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_shrink(shrink: str) -> float:
    """Return the exponent of a named shrink operator."""
    one_of("shrink", shrink, EXPONENTS)
    return EXPONENTS[shrink]


def check_mask_options(goal: Goal, options: Mapping[str, object], optimizers: Sequence[Optimizer]) -> None:
    """Refuse what a goal that keeps masks does not read, and optimizers that it cannot serve."""
    if not isinstance(goal, MaskGoal):
        return
    name = type(goal).__name__
    for option, value in options.items():
        if value is not None:
            raise InvalidValue(
                f"{option}={value!r} has no effect with {name}, which keeps masks instead of thresholds. Drop it."
            )
    if goal.ranks_together and len(optimizers) > 1:
        raise InvalidValue(
            f"{name} ranks the weights of all tensors together, and {len(optimizers)} optimizers move them. Give one "
            "optimizer with several parameter groups."
        )
    if any(isinstance(one, LBFGS) for one in optimizers):
        raise InvalidValue(
            f"{name} keeps masks, which hold between steps, and LBFGS evaluates the model within a step at weights "
            "outside of them. Use a goal of thresholds, such as pb.Budget or pb.methods.Feather, or another optimizer."
        )


def checked_share(straight_through: float) -> float:
    """Return the share of their gradient that pruned weights keep; True is all of it and False nothing."""
    if not isinstance(straight_through, (bool, int, float)) or not 0.0 <= straight_through <= 1.0:
        raise InvalidValue(
            f"straight_through={straight_through!r} must be True, False, or the share of their gradient that pruned "
            "weights keep, in [0, 1]."
        )
    return float(straight_through)


def checked_total(total_steps: int | None) -> int | None:
    """Return the number of optimizer steps, or None where none was given."""
    if total_steps is None:
        return None
    if isinstance(total_steps, bool) or not isinstance(total_steps, int):
        raise InvalidType(f"total_steps={total_steps!r} must be a whole number: epochs * len(loader).")
    if total_steps < 1:
        raise InvalidValue(f"total_steps={total_steps!r} must be at least 1: epochs * len(loader).")
    return total_steps


def ramp_steps(ramp: float, total_steps: int | None) -> int:
    """Return over how many steps the target grows."""
    if isinstance(ramp, bool) or not isinstance(ramp, (int, float)) or not 0.0 <= ramp <= 1.0:
        raise InvalidValue(f"ramp={ramp!r} must be the share of total_steps over which the target grows, in [0, 1].")
    if ramp == 0.0:
        return 0
    if total_steps is None:
        raise InvalidValue(
            "The target grows over a share of the training, so its length is needed: total_steps=epochs * len(loader). "
            "Write ramp=0 to prune to the full target at once."
        )
    return max(1, math.ceil(ramp * total_steps))


def check_threshold_lr(multiple: float | None) -> None:
    """Refuse what cannot be a multiple of a learning rate."""
    if multiple is None:
        return
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)) or not 0.0 <= multiple < math.inf:
        raise InvalidValue(
            f"threshold_lr={multiple!r} must be a multiple of the optimizer's learning rate, such as 0.01."
        )


def check_unowned(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that another pruner is at work on."""
    taken = _taken(names, parameters)
    if taken:
        gc.collect()  # a pruner that nobody can reach any more is at work on nothing
        taken = _taken(names, parameters)
    if taken:
        raise InvalidValue(
            f"{listed(taken)} is being pruned by another pruner already. Call its finish() first, or leave the tensor "
            f"out with exclude=[{taken[0]!r}]."
        )


def _taken(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[str]:
    owned = {id(p) for pruner in active for p in pruner.parameters}
    return [name for name, p in zip(names, parameters, strict=True) if id(p) in owned]


def check_dense_gradients(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse embeddings whose gradients are sparse."""
    ids = {id(p) for p in parameters}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and id(module.weight) in ids:
            raise InvalidValue(
                f"The embedding {name!r} has sparse=True, and pruning needs dense gradients. Build it with "
                f"sparse=False, or leave it out with exclude=['{name}.weight']."
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, as PEFT names them.

    >>> is_adapter("model.layers.0.q_proj.lora_A.default.weight"), is_adapter("model.layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return any(part.startswith(_ADAPTERS) for part in name.split("."))


def warn_of_adapters(model: nn.Module, names: Sequence[str]) -> None:
    """Warn where everything that was chosen by default is an adapter on a frozen base: next to nothing is pruned."""
    if not all(map(is_adapter, names)) or all(p.requires_grad for p in model.parameters()):
        return
    warnings.warn(
        f"Everything that would be pruned is an adapter ({listed(names, 2)}); the base, which has nearly all weights, "
        "is frozen and stays as it is. Prune the base first and train adapters on it afterwards, or name the adapters "
        "with include= if this is meant.",
        stacklevel=4,
    )
