"""A small vision transformer for images of 32×32 pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InvalidValue


class EncoderLayer(nn.Module):
    """Self-attention and two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        out: Tensor = self.out(seen)
        return out


class VisionTransformer(nn.Module):
    """ViT-Tiny with patches of 4×4: twelve layers of width 192 with three heads, and the mean of all tokens.

    >>> sum(p.numel() for p in VisionTransformer(100, (3, 32, 32)).parameters())
    5379748
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        patch: int = 4,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        if height % patch or breadth % patch:
            raise InvalidValue(
                f"vit-tiny cuts images into patches of {patch}×{patch} pixels, and {height}×{breadth} is no multiple. "
                "Write model.name=conv, or a timm/NAME."
            )
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(1, (height // patch) * (breadth // patch), width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._begin()

    def _begin(self) -> None:
        """Small normal weights and no biases, as such networks usually begin."""
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        out: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return out
