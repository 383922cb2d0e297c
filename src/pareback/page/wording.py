"""Numbers with their nouns."""

from __future__ import annotations


def counted(count: int, one: str, many: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "run", "runs"), counted(1200, "run", "runs")
    ('1 run', '1,200 runs')
    """
    return f"{count:,} {one if count == 1 else many}"
