"""A pruner's saved state: what is in it, how it is checked and taken over, and how older versions are read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..goals.goal import Goal
from ..kernels import Moments, shrunk
from ..messages import listed
from ..sharding import like, local, shard_here, whole
from ..thresholds.masks import MaskRule
from .step import Step

#: 1: until 0.1, some fields of the control later than others. 2: all of them, and the rule's own. 3: what is pending
#: always has its tensors, of whole weights, so that a distributed checkpoint finds the same keys in every state.
VERSION = 3

#: The parts of a state that are sharded as the model is.
_SHARDED = frozenset(("latents", "masks"))

#: What a state of version 1 may lack, and what it stands for then.
_LATER = {"drift": 0.0, "missed": 0.0, "damping": 1.0}


def state_of(step: Step, goal: Goal, latents: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a resumed run needs."""
    rule, control = step.controller.rule, step.controller.state.tensors()
    if not int(control["step"]):
        # A state that was never trained is what a distributed checkpoint is loaded into, in place: it gets memory of
        # its own, so that load_state_dict still sees which weights this pruner wrote.
        latents = {name: like(local(latent).clone(), latent) for name, latent in latents.items()}
        control = {name: value.clone() for name, value in control.items()}
    state = {
        "version": VERSION,
        "goal": repr(goal),
        "names": list(step.names),
        "control": control,
        "pending": _pending(step)._asdict(),
        "latents": dict(latents),
    }
    if isinstance(rule, MaskRule):
        pairs = zip(step.names, step.parameters, rule.masks, strict=True)
        state["rule"] = rule.state(step.controller.state.step)
        state["masks"] = {name: like(mask, parameter) for name, parameter, mask in pairs}
    return state


def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with all shards of its tensors, for those who save that of one process; every rank has to ask."""
    return {**state, **{part: {name: whole(t) for name, t in state[part].items()} for part in _SHARDED & state.keys()}}


def _pending(step: Step) -> Moments:
    """Return what optimizers that have stepped since the thresholds moved will contribute to their next move.

    A single optimizer measures everything anew in its next step, and nothing is pending: zeros stand for that.
    """
    moments, none = step.moments, torch.zeros_like(step.controller.state.r, dtype=torch.float64)
    if moments is None or len(step.groups.optimizers) == 1:
        return Moments(none, none.clone(), none.clone())
    counts = torch.zeros_like(step.controller.state.nonzero)
    whole, _, _ = step.shards.combine(moments, counts, counts)
    return Moments(*(value.to(torch.float64, copy=True) for value in whole))


def _loaded_pending(step: Step, pending: Mapping[str, Tensor] | None) -> Moments | None:
    if not pending or not bool(pending["peak"].any()):
        return None
    device = step.controller.state.r.device
    return step.shards.share_out(Moments(**{key: value.to(device, torch.float64) for key, value in pending.items()}))


def load_into(step: Step, goal: Goal, state: Mapping[str, Any]) -> None:
    """Take over a state that was checked."""
    controller, rule = step.controller, step.controller.rule
    control = control_of(state, controller.state.tensors())
    if state.get("latents") == {}:
        raise InvalidValue("The state was saved after finish() and has no latent weights to go on from.")
    parameters = dict(zip(step.names, step.parameters, strict=True))
    check_entries("latents", parameters, state.get("latents"))
    if isinstance(rule, MaskRule):
        _check_masks(parameters, goal, state)
    if state.get("goal", repr(goal)) != repr(goal):  # on purpose, perhaps: to prune a pruned model further
        warnings.warn(f"The state was saved on the way to {state['goal']}; it goes on to {goal!r}.", stacklevel=3)
    with torch.no_grad():
        state = _shards_here(step, state)
        ours = _written_by_us(step, state["latents"])
        for name, value in controller.state.tensors().items():
            value.copy_(control[name])
        for name, latent in zip(step.names, step.mount.latents(), strict=True):
            latent.copy_(state["latents"][name])
        step.moments = _loaded_pending(step, state.get("pending"))
        if isinstance(rule, MaskRule):
            rule.load(state["rule"], [state["masks"][name] for name in step.names])
        step.recount_here()
        _show_loaded(step, ours)


def _check_masks(parameters: Mapping[str, Tensor], goal: Goal, state: Mapping[str, Any]) -> None:
    """Refuse a state without masks; that of a goal of thresholds has none, and is complete without them."""
    if "masks" not in state and state.get("goal", repr(goal)) != repr(goal):
        raise InvalidValue(
            f"The state was saved on the way to {state['goal']}, which keeps no masks, and {goal!r} cannot go on "
            "without. Begin anew from the model's weights, without loading this state, or build the pruner with the "
            "goal of the state."
        )
    check_entries("masks", parameters, state.get("masks"))


def _shards_here(step: Step, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with this process's shards of its tensors. Where one process lacks its own, all refuse."""
    parameters = dict(zip(step.names, step.parameters, strict=True))
    found = {
        part: {name: shard_here(state[part][name], parameter) for name, parameter in parameters.items()}
        for part in _SHARDED & state.keys()
    }
    lacking = any(shard is None for shards in found.values() for shard in shards.values())
    if step.shards.anywhere(lacking, step.controller.state.r.device):
        raise InvalidValue(
            "The state holds the shards of another process, or of another number of them: it was saved by one process "
            "of a sharded training. Save and load it with pareback.integrations.dcp, which every process calls."
        )
    return {**state, **found}


def _written_by_us(step: Step, loaded: Mapping[str, Tensor]) -> list[bool]:
    """Return which weights are what this pruner wrote: those say nothing of a model that is to be loaded.

    Where a state was loaded in place, over the latent weights themselves, nobody can tell any more: it is believed.
    """
    if not step.mount.holds_pruned:
        return []
    latents = zip(step.names, step.mount.latents(), strict=True)
    if any(latent.numel() and loaded[name].data_ptr() == latent.data_ptr() for name, latent in latents):
        return [True] * len(step.names)
    written = shrunk(step.mount.latents(), step.controller.state.threshold, step.exponent)
    return [torch.equal(local(p.detach()), old) for p, old in zip(step.parameters, written, strict=True)]


def _show_loaded(step: Step, ours: Sequence[bool]) -> None:
    """Prune at the thresholds that were loaded, where nobody has loaded other weights."""
    thresholds = step.controller.state.threshold
    step.mount.pruned_at(range(len(step.names)), thresholds)
    if any(ours):
        loaded = shrunk(step.mount.latents(), thresholds, step.exponent)
        for parameter, value, own in zip(step.parameters, loaded, ours, strict=True):
            if own:
                local(parameter.detach()).copy_(value)


def checked(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a state in the present version, or say why it cannot be loaded."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version not in range(1, VERSION + 1):
        raise InvalidValue(
            f"The state has version {version!r}; this release reads versions 1 to {VERSION}. Give what "
            "pruner.state_dict() returned, or update pareback if a later one saved it."
        )
    if list(state["names"]) != list(names):
        raise InvalidValue(
            f"The state was saved for {listed(state['names'])}, this pruner prunes {listed(names)}. Choose the same "
            "tensors with include=, exclude= and min_size=."
        )
    return dict(state)


def control_of(state: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the controller's tensors, those that an older version lacks as they were meant."""
    found = state.get("control")
    if state["version"] == 1 and isinstance(found, Mapping):
        later = {name: torch.full_like(wanted[name], value) for name, value in _LATER.items() if name not in found}
        found = {**found, **later}
    check_entries("control", wanted, found)
    return dict(found)  # type: ignore[arg-type]


def check_entries(part: str, wanted: Mapping[str, Tensor], found: Any) -> None:
    """Raise unless every wanted tensor is there in its shape: copying would broadcast."""
    if not isinstance(found, Mapping):
        raise InvalidValue(f"The state has no {part!r}. Give what pruner.state_dict() returned.")
    for name, value in wanted.items():
        if name not in found:
            raise InvalidValue(f"The state has no {name!r} among its {part}. Give what pruner.state_dict() returned.")
        if found[name].shape != value.shape:
            raise InvalidValue(
                f"{name!r} among the {part} of the state has shape {tuple(found[name].shape)}, here it has "
                f"{tuple(value.shape)}. Build the same model and pruner that were saved."
            )
