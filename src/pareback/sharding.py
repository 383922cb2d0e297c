"""The only file that knows DTensor and process groups: local shards in, numbers of the whole tensor out."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Container, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import InvalidValue
from .kernels import Moments


def _is(value: object, kind: str, module: str) -> bool:
    """Whether ``value`` is of a class that takes a second to import: where nobody has, there is nothing of it."""
    imported: Any = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, kind, ()))


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, as ``fully_shard`` makes them."""
    return _is(tensor, "DTensor", "torch.distributed.tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of ``tensor``: the tensor itself where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


_version = attrgetter("_version")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that changes with every write in place."""
    return list(map(_version, tensors))


def versions_of_shards(tensors: Sequence[Tensor]) -> list[int]:
    """Return such numbers where writes may be known to a tensor's shard alone."""
    shards = [t._local_tensor if is_sharded(t) else None for t in tensors]  # type: ignore[attr-defined]
    pairs = zip(versions(tensors), shards, strict=True)
    return [n if shard is None else n + shard._version for n, shard in pairs]


def point(parameter: nn.Parameter, shard: Tensor) -> None:
    """Let ``parameter`` show another piece of memory as its own, without copying; ``shard`` is like ``local`` gave."""
    if is_sharded(parameter):
        parameter._local_tensor = shard  # type: ignore[attr-defined]
    else:
        parameter.data = shard


def like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return ``shard`` as a tensor sharded like ``parameter``, so that a distributed checkpoint can store it."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(  # type: ignore[no-any-return]
        shard,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its shards, on every rank; every rank has to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, sharded like ``parameter``."""
    if not is_sharded(parameter) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    there = tensor.to(local(parameter).device)
    return distribute_tensor(there, mesh, placements, src_data_rank=None)


def shard_here(tensor: Tensor, parameter: Tensor) -> Tensor | None:
    """Return this process's shard of a tensor that was saved for ``parameter``; None if it is another one's.

    A file that one process has written holds its shards alone, and every process that reads it finds those.
    """
    if not is_sharded(tensor):
        return local(split_like(tensor, parameter))
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if not is_sharded(parameter):
        shard = local(tensor)
        return shard if shard.shape == parameter.shape else None
    here = parameter.device_mesh  # type: ignore[attr-defined]
    same = placements == parameter.placements and mesh.shape == here.shape  # type: ignore[attr-defined]
    return local(tensor) if same and mesh.get_coordinate() == here.get_coordinate() else None


def check_wrappers(model: nn.Module) -> None:
    """Refuse FSDP1, whose flattened parameters hide the tensors."""
    if any(_is(module, "FullyShardedDataParallel", "torch.distributed.fsdp") for module in model.modules()):
        raise InvalidValue(
            "FullyShardedDataParallel flattens parameters, so tensors cannot be told apart. Shard the model with "
            "torch.distributed.fsdp.fully_shard instead."
        )


def ddp_models() -> weakref.WeakSet[nn.Module]:
    """Return the models that are wrapped for data parallel training: nothing in a parameter says so, hence the search.

    What nobody uses any more is collected first: it may be found in one process and not in the other.
    """
    if not dist.is_available() or not dist.is_initialized():
        return weakref.WeakSet()
    gc.collect()
    kind = nn.parallel.DistributedDataParallel
    return weakref.WeakSet([thing for thing in gc.get_objects() if issubclass(type(thing), kind)])


def copied_by_ddp(
    parameters: Sequence[Tensor], written: Sequence[int], before: Container[nn.Module]
) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """Return which parameters DistributedDataParallel may have copied from its first process, and its processes.

    Each model that was wrapped so after those of ``before`` is one entry, unless no process had all of its parameters
    ``written`` to. All of its processes have to ask, and get the same answer.
    """
    copied = []
    for members, group in sorted(_wrapped(parameters, before).items()):
        here = set(members) <= set(written)
        anywhere = torch.tensor(here, dtype=torch.int32, device=local(parameters[members[0]]).device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group)
        if bool(anywhere):
            copied.append((group, [*members]))
    return copied


def _wrapped(parameters: Sequence[Tensor], before: Container[nn.Module]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return which parameters each model holds that has been wrapped since, and its processes."""
    found = {}
    for net in [one for one in ddp_models() if one not in before]:
        held = {id(p) for p in net.parameters()}
        members = tuple(i for i, p in enumerate(parameters) if id(p) in held)
        group: Any = net.process_group
        if members and dist.get_world_size(group) > 1:
            found[members] = group
    return found


def send_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every process of a group the first one's ``tensors``."""
    for tensor in tensors:
        sent = tensor.contiguous()
        dist.broadcast(sent, dist.get_global_rank(group, 0), group)
        tensor.copy_(sent)


class Shards:
    """Adds up what each process measured on its shards: one small collective per call, the same on every rank.

    Without sharded tensors (a single process, or DDP, whose replicas are identical) nothing is communicated.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        groups = {_group(p) for p in parameters if is_sharded(p)}
        if len(groups) > 1:
            raise InvalidValue("Pruned parameters are sharded over different device meshes. Shard them over one.")
        self.group = groups.pop() if groups else None
        self.world = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self._split = [is_sharded(p) for p in parameters]
        self._counted = torch.tensor([split or self.rank == 0 for split in self._split])

    def gather(self, table: Tensor) -> Tensor:
        """Return every rank's ``[rows, tensors]`` table as ``[ranks, rows, tensors]``."""
        if self.group is None:
            return table[None]
        # A tensor that is whole on every rank counts once: on the first.
        if self._counted.device != table.device:
            self._counted = self._counted.to(table.device)
        mine = torch.where(self._counted, table, 0).flatten()
        everyone = torch.empty(self.world * mine.numel(), dtype=table.dtype, device=table.device)
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        return everyone.view(self.world, *table.shape)

    def anywhere(self, here: bool, device: torch.device) -> bool:
        """Return whether something holds on any rank: all of them get the same answer."""
        if self.group is None:
            return here
        everyone = torch.empty(self.world, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(everyone, torch.tensor([here], dtype=torch.int64, device=device), group=self.group)
        return bool(everyone.any())

    def share_out(self, moments: Moments) -> Moments:
        """Return this rank's part of what was measured on whole tensors: :meth:`combine` makes it whole again."""
        if self.rank == 0:
            return moments
        return Moments(torch.zeros_like(moments.square), moments.peak, torch.zeros_like(moments.pull))

    def on_ranks_before(self, i: int, count: Tensor) -> int:
        """Return how many of what each rank counts in its shard of tensor ``i`` lie in the shards of earlier ranks."""
        if self.group is None or not self._split[i]:
            return 0
        everyone = torch.empty(self.world, dtype=count.dtype, device=count.device)
        dist.all_gather_into_tensor(everyone, count, group=self.group)
        return int(everyone[: self.rank].sum())

    def combine(self, moments: Moments, nonzero: Tensor, band: Tensor) -> tuple[Moments, Tensor, Tensor]:
        """Return moments and counts of the whole tensors, through one all-gather in float64."""
        if self.group is None:
            return moments, nonzero, band
        rows = torch.stack([row.double() for row in (*moments, nonzero, band)])
        everyone = self.gather(rows)
        total = everyone.sum(0)
        dtype = moments.square.dtype
        whole = Moments(total[0].to(dtype), everyone[:, 1].amax(0).to(dtype), total[2].to(dtype))
        return whole, total[3].long(), total[4].long()


def _group(parameter: Tensor) -> dist.ProcessGroup:
    from torch.distributed.tensor import Shard

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    sharded = [dim for dim, placement in enumerate(placements) if isinstance(placement, Shard)]
    if any(placement.is_partial() for placement in placements) or len(sharded) != 1:
        raise InvalidValue(
            f"A pruned parameter has placements {placements}; it must be sharded over one mesh dimension, as "
            "fully_shard(model) does. Exclude it, or shard it so."
        )
    return mesh.get_group(sharded[0])  # type: ignore[no-any-return]
