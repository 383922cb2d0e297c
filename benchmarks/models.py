"""The models that are timed: a factory from a device to the model, a batch and its labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from pareback.lab.models.wrn import WideResNet


class Encoder(nn.Module):
    """A 12-layer, 768-wide transformer encoder that classifies a sequence."""

    def __init__(self, layers: int = 12, width: int = 768, classes: int = 100) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def _images(batch: int, size: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, size, size, device=device)
    return x.contiguous(memory_format=torch.channels_last), torch.randint(0, classes, (batch,), device=device)


def _tokens(batch: int, length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, width, device=device), torch.randint(0, 100, (batch,), device=device)


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, Tensor, Tensor]]] = {
    "wrn-16-2": lambda device: (WideResNet(16, 2), *_images(64, 32, 100, device)),
    "wrn-16-8": lambda device: (WideResNet(16, 8), *_images(128, 32, 100, device)),
    "resnet-50": lambda device: (resnet50(), *_images(256, 224, 1000, device)),
    "encoder": lambda device: (Encoder(), *_tokens(64, 512, 768, device)),
    "tiny-encoder": lambda device: (Encoder(2, 128), *_tokens(4, 16, 128, device)),
}
