"""torch's distributed checkpoints: saved by any number of processes and loaded by any other, sharded or not.

>>> import tempfile, torch, pareback as pb
>>> from pareback.integrations import dcp
>>> model = torch.nn.Linear(100, 20)
>>> optimizer = torch.optim.AdamW(model.parameters())
>>> pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=50)
>>> with tempfile.TemporaryDirectory() as folder:
...     dcp.save(folder, model, optimizer, pruner)
...     dcp.load(folder, model, optimizer, pruner)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import InvalidUse, InvalidValue, MissingFile
from ..messages import listed, place
from ..pruning.hooks import unwrapped
from ..pruning.pruner import Pruner

_OWN = ("model", "optimizer", "pruner")


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    pruner: Pruner,
    **others: Any,
) -> None:
    """Save a training to ``folder``; every process calls it.

    ``others`` are further things with ``state_dict()`` and ``load_state_dict()``, such as ``scheduler=scheduler``.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    _check(pruner, others)
    state = _state(model, optimizer, pruner, others)
    with _quiet_alone() as alone:
        save_state(state, checkpoint_id=folder, no_dist=alone)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    pruner: Pruner,
    **others: Any,
) -> None:
    """Load what :func:`save` saved, whatever the number of processes was; every process calls it.

    First the model and its optimizers, then the pruner, which brings the latent weights and shows them pruned.
    """
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    _check(pruner, others)
    saved = _keys(folder)
    state = _state(model, optimizer, pruner, others)
    if not any(key.startswith("pruner.pending.") for key in saved):  # of an earlier release, where it could be empty
        state["pruner"].pop("pending")
    _check_saved(Path(folder), saved, state)
    with _quiet_alone() as alone:
        load_state(state, checkpoint_id=folder, no_dist=alone)
    set_state_dict(model, _inner(optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pruner.load_state_dict(state["pruner"])
    for name, one in others.items():
        one.load_state_dict(state[name])


def _state(model: nn.Module, optimizer: Any, pruner: Pruner, others: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, _inner(optimizer))
    own = dict(zip(_OWN, (weights, moments, pruner.state_dict()), strict=True))
    return {**own, **{name: one.state_dict() for name, one in others.items()}}


def _inner(optimizer: Any) -> list[Optimizer]:
    optimizer = unwrapped(optimizer)
    return [optimizer] if isinstance(optimizer, Optimizer) else [unwrapped(one) for one in optimizer]


@contextmanager
def _quiet_alone() -> Iterator[bool]:
    """Give whether this is the only process; torch warns of that, although it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield not (dist.is_available() and dist.is_initialized())


def _check(pruner: Pruner, others: dict[str, Any]) -> None:
    if pruner.finished:
        raise InvalidUse(
            "The pruner has finished, and there is no training to resume. Save the model alone, with pb.save or with "
            "torch.distributed.checkpoint.save."
        )
    for name, one in others.items():
        if name in _OWN or not hasattr(one, "load_state_dict"):
            raise InvalidValue(
                f"{name}={one!r} cannot be saved beside the training. Give things with state_dict() and "
                f"load_state_dict(), under other names than {listed(_OWN)}."
            )


def _keys(folder: str | os.PathLike[str]) -> set[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (Path(folder) / ".metadata").is_file():
        raise MissingFile(f"There is no distributed checkpoint in {place(Path(folder))}. Give the folder it is in.")
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _check_saved(folder: Path, saved: set[str], state: dict[str, Any]) -> None:
    """Say what a checkpoint lacks before anything is loaded."""
    for part in state:
        if not any(key.startswith(f"{part}.") for key in saved):
            raise InvalidValue(
                f"The checkpoint in {folder} has no {part!r}. Give a folder that "
                "pareback.integrations.dcp.save wrote, with the same things."
            )
    names = {key.removeprefix("pruner.latents.") for key in saved if key.startswith("pruner.latents.")}
    differ = sorted(names ^ set(state["pruner"]["latents"]))
    if differ:
        raise InvalidValue(
            f"The checkpoint in {folder} prunes other tensors than this pruner: {listed(differ)}. Choose the same "
            "ones with include=, exclude= and min_size=."
        )
