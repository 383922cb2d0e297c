"""The tensors of a model or a state dict: their names, whether a file can hold them, and what memory they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.selection import plain_name, unwrapped_model
from ..errors import InvalidType, InvalidValue
from .container import MOST_DIMENSIONS, check_name
from .elements import FORMS, name_of, overlaps_itself, span

#: Storages that are cut out of others begin at a multiple of this, so that any type of view can be laid over them.
_ALIGNMENT = 16


def tensors_of(source: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a model's or a state dict's tensors, without history, or say why they cannot be stored.

    The names are those of the unwrapped model, so that a file fits it with and without torch.compile or DDP.

    >>> list(tensors_of(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    if isinstance(source, nn.Module):
        source = {plain_name(name): value for name, value in unwrapped_model(source).state_dict().items()}
    elif not isinstance(source, Mapping):
        raise InvalidType(f"A {type(source).__name__} cannot be saved. Give a torch.nn.Module or its state dict.")
    return {name: _checked(name, value) for name, value in source.items()}


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own parameters and buffers under their names in its state dict, to be written into."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    model = unwrapped_model(model)
    own: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    found = {}
    for name in model.state_dict():
        if name not in own:
            raise InvalidValue(
                f"{name!r} of the model's state dict is no parameter or buffer that could be filled. Read the file "
                "without a model, and give what comes to model.load_state_dict."
            )
        found[plain_name(name)] = _checked(name, own[name])
    return found


def _checked(name: object, value: Any) -> Tensor:
    check_name(name)
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name!r} is a {type(value).__name__}, and a file holds only tensors. Leave it out.")
    if nn.parameter.is_lazy(value):
        raise InvalidValue(f"{name!r} has no shape yet. Run the model once on a batch first.")
    if hasattr(value, "__tensor_flatten__"):
        raise InvalidType(
            f"{name!r} is a {type(value).__name__}. Gather or convert it to a plain tensor first; for a sharded model "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True) does."
        )
    if value.layout != torch.strided or value.is_nested:
        raise InvalidType(f"{name!r} has the layout {value.layout}. Convert it with to_dense() first.")
    if value.dtype not in FORMS or value.is_quantized:
        raise InvalidType(f"{name!r} has the type {name_of(value.dtype)}, which a file cannot hold. Convert it first.")
    if value.is_meta:
        raise InvalidValue(f"{name!r} is on the meta device and has no values. Give it some, as with model.to_empty.")
    if value.ndim > MOST_DIMENSIONS:
        raise InvalidValue(f"{name!r} has {value.ndim} dimensions, and {MOST_DIMENSIONS} are the limit. Reshape it.")
    return value.detach().as_subclass(Tensor)


# ---------------------------------------------------------------- shared memory


@dataclass
class Sharing:
    """Tensors to store, and what to note about those that are not stored themselves."""

    owners: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  #: of views of another type than their owner's


@dataclass(frozen=True)
class _Member:
    """A tensor and the bytes of its storage between its first and its last element."""

    name: str
    tensor: Tensor

    @property
    def start(self) -> int:
        return int(self.tensor.storage_offset()) * self.tensor.itemsize

    @property
    def stop(self) -> int:
        return self.start + span(self.tensor.shape, self.tensor.stride()) * self.tensor.itemsize


def find_sharing(tensors: Mapping[str, Tensor], mark: str) -> Sharing:
    """Divide tensors into those that own their memory and those that share it.

    Tensors that only lie in one storage, without a common element, are stored each on their own.

    >>> one = torch.ones(4)
    >>> find_sharing({"a": one, "b": one, "c": one[2:]}, ":").shared
    {'c': {'of': 'a', 'offset': 2, 'shape': [2], 'strides': [1], 'at': 2}, 'b': {'of': 'a', 'at': 1}}
    """
    found = Sharing()
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    storages: defaultdict[Any, list[_Member]] = defaultdict(list)
    for name, tensor in tensors.items():
        key = memory_key(tensor)
        if key is not None and first.setdefault(key, name) != name:
            ties[name] = first[key]
            continue
        found.owners[name] = tensor
        if key is not None and not overlaps_itself(tensor.shape, tensor.stride()):
            storages[key[:2]].append(_Member(name, tensor))
    for members in storages.values():
        for group in _touching(members):
            if _have_common_elements(group):
                _join(group, found, mark)
    for name, other in ties.items():
        found.shared[name] = dict(found.shared.get(other, {"of": other}))
        if other in found.dtypes:
            found.dtypes[name] = found.dtypes[other]
    for place, name in enumerate(tensors):
        if name in found.shared:
            found.shared[name]["at"] = place
    return found


def memory_key(tensor: Tensor) -> Any:
    """Return what is equal for tensors that are one and the same memory; nothing where there is none."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():  # what is yet to be conjugated is not in memory
        return None
    geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return tensor.device, tensor.untyped_storage().data_ptr(), *geometry


def _touching(members: Sequence[_Member]) -> list[list[_Member]]:
    """Group members whose ranges of bytes overlap."""
    groups: list[list[_Member]] = []
    end = -1
    for member in sorted(members, key=lambda member: member.start):
        if member.start < end:
            groups[-1].append(member)
        else:
            groups.append([member])
        end = max(end, member.stop)
    return groups


def _have_common_elements(group: Sequence[_Member]) -> bool:
    if len(group) == 1:
        return False
    return int(_covered(group, group[0].start).sum()) < sum(m.tensor.numel() * m.tensor.itemsize for m in group)


def _covered(group: Sequence[_Member], start: int) -> Tensor:
    """Return which bytes from ``start`` on belong to an element of some member."""
    covered = torch.zeros(max(member.stop for member in group) - start, dtype=torch.bool)
    for member in group:
        size = member.tensor.itemsize
        strides = [stride * size for stride in member.tensor.stride()]
        covered.as_strided([*member.tensor.shape, size], [*strides, 1], member.start - start).fill_(True)
    return covered


def _join(group: list[_Member], found: Sharing, mark: str) -> None:
    """Store the group's memory once: under the name of the member that is all of it, or of a storage made for it."""
    start, stop = group[0].start, max(member.stop for member in group)
    whole = [m for m in group if (m.start, m.stop) == (start, stop) and m.tensor.is_contiguous()]
    aligned = all((member.start - start) % member.tensor.itemsize == 0 for member in group)
    if whole and aligned:
        owner = whole[0].name
    else:
        owner = f"{group[0].name}{mark}storage"
        start = start if len({member.tensor.dtype for member in group}) == 1 else start // _ALIGNMENT * _ALIGNMENT
        found.owners[owner] = _cut_out(group, start)
    for member in group:
        if member.name != owner:
            _make_view(member, owner, start, found)


def _cut_out(group: Sequence[_Member], start: int) -> Tensor:
    """Return a copy of the memory that a group shares, with zeros where it has no element."""
    dtypes = {member.tensor.dtype for member in group}
    covered = _covered(group, start)
    storage = group[0].tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    raw = raw.set_(storage, start, (len(covered),), (1,)).cpu()
    raw = torch.where(covered, raw, torch.zeros((), dtype=torch.uint8))
    return raw.view(dtypes.pop()) if len(dtypes) == 1 else raw


def _make_view(member: _Member, owner: str, start: int, found: Sharing) -> None:
    tensor = member.tensor
    found.shared[member.name] = {
        "of": owner,
        "offset": (member.start - start) // tensor.itemsize,
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
    }
    del found.owners[member.name]
    if tensor.dtype != found.owners[owner].dtype:
        found.dtypes[member.name] = name_of(tensor.dtype)
