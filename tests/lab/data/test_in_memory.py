"""Batches of a set in memory: normalised, reproducible, and the same however many processes share them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_images import DEVICES, arrays, in_memory, joined

from pareback.lab.data import in_memory as module
from pareback.lab.data.augment import Shift
from pareback.lab.data.in_memory import InMemory, channel_statistics


def test_statistics_are_numpys() -> None:
    images = arrays()["train_x"]
    mean, std = channel_statistics(torch.from_numpy(images))
    np.testing.assert_allclose(mean, images.mean((0, 1, 2), dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(std, images.std((0, 1, 2), dtype=np.float64), rtol=1e-12)


def test_it_says_what_it_holds() -> None:
    held = in_memory()
    assert (held.size, held.test_size, held.shape) == (20, 7, (3, 8, 8))
    assert held.classes == ("class 0", "class 1", "class 2", "class 3")


@pytest.mark.parametrize("device", DEVICES)
def test_without_augmentation_every_image_comes_once_normalised(device: str) -> None:
    held, content = in_memory(Shift(), device), arrays()
    x, y = joined(held.batches(0, batch=4, seed=0))
    assert (x.dtype, y.dtype, x.device.type) == (torch.float32, torch.int64, device)
    pixels = torch.from_numpy(content["train_x"]).permute(0, 3, 1, 2)
    found = (x.cpu().double() * torch.tensor(held.std).view(3, 1, 1) + torch.tensor(held.mean).view(3, 1, 1)).round()
    numbers = [int((pixels == image.byte()).flatten(1).all(1).nonzero()) for image in found]
    assert sorted(numbers) == list(range(20))
    assert numbers != list(range(20))
    assert y.tolist() == content["train_y"][numbers].tolist()


def test_the_whole_set_has_mean_zero_and_deviation_one() -> None:
    x, _ = joined(in_memory(Shift()).batches(0, batch=20, seed=0))
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_test_images_come_in_order_and_as_they_are() -> None:
    held, content = in_memory(), arrays()
    x, y = joined(held.test_batches(batch=3))
    expected = (torch.from_numpy(content["test_x"]).permute(0, 3, 1, 2) - torch.tensor(held.mean).view(3, 1, 1)) / (
        torch.tensor(held.std).view(3, 1, 1)
    )
    torch.testing.assert_close(x, expected.float())
    assert y.tolist() == content["test_y"].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_call_gives_the_same_bits(device: str) -> None:
    held = in_memory(device=device)
    first, second = (joined(held.batches(3, batch=4, seed=5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_epochs_and_seeds_differ() -> None:
    held = in_memory()
    labels = {tuple(joined(held.batches(e, batch=4, seed=s))[1].tolist()) for s in range(3) for e in range(3)}
    assert len(labels) == 9


def test_working_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at a time or all at once, with a last piece that is shorter."""
    held = in_memory()
    whole = list(held.batches(0, batch=3, seed=0))
    for batches_at_once in (1, 4):
        monkeypatch.setattr(module, "CHUNK", batches_at_once * 3 * math.prod(held.shape))
        pieces = list(held.batches(0, batch=3, seed=0))
        assert all(torch.equal(a, b) for w, p in zip(whole, pieces, strict=True) for a, b in zip(w, p, strict=True))


def test_a_wrong_batch_is_refused_before_the_first_is_drawn() -> None:
    held = in_memory()
    with pytest.raises(ValueError, match="A batch of 21 images cannot be drawn from 20 training images"):
        held.batches(0, batch=21, seed=0)
    with pytest.raises(ValueError, match="A batch of 5 images cannot be shared evenly by 2 processes"):
        held.batches(0, batch=5, seed=0, world=2)
    with pytest.raises(ValueError, match="A batch of 0 images is not possible"):
        held.test_batches(batch=0)


# -- held out --------------------------------------------------------------------------------------------------------


def test_held_out_images_take_the_place_of_the_test_images() -> None:
    """A quarter of the twenty; no image is on both sides, and those of the test are nowhere."""
    content = arrays()
    images_and_labels = [torch.from_numpy(content[key]) for key in ("train_x", "train_y", "test_x", "test_y")]
    classes = content["classes"].tolist()
    whole = InMemory(*images_and_labels, classes=classes)
    held = InMemory(*images_and_labels, classes=classes, val_share=0.25)
    assert (held.size, held.test_size) == (15, 5)
    assert held.fingerprint != whole.fingerprint

    def pixels(source: InMemory, batches: object) -> set[bytes]:
        x, _ = joined(batches)
        scaled = x * torch.tensor(source.std).view(3, 1, 1) + torch.tensor(source.mean).view(3, 1, 1)
        return {image.numpy().tobytes() for image in scaled.round().byte()}

    trained, tested = pixels(held, held.batches(0, batch=5, seed=0)), pixels(held, held.test_batches(batch=5))
    assert (len(trained), len(tested)) == (15, 5)
    assert trained | tested == {image.numpy().tobytes() for image in images_and_labels[0].permute(0, 3, 1, 2)}
    again = InMemory(*images_and_labels, classes=classes, val_share=0.25)
    assert again.fingerprint == held.fingerprint


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_nothing_on_one_side_is_refused(share: float) -> None:
    content = arrays()
    images_and_labels = [torch.from_numpy(content[key]) for key in ("train_x", "train_y", "test_x", "test_y")]
    with pytest.raises(ValueError, match=r"data\.val_share=.* of 20 training images"):
        InMemory(*images_and_labels, classes=content["classes"].tolist(), val_share=share)
