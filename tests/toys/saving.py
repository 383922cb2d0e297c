"""Saving and loading without a file."""

from __future__ import annotations

import io
from typing import Any

import torch


def saved(thing: object) -> io.BytesIO:
    """Return what torch.save writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


def saved_and_loaded(thing: object, weights_only: bool = False) -> Any:
    """Return what comes back of a thing that was saved; with ``weights_only`` through the safe loader."""
    return torch.load(saved(thing), weights_only=weights_only)
