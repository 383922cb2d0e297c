"""The parametrization mount: prunes inside the model's forward pass, through ``torch.nn.utils.parametrize``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import InvalidValue
from ..kernels import Sweep
from ..sharding import is_sharded
from ..shrink import shrink
from .pruner import Pruner


class _PassThrough(torch.autograd.Function):
    """Replaces a latent weight by its pruned one and hands the gradient back, of pruned weights a share."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, threshold: Tensor, exponent: float, straight_through: float) -> Tensor:
        pruned = shrink(latent, threshold, exponent)
        ctx.straight_through = straight_through
        if straight_through < 1.0:
            ctx.save_for_backward(pruned == 0)
        return pruned

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, share = grads[0], ctx.straight_through
        if share < 1.0:
            (gone,) = ctx.saved_tensors
            grad = torch.where(gone, grad * share, grad) if share else grad.masked_fill(gone, 0.0)
        return grad, None, None, None


class Pruned(nn.Module):
    """Computes a pruned weight from its latent one."""

    threshold: Tensor

    def __init__(self, threshold: Tensor, exponent: float, straight_through: float) -> None:
        super().__init__()
        # Not saved: the pruner's own state has it, and the model's checkpoint keeps to weights.
        self.register_buffer("threshold", threshold.clone(), persistent=False)
        self.exponent, self.straight_through = exponent, straight_through

    def _apply(self, fn: Any, recurse: bool = True) -> Pruned:
        kept = self.threshold
        super()._apply(fn, recurse)
        self.threshold = kept.to(self.threshold.device)  # follows the model to a device, not to another type
        return self

    def forward(self, latent: Tensor) -> Tensor:
        return _PassThrough.apply(latent, self.threshold, self.exponent, self.straight_through)  # type: ignore[no-any-return]


class InForward:
    """Keeps latent weights in the parameters and lets every module compute its pruned ones."""

    holds_pruned = False

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        thresholds: Tensor,
        exponent: float,
        straight_through: float,
    ) -> None:
        self._parameters, self._exponent = list(parameters), exponent
        #: Gradients come scaled from the backward pass; a threshold is moved by whole ones.
        self.share = 1.0 if straight_through else 0.0
        self.pull_scale = 1.0 / straight_through if straight_through else 1.0
        self._handles: list[Any] = []
        owners = _owners(model)
        self._places = [owners[id(p)] for p in parameters]
        self._order = {m: list(m._parameters) for places in self._places for m, _ in places}
        self._pruned: list[Pruned] = []
        for threshold, places in zip(thresholds, self._places, strict=True):
            pruned = Pruned(threshold, exponent, straight_through)
            self._pruned.append(pruned)
            for module, attribute in places:  # both sides of a tie get the one object
                parametrize.register_parametrization(module, attribute, pruned, unsafe=True)
                hook = functools.partial(_rename_plain, attribute)
                self._handles.append(module.register_load_state_dict_pre_hook(hook))
        modules = {id(m): m for places in self._places for m, _ in places if isinstance(m, nn.RNNBase)}
        self._handles += [m.register_forward_pre_hook(_refresh_flat_weights) for m in modules.values()]
        self._handles += [m.register_forward_hook(_detach_flat_weights, always_call=True) for m in modules.values()]
        self._sweeps: dict[int, tuple[list[tuple[int, tuple[int, ...]]], Sweep]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sweeps": {}}  # a copy has memory of its own

    def latents(self) -> list[Tensor]:
        """Return the latent weights."""
        return [p.detach() for p in self._parameters]

    def adopt(self, members: Sequence[int]) -> None:
        """Nothing to do: what was written to the parameters are latent weights."""

    def keep_values(self, members: Sequence[int], thresholds: Tensor) -> None:
        """Nothing to do: latent weights are what is edited."""

    def replaced(self, members: Sequence[int], thresholds: Tensor) -> list[int]:
        """Return all: whatever was written to them are latent weights, and none is lost by beginning anew."""
        return list(members)

    def sweep(self, part: int, members: Sequence[int], thresholds: Tensor) -> Sweep:
        """Return one optimizer's tensors, ready for the passes of a step; they are looked up anew where they moved."""
        where, known = self._where(members), self._sweeps.get(part)
        if known is None or known[0] != where:
            latents = [self._parameters[i].detach() for i in members]
            known = self._sweeps[part] = (where, Sweep(None, latents, self._exponent))
        return known[1]

    def forget(self) -> None:
        """Look everything up anew: parts are other tensors now."""
        self._sweeps = {}

    def show_latents(self, part: int) -> None:
        """Nothing to do: the parameters are the latent weights."""

    def hide_latents(self, part: int, members: Sequence[int]) -> bool:
        """Modules compute pruned weights; return whether the latent ones are still where they were looked up."""
        known = self._sweeps.get(part)
        return known is not None and known[0] == self._where(members)

    def _where(self, members: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        parameters = [self._parameters[i] for i in members]
        return [(p.data_ptr(), p.stride()) for p in parameters]

    def carry(self, part: int, members: Sequence[int], thresholds: Tensor) -> None:
        """Nothing to do: whatever moved the parameters moved the latent weights."""

    def pruned_at(self, members: Sequence[int], thresholds: Tensor) -> None:
        """Let modules prune at new thresholds."""
        torch._foreach_copy_([self._pruned[i].threshold for i in members], list(thresholds.unbind()))

    def land(self, i: int, value: Tensor) -> None:
        """Leave one parameter with its final weights."""
        self._parameters[i].detach().copy_(value)

    def end(self) -> None:
        """Remove the parametrizations and leave the model plain."""
        for handle in self._handles:
            handle.remove()
        for module in self._order:
            module.__class__ = _clone(type(module))  # removal deletes from the class, which copies of the model share
        for places in self._places:
            for module, attribute in places:
                parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
        for module, names in self._order.items():
            # Removal appends; optimizers rebuilt from a checkpoint count parameters in their first order.
            module._parameters.update({name: module._parameters.pop(name) for name in names})
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # one block of memory again where cuDNN wants it
        self._sweeps = {}


class ParametrizedPruner(Pruner):
    """Trains a model to a goal by pruning inside its forward pass; takes the same arguments as :class:`Pruner`.

    The parameters hold the latent weights and ``module.weight`` computes the pruned ones, so an optimizer may evaluate
    the model as often as it likes within a step (LBFGS) and other code may differentiate through the pruning. The price
    is what parametrizations cost: new names in the ``state_dict``, and work in every forward pass. Both mounts give the
    same numbers.

    :meth:`finish` removes the parametrizations and leaves a plain model.

    >>> import pareback as pb
    >>> model = torch.nn.Linear(100, 20)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> pruner = ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.9))
    >>> int(model.weight.count_nonzero()), int(model.parametrizations.weight.original.count_nonzero())
    (200, 2000)
    """

    _repeats_closures = True

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise InvalidValue(
                "DistributedDataParallel has attached to the parameters already, and parametrizing them would take "
                "their gradients out of its reduction. Give its .module before wrapping it, or use pb.Pruner."
            )
        super().__init__(model, *args, **kwargs)

    def _mounted(self, thresholds: Tensor) -> InForward:
        if any(is_sharded(p) for p in self.parameters):
            raise InvalidValue("Sharded parameters cannot be parametrized. Use pb.Pruner.")
        return InForward(self.model, self.parameters, thresholds, self._exponent, self._straight_through)


def _clone(kind: type) -> type:
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, members)


def _rename_plain(attribute: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a checkpoint that has the weight by its plain name be loaded as the latent one."""
    if prefix + attribute in state:
        state[f"{prefix}parametrizations.{attribute}.original"] = state.pop(prefix + attribute)


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return every module and attribute that holds a parameter, by its id: more than one where weights are tied."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, value in module._parameters.items():
            found.setdefault(id(value), []).append((module, attribute))
    return found


def _detach_flat_weights(module: nn.Module, *_: Any) -> None:
    """Let go of the graph, which would keep activations alive and cannot be copied."""
    module._flat_weights = [w.detach() for w in module._flat_weights]  # type: ignore[union-attr,assignment]


def _refresh_flat_weights(module: nn.Module, *_: Any) -> None:
    """Let a recurrent module see its pruned weights: it keeps a list of its own that attributes do not reach."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore[union-attr,assignment]
