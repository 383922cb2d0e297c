"""The network of a finished run, as other programs and other runs use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from .models import build
from .pretrained import load_weights_, read_weights
from .run_folder import made_for, recipe_of


def network_of(run: Path) -> nn.Module:
    """Return a run's network with the weights it ended with."""
    classes, shape = made_for(run)
    # What it began with is overwritten, and may not be there any more.
    model = build(replace(recipe_of(run).model, pretrained=None), classes, shape)
    load_weights_(model, read_weights(run), classes, str(run))
    return model
