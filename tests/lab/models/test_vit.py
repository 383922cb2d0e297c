"""The small vision transformer: its size, its shapes, and images it cannot read."""

from __future__ import annotations

import pytest
import torch

from pareback.lab.models.build import build
from pareback.lab.models.vit import VisionTransformer
from pareback.lab.recipe.schema import ModelRecipe


def test_it_is_a_vit_tiny() -> None:
    """Twelve layers of 12·192² weights, and positions for 64 patches of a CIFAR image."""
    with torch.device("meta"):
        model = build(ModelRecipe("vit-tiny"), 100, (3, 32, 32))
    weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2)
    assert weights == 12 * 12 * 192**2
    assert dict(model.named_parameters())["position"].shape == (1, 64, 192)


def test_every_patch_is_seen_and_every_weight_has_a_gradient() -> None:
    model = VisionTransformer(5, (1, 8, 12), width=24, depth=2)
    x = torch.randn(2, 1, 8, 12, requires_grad=True)
    model(x).square().sum().backward()
    assert bool((x.grad != 0).flatten(2).any(2).all())
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match="patches of 4×4 pixels, and 30×32 is no multiple"):
        VisionTransformer(5, (3, 30, 32))
