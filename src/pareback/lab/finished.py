"""The network of a finished run, as other programs and other runs use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from .models import build
from .pretrained import load_weights_, read_weights
from .run_folder import recipe_of, result_of


def network_of(run: Path) -> nn.Module:
    """Return a run's network with the weights it ended with."""
    result = result_of(run)
    # What it began with is overwritten, and may not be there any more.
    model = build(replace(recipe_of(run).model, pretrained=None), result["classes"], tuple(result["shape"]))
    load_weights_(model, read_weights(run), result["classes"], str(run))
    return model
