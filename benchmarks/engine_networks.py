"""Networks that neither torchvision nor timm has, for engine_models.py and the processes that run them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Twice(nn.Sequential):
    """Two convolutions with norms, as U-Net has them at every level."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for before in (inputs, outputs):
            layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Four levels down by max pooling and up by bilinear or nearest interpolation, with what was there put beside."""

    def __init__(self, mode: str, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        self.mode = mode
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _Twice(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            _Twice(above + below, above) for above, below in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            beside.append(x)
        for block, there in zip(self.up, beside[-2::-1], strict=True):
            corners = None if self.mode == "nearest" else False
            x = block(torch.cat([there, F.interpolate(x, scale_factor=2, mode=self.mode, align_corners=corners)], 1))
        found: Tensor = self.head(x)
        return found


class GptBlock(nn.Module):
    """A causal transformer block with the approximation of GELU by tanh."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fall(F.gelu(self.rise(self.between(x)), approximate="tanh"))
