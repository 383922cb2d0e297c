"""Published pruning methods as goals of this library, to compare with on a task of one's own.

Each is given to a pruner like :class:`pareback.Budget`, and ends with the sparsity that was asked for, to the weight.

>>> import torch, pareback as pb
>>> model = torch.nn.Linear(100, 20)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> pruner = pb.Pruner(model, optimizer, pb.methods.GMP(sparsity=0.9), total_steps=50)
>>> for _ in range(50):
...     optimizer.zero_grad()
...     model(torch.randn(8, 100)).square().mean().backward()
...     optimizer.step()
>>> pruner.finish().pruned_nonzeros
200
"""

from .acdc import ACDC
from .feather import Feather
from .gmp import GMP
from .oneshot import OneShot
from .rigl import RigL
from .st3 import ST3

__all__ = ["ACDC", "GMP", "ST3", "Feather", "OneShot", "RigL"]
