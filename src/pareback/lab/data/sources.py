"""What a trainer reads images from, and how a recipe's data is opened."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import InvalidValue
from ...messages import one_of
from ..recipe.schema import DataRecipe
from .batching import check_batch


class _Kind(NamedTuple):
    """A kind of data: the module of this room whose ``opened(recipe, device)`` opens it, and what its path is."""

    module: str
    path: str = ""


_CIFAR = _Kind("builtin", "write the folder where torchvision keeps it, or downloads it to with data.download=true")
#: A new kind is a module here, a line of this table, and a word in DataRecipe.
_KINDS = {
    "digits": _Kind("builtin"),
    "mnist5000": _Kind("builtin"),
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "npz": _Kind("npz", "write the .npz file with the images"),
    "folder": _Kind("folder", "write the folder that holds train/ and val/"),
}
KINDS = tuple(_KINDS)


#: Means and deviations of red, green and blue, of pixels from 0 to 1.
Normalisation = tuple[Sequence[float], Sequence[float]]


class Source(Protocol):
    """Images to train on and to test with."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    @property
    def size(self) -> int:
        """Training images."""

    @property
    def labels(self) -> int:
        """Different labels among the training images, whatever classes there are."""

    @property
    def test_size(self) -> int:
        """Test images."""

    @property
    def fingerprint(self) -> str:
        """What tells these images from others, wherever they lie."""

    def batches(
        self, epoch: int, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an epoch's training batches: ``batch // world`` normalised images, float32 in NCHW, and int64 labels.

        The same arguments give the same bits. The ranks' parts together are the batch of world=1; a last batch that
        is not full is left out.
        """

    def test_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test images in batches of at most ``batch // world``, each image once over the ranks."""


@runtime_checkable
class HoldsOut(Source, Protocol):
    """A source that holds out training images to choose by, beside its test images, of which there may be none."""

    @property
    def val_size(self) -> int:
        """Images that are held out."""

    def val_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return them as ``test_batches`` does the test images."""


def val_size(source: Source) -> int:
    """Return how many training images are held out beside the test images.

    >>> val_size(open_source(DataRecipe(), torch.device("cpu")))
    0
    """
    return source.val_size if isinstance(source, HoldsOut) else 0


def holds_the_tests_place(recipe: DataRecipe) -> bool:
    """Whether images that are held out take the place of the test images, which are not used.

    >>> holds_the_tests_place(DataRecipe(val_share=0.1)), holds_the_tests_place(DataRecipe("folder", val_share=0.1))
    (True, False)
    """
    return recipe.val_share > 0 and recipe.kind != "folder"


def skipped(source: Source) -> tuple[str, ...]:
    """Return the names of images that were left out because they cannot be read."""
    names: tuple[str, ...] = getattr(source, "skipped", ())
    return names


def takes_a_path(kind: str) -> bool:
    """Whether data of a kind lie at a path, and do not come with a package.

    >>> takes_a_path("npz"), takes_a_path("digits")
    (True, False)
    """
    return bool(_KINDS[kind].path)


def open_source(recipe: DataRecipe, device: torch.device, normalisation: Normalisation | None = None) -> Source:
    """Open the images that a recipe names, small sets on the device.

    ``normalisation`` is what a network expects that was trained elsewhere. Sets in memory have their own.

    >>> source = open_source(DataRecipe(), torch.device("cpu"))
    >>> source.size, source.shape, source.classes[:3]
    (1347, (1, 8, 8), ('0', '1', '2'))
    """
    one_of("data.kind", recipe.kind, KINDS)
    source = _opened(recipe, device, normalisation)
    if source.labels < 2:
        where = "" if recipe.path is None else f" of {recipe.path}"
        raise InvalidValue(
            f"All training images{where} are of one class, so that any network is right about all of them: give images "
            "of at least two."
        )
    check_batch(source.size, recipe.batch_size)
    return source


def steps_per_epoch(source: Source, batch: int) -> int:
    """Return how many full batches an epoch has.

    >>> steps_per_epoch(open_source(DataRecipe(), torch.device("cpu")), 64)
    21
    """
    check_batch(source.size, batch)
    return source.size // batch


def _opened(recipe: DataRecipe, device: torch.device, normalisation: Normalisation | None) -> Source:
    kind = _KINDS[recipe.kind]
    if kind.path and recipe.path is None:
        raise InvalidValue(f"data.kind={recipe.kind} needs data.path: {kind.path}.")
    # Imported here so that each kind asks for its own packages alone.
    module: Any = importlib.import_module(f".{kind.module}", __package__)
    extra = (normalisation,) if recipe.kind == "folder" else ()
    source: Source = module.opened(recipe, device, *extra)
    return source


def fingerprint(tensors: Iterable[Tensor], words: Iterable[object] = ()) -> str:
    """Return a short hash of tensors and words, in their order.

    >>> import torch
    >>> fingerprint([torch.zeros(2)]) == fingerprint([torch.zeros(2, 1)])
    False
    """
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(tensor.contiguous().numpy().data)
    found.update(repr(tuple(words)).encode())
    return found.hexdigest()


def same_images(one: str, two: str) -> bool:
    """Whether two fingerprints are of the same images.

    A folder's has a part for names and one for contents. Runs of releases before this one noted the names alone, and
    are compared by them.

    >>> same_images("ab-12", "ab-12"), same_images("ab-12", "ab-34"), same_images("ab", "ab-34")
    (True, False, True)
    """
    (names, _, contents), (others, _, there) = one.partition("-"), two.partition("-")
    return names == others and (contents == there or not contents or not there)
