"""Train any PyTorch model down to a budget of weights, FLOPs or bytes.

>>> import torch, pareback as pb
>>> model = torch.nn.Linear(100, 20)
>>> pb.prune_(model, pb.Budget(sparsity=0.95)).pruned_nonzeros
100
"""

import sys as _sys

from . import _early_interrupt as _early_interrupt  # before everything that takes time
from ._version import __version__

if not _early_interrupt.is_for_help(_sys.orig_argv):
    from . import methods
    from .artifact import BadFile, load, save
    from .costs.flops import FlopCount, count_flops
    from .errors import UserError
    from .freeze import Frozen, freeze
    from .goals import Budget, Fixed, Goal, Unconstrained
    from .oneshot import prune_
    from .plan import Plan, plan
    from .pruning.parametrized import ParametrizedPruner
    from .pruning.pruner import Pruner
    from .recalibrate import recalibrate
    from .report import Report, inspect
    from .runtime import Engine, compile, load_engine

__all__ = [
    "BadFile",
    "Budget",
    "Engine",
    "Fixed",
    "FlopCount",
    "Frozen",
    "Goal",
    "ParametrizedPruner",
    "Plan",
    "Pruner",
    "Report",
    "Unconstrained",
    "UserError",
    "__version__",
    "compile",
    "count_flops",
    "freeze",
    "inspect",
    "load",
    "load_engine",
    "methods",
    "plan",
    "prune_",
    "recalibrate",
    "save",
]
