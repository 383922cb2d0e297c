"""A tree of images with one folder per class: which files there are, and how they are divided."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...errors import InvalidValue, MissingFile
from ...files import digest
from ...messages import counted, listed
from ..optional import optional
from .sources import fingerprint

log = logging.getLogger(__name__)

Sample = tuple[str, int]

#: Where images to measure on lie, the first that is there.
_TESTS = ("val", "test")
#: Images of a tree that are read to tell it from others, at most.
_READ = 64
#: What images are called beside what torchvision knows. Whether Pillow reads them is found out, and said, later.
_MORE_KINDS = (".jpe", ".jfif", ".gif", ".jp2", ".avif", ".heic", ".heif")


def samples_of(path: Path, *, may_be_empty: bool = False) -> tuple[tuple[str, ...], list[Sample]]:
    """Return the names of the classes and every image's path and class; those without images are refused, or left."""
    classes = sorted(entry.name for entry in path.iterdir() if _is_class(entry)) if path.is_dir() else []
    if not classes:
        raise MissingFile(
            f"There is no folder {path} with one folder per class in it: write data.path as the folder that holds "
            "train/ and val/."
        )
    root, kinds = str(path), (*optional("torchvision.datasets.folder").IMG_EXTENSIONS, *_MORE_KINDS)
    found = ((file, number) for number, name in enumerate(classes) for file in _files(os.path.join(root, name)))
    samples = [(file, number) for file, number in found if file.lower().endswith(kinds) and not _is_hidden(file, root)]
    empty = _without_images(classes, samples)
    if empty and not (may_be_empty and samples):
        raise InvalidValue(
            f"{path} has no image for {listed(empty)}: fill or remove these folders in train/ and in val/."
        )
    _mention_loose(path, kinds)
    return tuple(classes), samples


def tested_folder(path: Path) -> Path | None:
    """Return the folder with the images to measure on, if there is one."""
    return next((path / name for name in _TESTS if (path / name).is_dir()), None)


def samples_to_test(path: Path, classes: tuple[str, ...], held_out: bool) -> list[Sample]:
    """Return the test images; there need be none where others are held out to choose by."""
    folder = tested_folder(path)
    if folder is None:
        if held_out:
            return []
        raise MissingFile(
            f"There is no folder {path / 'val'} with one folder per class in it: write data.val_share=0.1 to hold out "
            "a tenth of the training images, or data.path as the folder that holds train/ and val/."
        )
    if all((path / name).is_dir() for name in _TESTS):
        log.warning(
            "%s has val/ and test/. The images of val/ are the test here; for the others: pareback evaluate RUN "
            "--data.path %s.",
            path,
            path / "test",
        )
    own, samples = samples_of(folder)
    odd = sorted(set(classes) ^ set(own))
    if odd:
        raise InvalidValue(
            f"train and {folder.name} of {path} must have the same classes, and only one of them has {listed(odd)}."
        )
    return samples


def check_left(path: Path, classes: tuple[str, ...], train: list[Sample], test: list[Sample] | None) -> None:
    """Refuse what is left of a tree without images that cannot be read, where that is too little; ``test`` if any."""
    empty = _without_images(classes, train)
    if empty:
        raise InvalidValue(
            f"{path / 'train'} has no image that can be read for {listed(empty)}: fill or remove these folders in "
            "train/ and in val/."
        )
    if test is not None and not test:
        raise InvalidValue(
            f"{tested_folder(path)} has no image that can be read: replace them, or remove the folder and write "
            "data.val_share=0.1."
        )


def held_out_of_classes(
    samples: list[Sample], root: Path, share: float, classes: tuple[str, ...] = ()
) -> tuple[list[Sample], list[Sample]]:
    """Divide images into those to train on and a share of every class to choose by.

    Names alone decide, whatever the seed of a run, so that runs are compared on the same images, and one that is added
    moves few others. ``classes`` too small to have one held out are mentioned.

    >>> left, held = held_out_of_classes([(f"/t/a/{n}.png", 0) for n in range(10)], Path("/t"), 0.2)
    >>> len(left), len(held), [Path(name).stem for name, _ in held]
    (8, 2, ['2', '7'])
    """
    of_class: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: _drawn(Path(sample[0]).relative_to(root).as_posix())):
        of_class.setdefault(sample[1], []).append(sample)
    sizes = [len(found) for found in of_class.values()]
    held = {sample for found in of_class.values() for sample in found[: round(share * len(found))]}
    if not _divides(sizes, share):
        raise InvalidValue(
            f"data.val_share={share!r} of {len(samples)} training images holds out {len(held)}, and has to leave "
            f"images of every class to train on and some to choose by: {_other_share(sizes)}."
        )
    left, apart = [s for s in samples if s not in held], [s for s in samples if s in held]
    none = _without_images(classes, apart)
    if none:
        log.warning(
            "data.val_share=%g holds out no image of %s, which the accuracy on val says nothing of: %s too few.",
            share,
            listed(none),
            "they have" if len(none) > 1 else "it has",
        )
    return left, apart


def contents_of(images: Sequence[str]) -> str:
    """Return a short hash of the sizes of all images and of what a few hold, spread evenly over them.

    Reading ImageNet would take longer than many a training; its sizes alone are those of no other tree.
    """
    apart = max(1, math.ceil(len(images) / _READ))
    return fingerprint((), (*map(_size, images), *map(_content, images[::apart])))


def _size(image: str) -> int | None:
    try:
        return os.stat(image).st_size
    except OSError:  # a link that leads nowhere; who reads it says so
        return None


def _content(image: str) -> str | None:
    try:
        return digest(Path(image), size=8)
    except OSError:
        return None


def _divides(sizes: Iterable[int], share: float) -> bool:
    """Whether a share of classes of these sizes leaves images of each, and takes some."""
    apart = [(round(share * size), size) for size in sizes]
    return any(taken for taken, _ in apart) and all(taken < size for taken, size in apart)


def _other_share(sizes: Iterable[int]) -> str:
    """Say which share would do.

    >>> _other_share([4, 4]), _other_share([1, 1])
    ('write data.val_share=0.2', 'there are too few for any share')
    """
    sizes = list(sizes)
    fitting = next((share for share in (0.1, 0.2, 0.3, 0.4) if _divides(sizes, share)), None)
    return "there are too few for any share" if fitting is None else f"write data.val_share={fitting}"


def _drawn(name: str) -> bytes:
    """Return what puts names in an order that has nothing to do with what they say."""
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).digest()


def _files(folder: str) -> Iterator[str]:
    """Yield all files below a folder, in the order of torchvision's ImageFolder; links are followed."""
    found: list[tuple[str, list[str]]] = []
    for place, inner, names in os.walk(folder, followlinks=True):
        for link in (os.path.join(place, name) for name in inner):
            if os.path.islink(link) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(link)):
                raise InvalidValue(f"{link} is a link to a folder that it lies in, which has no end: remove it.")
        found.append((place, names))
    yield from (os.path.join(place, name) for place, names in sorted(found) for name in sorted(names))


def _without_images(classes: Iterable[str], samples: list[Sample]) -> list[str]:
    filled = {label for _, label in samples}
    return [name for number, name in enumerate(classes) if number not in filled]


def _mention_loose(path: Path, kinds: tuple[str, ...]) -> None:
    """Say that images lie beside the classes' folders, where they belong to none."""
    loose = [e.name for e in path.iterdir() if e.name.lower().endswith(kinds) and not _is_hidden(e.name, "")]
    loose = sorted(name for name in loose if (path / name).is_file())
    if loose:
        count, are = counted(len(loose), "image"), "is" if len(loose) == 1 else "are"
        log.warning("%s of %s %s in no class's folder and left out: %s.", count, path, are, listed(loose, 3))


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _is_hidden(path: str, root: str) -> bool:
    """Whether a file below ``root`` is one that notebooks or file managers left there, as in .ipynb_checkpoints."""
    return f"{os.sep}." in f"{os.sep}{path[len(root) :]}"
