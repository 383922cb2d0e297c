"""Keeps PyTorch to the calling thread: its other threads look out for more work for milliseconds after each piece."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: How long PyTorch's threads look out at most, as far as was seen. In seconds.
REST = 0.01


def _openmp() -> tuple[Any, Any]:
    """Return how the OpenMP that this process sees is asked for its threads and told."""
    try:
        everything = ctypes.CDLL(None)
        return everything.omp_get_max_threads, everything.omp_set_num_threads
    except (OSError, TypeError, AttributeError):  # no OpenMP, or none that can be seen
        return None, None


_get_threads, _set_threads = _openmp()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let PyTorch use one thread for what this thread asks of it; nothing changes for others.

    ``torch.set_num_threads`` would be for the whole process.

    >>> with one_torch_thread():
    ...     torch.ones(3).sum()
    tensor(3.)
    """
    if _set_threads is None or torch.get_num_threads() == 1:
        yield
        return
    before = _get_threads()  # which need not be PyTorch's OpenMP, and must be left as it was
    try:
        _set_threads(1)
        yield
    finally:
        _set_threads(before)


def wait_for_idle_threads(threads: int) -> None:
    """Wait until PyTorch's threads no longer keep an engine's from working, before the engine is timed."""
    if threads > 1 and torch.get_num_threads() > 1:
        time.sleep(REST)
