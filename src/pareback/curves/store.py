"""The run store under the name that it had when only curves used it; it lives in :mod:`pareback.runs.store`."""

from __future__ import annotations

from ..runs.store import record_of, scan

__all__ = ["record_of", "scan"]
