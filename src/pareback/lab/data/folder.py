"""Images in folders, one per class, as ImageNet has them: read, cropped and mirrored by several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ...errors import InvalidValue
from ...files import expanded
from ...messages import listed
from ..optional import optional
from ..recipe import DataRecipe
from .batching import check_batch, derived_seed, rank_part, shares_of_test
from .decoded import DecodedFolder, kept_or_decoded
from .readable import read_image, reason, state_of, unreadable
from .sources import Normalisation, fingerprint
from .tree import Sample, check_left, contents_of, held_out_of_classes, samples_of, samples_to_test, tested_folder

#: ImageNet's, which pretrained networks expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: What becomes of images that cannot be read: see DataRecipe.
Corrupt = Literal["stop", "skip", "later"]


def opened(recipe: DataRecipe, device: torch.device, normalisation: Normalisation | None) -> Folder | DecodedFolder:
    """Open what a recipe asks for; images are normalised with ImageNet's statistics where nothing else is given."""
    assert recipe.path is not None  # as its kind says
    found = Folder(
        recipe.path,
        device,
        recipe.image_size,
        recipe.workers,
        recipe.augment,
        val_share=recipe.val_share,
        corrupt=recipe.corrupt,
        randaugment=recipe.randaugment,
        **normalised(recipe, normalisation),
    )
    return found.decoded() if recipe.memory else found


def normalised(recipe: DataRecipe, normalisation: Normalisation | None) -> dict[str, Any]:
    """Return as options what a folder's images are normalised with: what a recipe says, or else what is given."""
    said = None if recipe.mean is None or recipe.std is None else (recipe.mean, recipe.std)
    found = said or normalisation
    return {} if found is None else {"mean": found[0], "std": found[1]}


class _Reader:
    """Crops of a side, of images that are read by several processes, on a device."""

    #: The images that are left out because they cannot be read, by their names in the tree.
    skipped: tuple[str, ...] = ()

    def __init__(
        self, device: torch.device | str, image_size: int, workers: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        if image_size < 1:
            raise InvalidValue(f"data.image_size={image_size} must be at least 1: write the crops' side, such as 224.")
        if workers < 0:
            raise InvalidValue(
                f"data.workers={workers} must be at least 0, which reads in the training process itself."
            )
        self.shape = (3, image_size, image_size)
        self.mean, self.std = (tuple(255.0 * value for value in values) for values in (mean, std))
        self._mean, self._std = (torch.tensor(s, device=device).view(-1, 1, 1) for s in (self.mean, self.std))
        self._device = torch.device(device)
        # More than the processors only wait for each other, and DataLoader warns about them.
        self._workers = min(workers, _processors())

    def _centres(self, samples: list[Sample], batch: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        shares = shares_of_test(len(samples), batch, rank, world)
        return self._load(_Images(samples, self.shape[1], None), [list(share) for share in shares])

    def _decoded(
        self,
        parts: tuple[list[Sample], list[Sample], list[Sample]],
        classes: tuple[str, ...],
        identity: str,
        augment: bool = False,
    ) -> DecodedFolder:
        return DecodedFolder(
            parts,
            classes,
            (self.mean, self.std),
            identity,
            self._device,
            read=_read_or_refuse,
            image_size=self.shape[1],
            augment=augment,
            workers=self._workers,
            skipped=self.skipped,
        )

    def _load(self, images: _Images, batches: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader[_Item] = DataLoader(
            images,
            batch_sampler=batches,
            collate_fn=_collated,
            num_workers=self._workers if batches else 0,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # else it draws from the training's own
        )
        # Bytes travel between processes and to the device, floats are made there.
        for found in loader:
            if isinstance(found, _Unreadable):
                raise InvalidValue(found.sentence)
            x, y = found
            x, y = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
            yield x.float().sub_(self._mean).div_(self._std), y


class Folder(_Reader):
    """The images of ``path/train`` and ``path/val``, or ``path/test`` without it, each with one folder per class.

    Training takes a random part of the image, scaled to ``image_size``, mirrors half of them, and makes two more
    changes of the magnitude ``randaugment``; the test takes the centre. What is drawn depends on seed, epoch and image
    alone, not on who reads it. ``val_share`` of the training images is held out to choose by; then ``path/val``, the
    test images, may be missing. ``corrupt`` says whether images that cannot be read are looked for now, and then
    refused or left out, or later, when they are read.
    """

    def __init__(
        self,
        path: str | Path,
        device: torch.device | str = "cpu",
        image_size: int = 224,
        workers: int = 4,
        augment: bool = True,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        val_share: float = 0.0,
        corrupt: Corrupt = "later",
        randaugment: int = 0,
    ) -> None:
        super().__init__(device, image_size, workers, mean, std)
        self._path = path = expanded(path)
        self.classes, self._train = samples_of(path / "train")
        self._test = samples_to_test(path, self.classes, bool(val_share))
        left, self.skipped = _readable(path, [*self._train, *self._test], corrupt)
        if self.skipped:
            kept, tests = set(left), bool(self._test)
            self._train, self._test = ([s for s in part if s in kept] for part in (self._train, self._test))
            check_left(path, self.classes, self._train, self._test if tests else None)
        self._val: list[Sample] = []
        if val_share:
            self._train, self._val = held_out_of_classes(self._train, path, val_share, self.classes)
        self.size, self.val_size, self.test_size = len(self._train), len(self._val), len(self._test)
        self.labels = len(self.classes)  # none is without images
        images = [image for image, _ in (*self._train, *self._val, *self._test)]
        names = fingerprint((), (image.removeprefix(str(path)) for image in images))
        self.fingerprint = f"{names}-{contents_of(images)}"
        self._augment, self._magnitude = augment, randaugment if augment else 0

    def batches(
        self, epoch: int, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an epoch's training batches, a process's part of each, in an order and with crops drawn anew."""
        check_batch(self.size, batch, rank, world)
        epoch_seed = derived_seed(seed, epoch)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch_seed))
        images = _Images(self._train, self.shape[1], epoch_seed if self._augment else None, self._magnitude)
        return self._load(images, rank_part(order, batch, rank, world).tolist())

    def test_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test images in batches, each image once over all processes."""
        return self._centres(self._test, batch, rank, world)

    def val_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the training images that were held out in batches, as the test images are."""
        return self._centres(self._val, batch, rank, world)

    def decoded(self) -> DecodedFolder:
        """Return the same images, read now and kept on the device, where they are cropped."""
        parts = (self._train, self._val, self._test)

        def key() -> tuple[Any, ...] | None:
            state = state_of(self._path, [image for part in parts for image, _ in part])
            known = (*map(len, parts), *self.shape, self._augment, str(self._device), self.mean, self.std)
            return None if state is None else (state, *known)

        return kept_or_decoded(key, lambda: self._decoded(parts, self.classes, self.fingerprint, self._augment))


class EvaluationFolder(_Reader):
    """Images to measure a network on, of classes that are given: those of ``path/val``, ``path/test`` or ``path``.

    Each has one folder per class; not every class needs one. There are none to train on.
    """

    def __init__(
        self,
        path: str | Path,
        classes: tuple[str, ...],
        device: torch.device | str = "cpu",
        image_size: int = 224,
        workers: int = 4,
        corrupt: Corrupt = "later",
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
    ) -> None:
        super().__init__(device, image_size, workers, mean, std)
        path = expanded(path)
        inner = tested_folder(path) or path
        found, samples = samples_of(inner, may_be_empty=True)
        odd = [name for name in found if name not in classes]
        if odd:
            raise InvalidValue(
                f"{inner} has folders that are no classes of the run: {listed(odd)}. Its classes are {listed(classes)}."
            )
        own = {label: classes.index(name) for label, name in enumerate(found)}
        samples = [(image, own[label]) for image, label in samples]
        self.classes = classes
        self._test, self.skipped = _readable(path, samples, corrupt)
        self.size, self.labels, self.test_size = 0, len(found), len(self._test)
        self.fingerprint = ""  # another set than a run's own, whatever it is

    def batches(
        self, epoch: int, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Refuse an epoch's batches: there are no images to train on."""
        raise InvalidValue("These images are to measure on, not to train on.")

    def test_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the images in batches, each image once over all processes."""
        return self._centres(self._test, batch, rank, world)

    def decoded(self) -> DecodedFolder:
        """Return the same images as a run with ``data.memory`` sees them."""
        return self._decoded(([], [], self._test), self.classes, self.fingerprint)


@dataclass(frozen=True)
class _Unreadable:
    """An image that cannot be read. What a reading process raises comes back with its traceback, this as it is."""

    sentence: str


_Item = tuple[Tensor, int] | _Unreadable


def _collated(items: list[_Item]) -> Any:
    return next((item for item in items if isinstance(item, _Unreadable)), None) or default_collate(items)


class _Images(Dataset[_Item]):
    """Reads single images, cropped at random from a seed of each image's own, or at the centre without one."""

    def __init__(self, samples: list[Sample], side: int, seed: int | None, magnitude: int = 0) -> None:
        transforms = optional("torchvision.transforms.v2")
        if seed is None:
            # 256 for 224, as is usual
            steps = [transforms.Resize(round(side / 0.875)), transforms.CenterCrop(side)]
        else:
            steps = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
            steps += [transforms.RandAugment(magnitude=magnitude)] if magnitude else []
        self._samples, self._seed = samples, seed
        self._crop: Any = transforms.Compose([*steps, transforms.PILToTensor()])

    def __getitem__(self, index: int) -> _Item:
        path, label = self._samples[index]
        image = _read(path)
        if isinstance(image, _Unreadable):
            return image
        if self._seed is None:
            return self._crop(image), label
        # The transforms draw from torch's own generator, which is put back as it was.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(self._seed, index))
            return self._crop(image), label


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: str) -> Any:
    try:
        return read_image(path)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow raise nearly anything
        return _Unreadable(f"{path} cannot be read as an image ({reason(error, path)}): replace or remove it.")


def _readable(path: Path, samples: list[Sample], corrupt: Corrupt) -> tuple[list[Sample], tuple[str, ...]]:
    """Return the images that can be read, and the names of the others; or refuse those; or do not look."""
    found = {} if corrupt == "later" else unreadable(path, [image for image, _ in samples], _processors())
    if not found:
        return samples, ()
    names = {image: Path(image).relative_to(path).as_posix() for image in found}
    if corrupt == "stop":
        shown = ", ".join(f"{name!r} ({found[image]})" for image, name in list(names.items())[:5])
        more = f" and {len(found) - 5:,} more" if len(found) > 5 else ""
        raise InvalidValue(
            f"{len(found):,} of {len(samples):,} images of {path} cannot be read: {shown}{more}. Replace or remove "
            "them, or write data.corrupt=skip to leave them out."
        )
    return [sample for sample in samples if sample[0] not in found], tuple(names.values())


def _read_or_refuse(path: str) -> Any:
    image = _read(path)
    if isinstance(image, _Unreadable):
        raise InvalidValue(image.sentence)
    return image
