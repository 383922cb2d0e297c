"""CIFAR through torchvision, on files of its format with few images in them."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from pareback.lab.data.builtin import cifar

CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)


def write(path: Path, content: dict[str, object]) -> list[str]:
    """Pickle as CIFAR's authors did, and return the name and checksum that torchvision looks for."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / CIFAR100.base_folder
    labels = [0, 2, 1, 1, 0]
    files = {
        part: write(folder / part, {"data": PIXELS.reshape(5, -1), "fine_labels": labels}) for part in ("train", "test")
    }
    meta = write(folder / "meta", {"fine_label_names": ["apple", "bee", "cup"]})
    monkeypatch.setattr(CIFAR100, "train_list", [files["train"]])
    monkeypatch.setattr(CIFAR100, "test_list", [files["test"]])
    monkeypatch.setattr(CIFAR100, "meta", {"filename": meta[0], "key": "fine_label_names", "md5": meta[1]})
    return tmp_path


def test_images_labels_and_classes_are_those_of_the_files(cifar100: Path) -> None:
    source = cifar("cifar100", cifar100, CPU)
    assert (source.size, source.shape, source.classes) == (5, (3, 32, 32), ("apple", "bee", "cup"))
    ((x, y),) = source.test_batches(batch=5)
    pixels = x * torch.tensor(source.std).view(3, 1, 1) + torch.tensor(source.mean).view(3, 1, 1)
    assert np.array_equal(pixels.round().byte().numpy(), PIXELS)
    assert y.tolist() == [0, 2, 1, 1, 0]
    assert source._crops.shift.pixels == 4
    assert source._crops.shift.mirror
    assert not cifar("cifar100", cifar100, CPU, augment=False)._crops.shift.mirror


def test_what_is_there_is_not_downloaded_again(cifar100: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", pytest.fail)
    assert cifar("cifar100", cifar100, CPU, download=True).size == 5


def test_without_leave_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", pytest.fail)
    with pytest.raises(FileNotFoundError, match="no folder cifar-10-batches-py in .*data.download=true to fetch it"):
        cifar("cifar10", tmp_path, CPU)


def test_a_failed_download_says_where_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with pytest.raises(RuntimeError, match=f"cifar10 could not be downloaded .*no network.*{CIFAR10.url}"):
        cifar("cifar10", tmp_path / "new", CPU, download=True)


@pytest.mark.parametrize("name", ["train", "meta"])
def test_a_truncated_file_is_called_damaged(cifar100: Path, name: str) -> None:
    path = cifar100 / CIFAR100.base_folder / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        ValueError, match="cifar-100-python is incomplete or damaged: remove it and write data.download"
    ):
        cifar("cifar100", cifar100, CPU)
