"""What a pruned model gains on this machine: the engine beside the dense runtimes a user would pick."""

from .comparison import Comparison, compare
from .contest import Case, Effort, Outcome
from .masks import mask_uniformly_
from .runtimes import DEFAULT, RUNTIMES
from .subject import Subject

__all__ = ["DEFAULT", "RUNTIMES", "Case", "Comparison", "Effort", "Outcome", "Subject", "compare", "mask_uniformly_"]
