"""A finished run's network, and its weights in the form another program wants."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..artifact import export
from ..errors import InvalidValue
from ..lab.models.build import rebuilt
from ..lab.models.pretrained import load_weights_, read_weights
from .folder import class_names, is_own_file, made_for, recipe_of
from .trust import admit


def network_of(run: Path, *, trust: bool = False, known: str = "") -> nn.Module:
    """Return a run's network with the weights it ended with.

    Code that it names is imported under the conditions of :func:`pareback.runs.trust.admit`.
    """
    classes, shape = made_for(run)
    recipe = recipe_of(run).model
    admit(run, recipe.name, trust, known)
    model = rebuilt(recipe, classes, shape)
    load_weights_(model, read_weights(run), classes, str(run))
    return model


SUFFIXES = {"pare": ".pare", "safetensors": ".safetensors", "onnx": ".onnx"}


def export_path(source: Path, form: str, out: Path | None, values: str | None, trust: bool = False) -> Path:
    """Write ``source`` in a form, beside it unless ``out`` says otherwise, and return where.

    ``trust`` lets the code be imported that a run names, which ONNX needs.
    """
    if form not in SUFFIXES:
        raise InvalidValue(f"There is no format {form!r}. Write one of: {', '.join(SUFFIXES)}.")
    if values not in (None, "float16", "bfloat16"):
        raise InvalidValue(f"Values cannot be kept as {values!r}. Write float16 or bfloat16.")
    target = out or _beside(source, SUFFIXES[form])
    if target.exists() and target.resolve() == source.resolve():
        raise InvalidValue(f"{str(source)!r} would be written over itself. Give another file with --out.")
    if is_own_file(target.resolve()):
        raise InvalidValue(f"{str(target)!r} belongs to the run in that folder. Give another file with --out.")
    if form == "onnx":
        model, example = _network(source, trust)
        export(source, target, "onnx", model=model, example_inputs=example)
    else:
        export(source, target, form, values=values, classes=class_names(source))  # type: ignore[arg-type]
    return target


def _beside(source: Path, suffix: str) -> Path:
    """Return a name beside the source that is no file of a run.

    >>> _beside(Path("weights.pt"), ".safetensors").name
    'weights.safetensors'
    """
    target = source / f"model{suffix}" if source.is_dir() else source.with_suffix(suffix)
    return target.with_name(f"exported{suffix}") if is_own_file(target.resolve()) else target


def _network(source: Path, trust: bool) -> tuple[nn.Module, torch.Tensor]:
    """Return the network of a run, which a file of weights alone does not say."""
    if not source.is_dir():
        raise InvalidValue(f"ONNX needs the network, and {str(source)!r} holds weights alone. Give a run's folder.")
    return network_of(source, trust=trust), torch.zeros(2, *made_for(source)[1])
