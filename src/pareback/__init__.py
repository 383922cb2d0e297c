"""Train any PyTorch model down to a budget of weights, FLOPs or bytes.

>>> import torch, pareback as pb
>>> model = torch.nn.Linear(100, 20)
>>> pb.prune_(model, pb.Budget(sparsity=0.95)).pruned_nonzeros
100
"""

from ._version import __version__
from .flops import FlopCount, count_flops
from .freeze import Frozen, freeze
from .goal import Budget, Fixed, Goal, Unconstrained
from .oneshot import prune_
from .parametrize import ParametrizedPruner
from .plan import Plan, plan
from .pruner import Pruner
from .report import Report, inspect

__all__ = [
    "Budget",
    "Fixed",
    "FlopCount",
    "Frozen",
    "Goal",
    "ParametrizedPruner",
    "Plan",
    "Pruner",
    "Report",
    "Unconstrained",
    "__version__",
    "count_flops",
    "freeze",
    "inspect",
    "plan",
    "prune_",
]
