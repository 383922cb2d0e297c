"""Pruned weights from latent ones: what a checkpoint need not hold twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels import shrunk


def pruned_weights(
    derived: Mapping[str, Any], pruner: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return the weights that a checkpoint leaves out, by name.

    ``derived`` says of each name which latent weight it follows from, and by which exponent; ``pruner`` is the pruner's
    state. They are worked out on ``device``, or where the latent weights are.

    >>> latents, threshold = {"w": torch.tensor([0.5, -2.0])}, torch.tensor([1.0])
    >>> state = {"names": ["w"], "latents": latents, "control": {"threshold": threshold}}
    >>> pruned_weights({"names": {"w": "w"}, "exponent": float("inf")}, state)
    {'w': tensor([ 0., -2.])}
    """
    latents = [pruner["latents"][name] for name in pruner["names"]]
    thresholds = pruner["control"]["threshold"]
    if device is not None:
        latents, thresholds = [latent.to(device) for latent in latents], thresholds.to(device)
    with torch.no_grad():
        values = dict(zip(pruner["names"], shrunk(latents, thresholds, derived["exponent"]), strict=True))
    return {name: values[home] for name, home in derived["names"].items()}
