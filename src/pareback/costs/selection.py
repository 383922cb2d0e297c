"""Which tensors are pruned: by default every trainable floating matrix or kernel of at least ``min_size`` weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import InvalidType, InvalidValue
from ..messages import did_you_mean, listed

MIN_SIZE = 1000

#: Parts of a parameter's name that only say how the model is wrapped, not what the tensor is.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Selected:
    """A parameter to be pruned, under the name it has in the unwrapped model."""

    name: str
    parameter: nn.Parameter


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map parameter names to parameters, ties once, without the prefixes of torch.compile, DDP and Fabric.

    The names stay the same when a model is wrapped, so patterns and checkpoints keep fitting.

    >>> list(plain_names(nn.Sequential(nn.Linear(2, 1))))
    ['0.weight', '0.bias']
    """
    seen: dict[int, str] = {}
    return {name: p for name, p in _all_names(model) if seen.setdefault(id(p), name) == name}


def plain_name(name: str) -> str:
    """Return a tensor's name as it is where no part of the model is wrapped.

    >>> plain_name("head._orig_mod.weight")
    'head.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile, DDP or DataParallel has been put around.

    >>> model = nn.Linear(2, 1)
    >>> unwrapped_model(nn.DataParallel(model)) is model
    True
    """
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def _all_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    wrapped = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while type(model).__name__ == "_FabricModule":  # of Lightning's Fabric, which has everything in it twice
        model = model._original_module  # type: ignore[assignment]
    outer = isinstance(getattr(model, "_orig_mod", model), wrapped)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        yield plain.partition(".")[2] if outer else plain, parameter


def select(
    model: nn.Module,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_size: int = MIN_SIZE,
) -> list[Selected]:
    """Return the parameters to prune, in model order.

    ``include`` and ``exclude`` hold fnmatch patterns on parameter names. Patterns in ``include`` choose parameters
    whatever their size or shape; ``exclude`` has the last word.

    >>> model = nn.Sequential(nn.Linear(100, 20), nn.Linear(20, 2))
    >>> [s.name for s in select(model)]
    ['0.weight']
    >>> [s.name for s in select(model, include="*.weight")]
    ['0.weight', '1.weight']
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(min_size, bool) or not isinstance(min_size, int):
        raise InvalidType(f"min_size={min_size!r} must be a whole number of elements, such as {MIN_SIZE}.")
    parameters = plain_names(model)
    lazy = [name for name, p in parameters.items() if nn.parameter.is_lazy(p)]
    if lazy:
        raise InvalidValue(f"{listed(lazy)} has no shape yet. Run the model once on a batch before pruning it.")
    aliases = _aliases(model, parameters)
    wanted = _matches("include", include, aliases)
    unwanted = _matches("exclude", exclude, aliases) or set()
    if wanted is None:
        scales = _scales(model)
        wanted = {name for name, p in parameters.items() if _by_default(p, min_size) and id(p) not in scales}
    else:
        for name in wanted - unwanted:
            _check_prunable(name, parameters[name])
    wanted = wanted - unwanted
    chosen = [Selected(name, p) for name, p in parameters.items() if name in wanted]
    if not chosen:
        raise InvalidValue(
            "No parameter is left to prune. By default trainable tensors of two or more dimensions and at least "
            f"min_size={min_size} elements are chosen; lower min_size, or name tensors with include=['*.weight']."
        )
    return chosen


def matching(model: nn.Module, option: str, patterns: str | Iterable[str] | None) -> set[str]:
    """Return the names that patterns choose, whatever the parameters are."""
    return _matches(option, patterns, _aliases(model, plain_names(model))) or set()


def _aliases(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Map every name a parameter goes by, of which tied ones have several, to the one in ``parameters``."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    return {name: first[id(parameter)] for name, parameter in _all_names(model)}


def _matches(option: str, patterns: str | Iterable[str] | None, names: dict[str, str]) -> set[str] | None:
    if patterns is None:
        return None
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {first for name, first in names.items() if fnmatchcase(name, pattern)}
        if not hits:
            within = any(name.startswith(f"{pattern}.") for name in names)
            near = f" Write {f'{pattern}.*'!r} for all within." if within else did_you_mean(pattern, names)
            hint = near or f" The model's parameters are {listed(names)}."
            raise InvalidValue(f"{option}={pattern!r} matches no parameter.{hint}")
        found |= hits
    return found


def _by_default(parameter: nn.Parameter, min_size: int) -> bool:
    return (
        parameter.requires_grad
        and parameter.is_floating_point()
        and parameter.ndim >= 2
        and parameter.numel() >= max(min_size, 1)
    )


def _check_prunable(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_floating_point():
        raise InvalidType(
            f"{name!r} has dtype {parameter.dtype}; only real floating tensors can be pruned. "
            f"Leave it out with exclude=[{name!r}]."
        )
    if not parameter.requires_grad:
        raise InvalidValue(
            f"{name!r} is frozen (requires_grad=False) and would never be trained at its new sparsity. "
            f"Unfreeze it, or leave it out with exclude=[{name!r}]."
        )
    if parameter.numel() == 0:
        raise InvalidValue(f"{name!r} has no elements. Leave it out with exclude=[{name!r}].")


def check_finite(selected: Iterable[Selected]) -> None:
    """Raise ValueError naming the first tensor that holds NaN or infinity."""
    for s in selected:
        # Counted, and the counts of shards summed: of all(), torch 2.8 tells each process about its own shard alone.
        finite = torch.isfinite(s.parameter.detach()).sum()
        finite = finite.full_tensor() if hasattr(finite, "full_tensor") else finite
        if int(finite) != s.parameter.numel():
            raise InvalidValue(
                f"{s.name!r} contains NaN or infinity. Initialise or load finite weights before pruning them."
            )


def check_zeros_stay(model: nn.Module, selected: Iterable[Selected]) -> None:
    """Refuse tensors behind a parametrization of the user's that turns their zeros into other numbers.

    The parameter would be sparse, and the weight that the layer computes with dense: so under an orthogonal
    parametrization, or one that adds something. weight_norm, spectral_norm and masks keep zeros.
    """
    names = {id(s.parameter): s.name for s in selected}
    for chain in _parametrizations(model):
        for attribute, original in chain.named_parameters(recurse=False):
            if id(original) in names and not hasattr(original, "full_tensor") and not _keeps_zeros(chain, attribute):
                name, what = names[id(original)], ", ".join(type(one).__name__ for one in chain)
                raise InvalidValue(
                    f"{name!r} is behind a parametrization ({what}) that does not keep its zeros: the layer's weight "
                    f"would stay dense. Leave it out with exclude=[{name!r}], or remove the parametrization first with "
                    "torch.nn.utils.parametrize.remove_parametrizations."
                )


def _parametrizations(model: nn.Module) -> Iterator[ParametrizationList]:
    return (module for module in model.modules() if isinstance(module, ParametrizationList))


@torch.no_grad()
def _keeps_zeros(chain: ParametrizationList, attribute: str) -> bool:
    """Whether zeros in one of a parametrization's tensors are zeros of the weight, tried with half of them by chance.

    What else it trains is moved a little for the trial: adapters and gates often begin at zero, and do nothing there.
    """
    state = {name: t.detach().clone() for name, t in [*chain.named_parameters(), *chain.named_buffers()]}
    probe, draw = state[attribute], torch.Generator().manual_seed(0)
    gone = (torch.rand(probe.shape, generator=draw) < 0.5).to(probe.device)
    for name, parameter in chain.named_parameters():
        if name != attribute and parameter.is_floating_point():
            state[name] += torch.rand(parameter.shape, generator=draw).to(parameter) * 0.1
    state[attribute] = probe.masked_fill(gone, 0.0)
    try:
        weight = torch.func.functional_call(chain, state, ())
    except RuntimeError:  # an inverse of what has become singular, say
        return False
    return weight.shape == gone.shape and not bool(weight[gone].nan_to_num().count_nonzero())


@torch.no_grad()
def _scales(model: nn.Module) -> set[int]:
    """Return the ids of what a parametrization has beside a weight, such as weight_norm's length of each row."""
    chains = [chain for chain in _parametrizations(model) if not chain.is_tensor]
    return {id(p) for chain in chains for p in chain.parameters(recurse=False) if p.shape != chain().shape}
