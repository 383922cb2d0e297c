"""When values are read for the last time."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def last_readers(names: Sequence[Sequence[str]], which: Collection[str]) -> list[list[str]]:
    """Return for every step what of ``which`` no later one reads: its memory can be used again.

    >>> last_readers([["x"], ["a", "x"], ["b"]], {"a", "b"})
    [[], ['a'], ['b']]
    """
    last = {name: number for number, read in enumerate(names) for name in read}
    return [[name for name in dict.fromkeys(read) if name in which and last[name] == i] for i, read in enumerate(names)]
