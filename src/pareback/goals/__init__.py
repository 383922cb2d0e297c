"""What is wanted: a budget, a fixed sparsity, or as sparse as the task allows; and the base of further goals."""

from .budget import Budget
from .fixed import Fixed
from .goal import Goal, MaskGoal, Resolved, ThresholdGoal
from .unconstrained import Unconstrained

__all__ = ["Budget", "Fixed", "Goal", "MaskGoal", "Resolved", "ThresholdGoal", "Unconstrained"]
