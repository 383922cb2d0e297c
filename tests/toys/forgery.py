"""Files as an enemy would make them: any content, with checksums that are right."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from pathlib import Path
from typing import Any

import torch
from pruned_examples import sparse

from pareback.artifact import BadFile, save
from pareback.artifact.container import CHECKSUMS, Reader, checksum

#: Values that break what is not prepared for them.
NASTY: list[Any] = [-1, 0, 1, 2, 7, 8, 255, 2**31, 2**40, 2**56, 2**60, 2**63, 2**64, -(2**63), 10**30, 1.5, 1e308]
NASTY += [True, None, "", "a", "F64", "U8", "float64", [], [1], [0], [-1], [2**40], [2**31, 2**31], [1] * 70, {}]


def rich_file(path: Path) -> Path:
    """Write a small file that uses everything the format has."""
    seeds = itertools.count()

    def pruned(*shape: int) -> torch.Tensor:
        return sparse(*shape, density=0.2, seed=next(seeds))

    matrix, memory = pruned(20, 20), torch.arange(40.0)
    state = {
        "dense": sparse(5, 3, density=1.0),
        "sparse": matrix,
        "tie": matrix,
        "view": matrix[3:9],
        "half": pruned(25, 20),
        "last": pruned(4, 8, 3, 4).to(memory_format=torch.channels_last),
        "wave": torch.complex(pruned(200), pruned(200)).to(torch.complex128),
        "left": memory[:30],
        "right": memory[20:],
        "count": torch.tensor(3),
        "none": torch.empty(0, 2),
        "zeros": torch.zeros(300),
    }
    save(state, path, values="bfloat16")
    return path


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a file's header and its data."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    """Return a file of a header and data."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def sealed(header: dict[str, Any], data: bytes, path: Path) -> bytes:
    """Return a file with the checksums that its content should have, if it has a content that could be summed."""
    path.write_bytes(joined(header, data))
    try:
        with Reader(path) as reader:
            said = {key: value for key, value in reader.metadata.items() if key != CHECKSUMS}
            sums = [checksum(reader.parts.values(), said)]
            sums += [zlib.crc32(data[part.start : part.stop]) for part in reader.lying()]
    except BadFile:
        return path.read_bytes()
    metadata = {**said, CHECKSUMS: "".join(f"{number:08x}" for number in sums)}
    return joined({**header, "__metadata__": metadata}, data)


def mutated(header: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a header in which something, down to the JSON within its metadata, is something else."""
    header = json.loads(json.dumps(header))
    metadata = header["__metadata__"]
    opened = [key for key in ("sparse", "dtypes", "strides", "shared") if key in metadata]
    for key in opened:
        metadata[key] = json.loads(metadata[key])
    places = list(_places(header))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, key = draw.choice(places)
        _change(holder, key, draw)
    for key in opened:
        if isinstance(metadata, dict) and key in metadata:
            metadata[key] = json.dumps(metadata[key])
    return header


def _places(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _change(holder: Any, key: Any, draw: random.Random) -> None:
    present = key in holder if isinstance(holder, dict) else key < len(holder)
    if not present:
        return
    kind = draw.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["dense", "sparse", "x", "", "tie", "sparse:values"])] = holder.pop(key)
    elif kind == 2 and type(holder[key]) is int:
        holder[key] += draw.choice([-8, -4, -1, 1, 4, 8])
    elif kind == 3:
        holder[key] = draw.choice(list(holder.values()) if isinstance(holder, dict) else holder)
    else:
        holder[key] = draw.choice(NASTY)
