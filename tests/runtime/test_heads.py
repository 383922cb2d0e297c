"""A small linear layer over the means of images is computed together with them."""

from __future__ import annotations

import pytest
import torch
from engine_toys import distance, kinds
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime.stages.images import ImageStage


class Classifier(nn.Module):
    """A convolution, means, and a linear layer over them; ``also_means`` returns those too."""

    def __init__(self, channels: int, classes: int, also_means: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.head = nn.Sequential(
            nn.Linear(channels, classes), *(nn.Linear(classes, classes) for _ in range(layers - 1))
        )
        self.also_means = also_means

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        means = torch.relu(self.conv(x)).mean((2, 3))
        return (self.head(means), means) if self.also_means else self.head(means)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("channels", "classes"), [(16, 10), (37, 1), (130, 101)])
def test_a_head_gives_the_models_results(channels: int, classes: int, threads: int) -> None:
    model = Classifier(channels, classes).eval()
    engine = compiled(model, torch.randn(1, 3, 9, 7), threads=threads)
    assert kinds(engine) == ["images"]
    assert engine.report().layers == 2
    for batch in (1, 2, 3, 5, 8, 16, 33):
        x = torch.randn(batch, 3, 9, 7)
        with torch.no_grad():
            truth = model.double()(x.double())
        model.float()
        assert distance(engine.run_sparse(x), truth) < 1e-5


def test_images_together_have_their_heads_too() -> None:
    model = Classifier(24, 5).eval()
    engine = compiled(model, torch.randn(1, 3, 6, 6), threads=1)
    (stage,) = engine.stages
    assert isinstance(stage, ImageStage)
    for images in (1, 2, 4, 8, 16):
        x, y = torch.randn(images, 3, 6, 6), torch.empty(images, 5)
        stage.whole.program(images, 1).run([x], [y], 0, 1)
        with torch.no_grad():
            assert distance(y, model(x)) < 1e-5


@pytest.mark.parametrize("model", [Classifier(16, 10, also_means=True), Classifier(16, 10, layers=2)])
def test_what_is_read_elsewhere_is_no_head(model: nn.Module) -> None:
    model.eval()
    x = torch.randn(3, 3, 8, 8)
    engine = compiled(model, x, threads=1)
    assert kinds(engine) == ["images", "rows"]
    with torch.no_grad():
        expected = model(x)
    for found, wanted in zip(
        *((y,) if isinstance(y, Tensor) else y for y in (engine.run_sparse(x), expected)), strict=True
    ):
        assert distance(found, wanted) < 1e-5


def test_a_large_layer_is_no_head() -> None:
    engine = compiled(Classifier(512, 512).eval(), torch.randn(1, 3, 4, 4), threads=1)
    assert kinds(engine) == ["images", "rows"]
