"""The digits that come with dependencies: how many, how split, how shifted."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from pareback.lab.data import builtin as digits
from pareback.lab.data.in_memory import InMemory

CPU = torch.device("cpu")


def images(source: InMemory, test: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """All images as the numbers they were before normalising, and their labels."""
    batches = source.test_batches(batch=10_000) if test else source.batches(0, batch=source.size, seed=0)
    x, y = next(batches)
    return (x * source.std[0] + source.mean[0]).round(), y


def test_small_digits_are_those_of_the_example() -> None:
    """The split of examples/digits.py, so that accuracies compare."""
    x, y = load_digits(return_X_y=True)
    _, test_x, train_y, test_y = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    source = digits.digits(CPU, augment=False)
    assert (
        (source.size, source.test_size, source.shape)
        == (len(train_y), len(test_y), (1, 8, 8))
        == (1347, 450, (1, 8, 8))
    )
    assert source.classes == tuple("0123456789")
    pixels, labels = images(source, test=True)
    assert labels.tolist() == test_y.tolist()
    assert torch.equal(pixels.flatten(1), torch.tensor(test_x, dtype=torch.float32))


@pytest.mark.slow
def test_mnist_is_split_into_400_and_100_of_each_digit() -> None:
    source = digits.mnist5000(CPU, augment=False)
    assert (source.size, source.test_size, source.shape) == (4000, 1000, (1, 28, 28))
    pixels, labels = images(source)
    assert torch.bincount(labels).tolist() == 10 * [400]
    assert torch.bincount(images(source, test=True)[1]).tolist() == 10 * [100]
    assert (pixels.min(), pixels.max()) == (0, 255)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pixels"), [("digits", 1), ("mnist5000", 2)])
def test_digits_are_shifted_a_little_and_never_mirrored(kind: str, pixels: int) -> None:
    """Every augmented image is one of the (2·pixels + 1)² shifts of the image that the same call gives without."""
    plain, _ = images(getattr(digits, kind)(CPU, augment=False))
    moved, _ = images(getattr(digits, kind)(CPU))
    side, places = plain.shape[-1], 2 * pixels + 1
    padded = torch.nn.functional.pad(plain, [pixels] * 4)
    shifts = [padded[:, :, t : t + side, s : s + side] for t in range(places) for s in range(places)]
    is_shift = torch.stack([(moved == shift).flatten(1).all(1) for shift in shifts])
    assert is_shift.any(0).all()
    assert is_shift.any(1).all()
