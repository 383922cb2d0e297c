"""What the tests of the engine share: pruned networks, distances to float64, and engines of one captured model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pareback.runtime import Engine
from pareback.runtime import compile as compiled


def pruned(model: nn.Module, density: float = 0.2, gain: float = 1.0) -> nn.Module:
    """Zero most weights, scale the others, and give norms something to do."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(torch.rand_like(p) < density).mul_(gain)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm) and module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


def errors(found: Tensor, model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return the relative distance to the model in float64, and PyTorch's own."""
    with torch.no_grad():
        own = model(x)
        truth = model.double()(x.double())
    model.float()
    return distance(found, truth), distance(own, truth)


def error(found: Tensor, model: nn.Module, x: Tensor) -> float:
    """Return the relative distance to the model in float64."""
    return errors(found, model, x)[0]


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def kinds(engine: Engine) -> list[str]:
    """Return the kinds of an engine's stages, without those that only compute sizes."""
    sizes = torch.ops.aten.sym_size.int
    return [one.kind for one in engine.stages if any(getattr(o, "target", None) != sizes for o in one.chain.operations)]


def engines(model: nn.Module, example: Tensor) -> tuple[Engine, Engine]:
    """Return the engine that ``pb.compile`` gives for one thread, and what it gives for two.

    To capture a model takes longest, and is the same for both.
    """
    one = compiled(model, example, threads=1)
    two = one.with_threads(2)
    two(example)
    return one, two


class Residual(nn.Module):
    """A pre-activation block beside a shortcut, as wide residual networks have it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride=stride, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return y + self.shortcut(x)


class Small(nn.Module):
    """Stem with pooling, two blocks, a mean and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(8, 16, 1), Residual(16, 24, 2))
        self.head = nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.blocks(self.pool(self.stem(x)))).mean((2, 3)))
