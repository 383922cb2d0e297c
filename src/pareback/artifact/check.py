"""Proving a file sound before any memory is taken or any model changed."""

from __future__ import annotations

import torch

from . import positions
from .container import Reader
from .contents import Contents
from .dtypes import numel
from .errors import BadFile


def verify(reader: Reader, contents: Contents) -> None:
    """Raise BadFile unless all checksums are right and all positions lie within their tensors."""
    reader.verify()
    for stored in contents.stored.values():
        if stored.positions is None:
            continue
        try:
            positions.check(reader.read(stored.positions, torch.uint8), stored.count, numel(stored.shape))
        except BadFile as error:
            raise BadFile(f"{stored.name!r} is damaged, {error}") from None
