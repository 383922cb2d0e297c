"""The passes over the weights that a pruning step needs.

``reference`` holds them in plain PyTorch operators; it runs everywhere and defines the numbers any other
implementation has to give.
"""

from __future__ import annotations

from .reference import Moments, count, measure, prune_, restore_, shrunk

__all__ = ["Moments", "count", "measure", "prune_", "restore_", "shrunk"]
