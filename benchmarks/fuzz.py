"""Everything that is read, fed with what nobody would write: a sentence, or what the file says, and nothing else.

    python benchmarks/fuzz.py --seconds 60 --seed 1                     # all readers, by random changes of the corpus
    python benchmarks/fuzz.py recipe --engine atheris --seconds 600     # one reader, led by its coverage

A reader may raise an error that is for users (pareback.UserError). Any other error, a warning, more than ten seconds or
a crash is a fault; the bytes that led to it are kept in --faults. The corpus is tests/corpus, a folder per reader;
--write makes it anew. atheris (pip install atheris) leads the changes by coverage, for one reader at a time; without it
they are blind, and the parts of files that checksums protect are sealed again after each change.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch

import pareback as pb
from pareback import artifact, files
from pareback.artifact.container import CHECKSUMS, Reader, checksum
from pareback.artifact.contents import ENGINE
from pareback.artifact.weights import read_weights
from pareback.errors import UserError
from pareback.lab import environment
from pareback.lab.data.npz import npz
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.reading import read
from pareback.runs import checkpoints, store
from pareback.runs.folder import result_of
from pareback.runs.record import read_record
from pareback.runs.trust import admit
from pareback.runtime.lower import tuning
from pareback.runtime.saved import writing
from pareback.runtime.saved.describe import describe_engine

CORPUS = Path(__file__).parent.parent / "tests" / "corpus"
#: Seconds that one input may take, and bytes of memory beyond what is held already.
PATIENCE, MEMORY = 10, 4 << 30


# -- readers: each takes a folder to write into and the bytes of a file -------------------------------------------


def pare(place: Path, content: bytes) -> None:
    """A compressed file: loaded, and described."""
    path = place / "model.pare"
    path.write_bytes(content)
    for reader in (artifact.load, artifact.describe):
        with_users_errors(lambda reader=reader: reader(path))


def weights(place: Path, content: bytes) -> None:
    """A file of weights of whatever kind, by its content."""
    path = place / "weights.pt"
    path.write_bytes(content)
    read_weights(path)


def checkpoint(place: Path, content: bytes) -> None:
    """A run's checkpoint."""
    path = place / "checkpoint.pt"
    path.write_bytes(content)
    checkpoints.load(path)


def recipe(place: Path, content: bytes) -> None:
    """A recipe, read and checked."""
    path = place / "recipe.yaml"
    path.write_bytes(content)
    check(read(path))


def result(place: Path, content: bytes) -> None:
    """A run's result, in its folder and as a record."""
    path = place / "result.json"
    path.write_bytes(content)
    (place / "metrics.jsonl").write_bytes(content[-200:])
    found = store.look(place)
    for reader in (result_of, read_record, lambda _: store.record_of(found)):
        with_users_errors(lambda reader=reader: reader(place))
    with_users_errors(lambda: read_record(path))


def images(place: Path, content: bytes) -> None:
    """Images in a .npz file."""
    path = place / "images.npz"
    path.write_bytes(content)
    npz(path, torch.device("cpu"))


def tuned(place: Path, content: bytes) -> None:
    """What the engine remembers of a machine."""
    path = place / "tuning.json"
    path.write_bytes(content)
    tuning._read(path)


def code(place: Path, content: bytes) -> None:
    """A run's note on where its module was."""
    (place / "code.json").write_bytes(content)
    admit(place, "nets:build")


def pbe(place: Path, content: bytes) -> None:
    """A compiled engine: described, made, and called on zeros."""
    path = place / "model.pbe"
    path.write_bytes(content)
    with_users_errors(lambda: describe_engine(path))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # tuned on another processor
        engine = pb.load_engine(path, threads=1)
    plan = engine._plan
    shapes = [plan.shapes.of(name, 1) for name in plan.inputs]
    if sum(numpy.prod(shape, dtype=float) for shape in shapes) < 1e6:
        inputs = [torch.zeros(shape, dtype=plan.dtypes[name]) for name, shape in zip(plan.inputs, shapes, strict=True)]
        with contextlib.suppress(
            RuntimeError, TypeError, IndexError, ValueError
        ):  # PyTorch's own operators, told nonsense
            engine.run_sparse(*inputs)


READERS: dict[str, Callable[[Path, bytes], None]] = {
    "pare": pare,
    "weights": weights,
    "checkpoint": checkpoint,
    "recipe": recipe,
    "result": result,
    "images": images,
    "tuned": tuned,
    "pbe": pbe,
    "code": code,
}


def with_users_errors(work: Callable[[], Any]) -> None:
    """Go on after an error that is for users: the next reader has its turn."""
    with contextlib.suppress(UserError):
        work()


def fault_of(name: str, content: bytes, place: Path) -> str:
    """Return what is wrong with how a reader takes some bytes; nothing if it is right."""
    began = time.monotonic()
    try:
        with warnings.catch_warnings(action="error"):
            READERS[name](place, content)
    except UserError:
        pass
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        return f"{type(error).__name__}: {error}{where}"[:300]
    took = time.monotonic() - began
    return f"took {took:.0f} s" if took > PATIENCE else ""


# -- changes -------------------------------------------------------------------------------------------------------


def changed(content: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return a content with a few things about it changed, sealed again where checksums would give it away."""
    if ENGINE.encode() in content[:400] and chance.random() < 0.8:
        return sealed(_changed_engine(content, chance))
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        start = chance.randrange(len(data) + 1)
        kind = chance.randrange(7)
        if kind == 0 and data:
            data[min(start, len(data) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[start : start + chance.randrange(16)] = chance.randbytes(chance.randrange(16))
        elif kind == 2:
            del data[start : start + chance.randrange(1, 64)]
        elif kind == 3:
            data[start:start] = data[start : start + chance.randrange(1, 64)]
        elif kind == 4:
            data[start:start] = chance.choice(WORDS)
        elif kind == 5:
            other = chance.choice(others)
            cut = chance.randrange(len(other) + 1)
            data[start:] = other[cut : cut + 4096]
        else:
            data[start : start + 8] = chance.choice(NUMBERS).to_bytes(8, "little")
    return sealed(bytes(data)) if chance.random() < 0.7 else bytes(data)


def _changed_engine(content: bytes, chance: random.Random) -> bytes:
    """Return an engine of whose description a few entries are others, of the same kind or of any."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    description = json.loads(header["__metadata__"][ENGINE])
    places = list(_places(description))
    for _ in range(chance.choice([1, 1, 2, 3])):
        holder, key = chance.choice(places)
        other, another = chance.choice(places)
        like = [place for place in places if type(place[0][place[1]]) is type(holder[key])]
        if chance.random() < 0.6:
            other, another = chance.choice(like)
        if type(holder[key]) is int and chance.random() < 0.5:
            holder[key] = chance.choice([holder[key] + 1, holder[key] - 1, 2 * holder[key], *NUMBERS])
        elif isinstance(holder, list) and chance.random() < 0.2:
            holder.insert(key, json.loads(json.dumps(other[another])))
        else:
            holder[key] = json.loads(json.dumps(other[another]))
    header["__metadata__"][ENGINE] = json.dumps(description)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry in nested lists and dicts, as what holds it and where."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


WORDS = [
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"[[[[",
    b"{}",
    b'"',
    b"\xff\xfe",
    b"\x00",
    b"!!python/object/apply:os.abort []",
]
WORDS += [
    b": ",
    b"- ",
    b"&a ",
    b"*a",
    b"<<: ",
    b"9" * 40,
    b"0x",
    b"\n\t",
    b"sparsity: .inf",
    b"c\nos\nabort\n.",
    b"\x80\x05",
]
NUMBERS = [0, 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1]


def sealed(content: bytes) -> bytes:
    """Return a file with the right checksums for what it holds now, if it is one that has any."""
    try:
        if content[:2] == b"PK":
            return _sealed_zip(content)
        return _sealed_pare(content)
    except Exception:  # damaged beyond that
        return content


def _sealed_zip(content: bytes) -> bytes:
    """Write the members of a zip file anew, read without looking at their checksums."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w") as archive:
        for member in source.infolist():
            with source.open(member) as file:
                file._expected_crc = None  # type: ignore[attr-defined]
                archive.writestr(member.filename, file.read())
    return target.getvalue()


def _sealed_pare(content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:end]), content[end:]
    with TemporaryDirectory(prefix="fuzz-") as place:
        path = Path(place) / "model.pare"
        path.write_bytes(content)
        with Reader(path) as reader:
            said = {key: value for key, value in reader.metadata.items() if key != CHECKSUMS}
            sums = [checksum(reader.parts.values(), said)]
            sums += [zlib.crc32(data[part.start : part.stop]) for part in reader.lying()]
    metadata = {**said, CHECKSUMS: "".join(f"{number:08x}" for number in sums)}
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    return len(text).to_bytes(8, "little") + text + data


# -- the corpus ----------------------------------------------------------------------------------------------------


def write_corpus(folder: Path) -> None:
    """Write small files of each kind, right ones: what is wrong with them is for the changes to find."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Linear(10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8), min_size=1)
    model(torch.randn(4, 12)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    for name in READERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    pb.save(model, folder / "pare" / "plain.pare")
    tied = torch.randn(6, 6).relu()
    pb.save({"a": tied, "b": tied, "view": tied[2:], "n": torch.tensor(3)}, folder / "pare" / "tied.pare")
    torch.save(state, folder / "weights" / "zip.pt")
    torch.save(state, folder / "weights" / "old.pt", _use_new_zipfile_serialization=False)
    parts = {"model": state, "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    whole = {"version": checkpoints.VERSION, "epoch": 1, "parts": {**parts, "derived": {"names": {}, "exponent": 3.0}}}
    torch.save(whole, folder / "checkpoint" / "whole.pt")
    names = {"0.weight": "0.weight"}
    torch.save(
        {**whole, "parts": {**parts, "model": {}, "derived": {"names": names, "exponent": 3.0}}},
        folder / "weights" / "checkpoint.pt",
    )
    (folder / "recipe" / "flow.yaml").write_text(
        "name: a\nmodel: {name: wrn, depth: 10}\ngoal: {kind: budget, params: 5K}\n"
    )
    (folder / "recipe" / "block.yaml").write_text("seed: 3\ndata:\n  kind: digits\ntrain:\n  epochs: 2\n  ema: 0.9\n")
    numbers = dict.fromkeys(("seed", "accuracy", "parameters", "nonzeros", "pruned_weights"), 1)
    tensor = {"name": "w", "shape": [1], "size": 1, "nonzeros": 1, "pruned": True, "sigma": 1.0, "threshold": 0.1}
    sections: dict[str, Any] = {
        "data": {"path": None},
        "model": {},
        "goal": {"kind": "dense", "min_size": 1},
        "train": {},
    }
    content = {
        **numbers,
        "pruned_nonzeros": 1,
        "sparsity": 0.0,
        "name": "a",
        "recipe": sections,
        "environment": {"start": "2026-01-01T00:00:00+00:00"},
        "seconds": {"total": 1.0},
        "tensors": [tensor],
        "files": {"metrics.jsonl": "0"},
        "complete": True,
    }
    (folder / "result" / "result.json").write_text(json.dumps(content))
    (folder / "result" / "record.json").write_text(json.dumps({**content, "metrics": [], "histograms": []}))
    x, y = numpy.zeros((4, 2, 2, 3), "uint8"), numpy.arange(4) % 2
    labels = numpy.array(["a", "b"])
    numpy.savez(folder / "images" / "plain.npz", train_x=x, train_y=y, test_x=x, test_y=y, classes=labels)
    numpy.savez_compressed(folder / "images" / "packed.npz", train_x=x, train_y=y, test_x=x, test_y=y, classes=labels)
    choice = {"version": tuning._VERSION, "processor": tuning.processor_name(), "choices": {"a": [1, 2, 3, 4, 5]}}
    (folder / "tuned" / "tuning.json").write_text(json.dumps({**choice, "processor": "a processor"}))
    writing.processor_name = lambda: "a processor"
    for name, network, shape in engines():
        engine = pb.compile(network.eval(), torch.randn(1, *shape), threads=1)
        engine.save(folder / "pbe" / f"{name}.pbe")
    (folder / "code" / "code.json").write_text(json.dumps({"model": "nets:build", "folder": "/a", "seal": "0" * 64}))


def engines() -> list[tuple[str, torch.nn.Module, tuple[int, ...]]]:
    """Networks with every kind of stage, small enough for an engine of a few kilobytes."""
    nn = torch.nn
    images = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )
    rows = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 3))
    tokens = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    return [("images", images, (3, 6, 6)), ("rows", rows, (6,)), ("tokens", tokens, (12, 8))]


def corpus(name: str, folder: Path = CORPUS) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / name).iterdir())]


# -- the whole -----------------------------------------------------------------------------------------------------


def blind(name: str, seconds: float, seed: int, faults: Path | None, most: int = 10**9) -> dict[str, Any]:
    """Change the corpus at random for a while; return how often, and the faults by their message."""
    chance, seeds = random.Random(f"{seed}/{name}"), corpus(name)
    found: dict[str, str] = {}
    began, tried = time.monotonic(), 0
    with TemporaryDirectory(prefix="fuzz-") as place:
        while time.monotonic() - began < seconds and tried < most:
            content = seeds[tried] if tried < len(seeds) else changed(chance.choice(seeds), seeds, chance)
            tried += 1
            what = fault_of(name, content, Path(place))
            if what and what not in found:
                found[what] = keep(content, name, faults)
    return {"tried": tried, "seconds": round(time.monotonic() - began, 1), "faults": found}


def keep(content: bytes, name: str, faults: Path | None) -> str:
    label = f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if faults is not None:
        faults.mkdir(parents=True, exist_ok=True)
        (faults / label).write_bytes(content)
    return label


def led(name: str, seconds: float, seed: int, faults: Path | None) -> None:
    """Let atheris change the corpus, led by what is reached in the package; it ends the process by itself."""
    import atheris

    place = TemporaryDirectory(prefix="fuzz-")

    def one(content: bytes) -> None:
        what = fault_of(name, sealed(content), Path(place.name))
        if what:
            keep(content, name, faults)
            raise RuntimeError(what)

    for function in own_functions():  # all of torch would take minutes, and lead nowhere
        atheris.instrument_func(function)
    options = [
        f"-max_total_time={int(seconds)}",
        f"-seed={seed + 1}",
        "-timeout=20",
        "-rss_limit_mb=6000",
        "-print_final_stats=1",
    ]
    with TemporaryDirectory(prefix="fuzz-corpus-") as grown:
        atheris.Setup([sys.argv[0], *options, grown, str(CORPUS / name)], one)
        atheris.Fuzz()


def own_functions() -> list[Any]:
    """Return the functions and methods of the package and of YAML's reader."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in ("pareback", "yaml")]
    holders = [each for module in modules for each in (module, *vars(module).values())]
    found = {
        id(value): value
        for holder in holders
        if isinstance(holder, (type, type(sys)))
        for value in vars(holder).values()
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] in ("pareback", "yaml")
    }
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    """Feed the readers and print a table; 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("readers", nargs="*", metavar="READER", help=f"of {', '.join(READERS)}; all without any")
    add("--seconds", type=float, default=10.0, help="for each reader (%(default)s)")
    add("--seed", type=int, default=0, help="decides every change (%(default)s)")
    add("--engine", choices=("blind", "atheris"), default="blind", help="what changes the corpus (%(default)s)")
    add("--faults", type=Path, help="keep the bytes of every fault in this folder")
    add("--out", type=Path, help="write the counts as JSON here")
    add("--write", action="store_true", help="write the corpus anew, and do nothing else")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.write:
        write_corpus(CORPUS)
        return 0
    readers = options.readers or list(READERS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if options.engine == "atheris":
        led(readers[0], options.seconds, options.seed, options.faults)
    found = {name: blind(name, options.seconds, options.seed, options.faults) for name in readers}
    print("| reader | tried | seconds | faults |\n| --- | ---: | ---: | ---: |")
    for name, one in found.items():
        print(f"| {name} | {one['tried']:,} | {one['seconds']:.0f} | {len(one['faults'])} |")
    for name, one in found.items():
        for what, label in one["faults"].items():
            print(f"{name}: {what} ({label})", file=sys.stderr)
    if options.out is not None:
        about = environment.describe(torch.device("cpu"))
        machine = {key: about[key] for key in ("python", "torch", "pareback", "cpu", "platform")}
        files.write_json(
            options.out, {"seed": options.seed, "date": about["start"][:10], "machine": machine, "readers": found}
        )
    return 1 if any(one["faults"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
