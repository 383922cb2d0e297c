"""How many times as fast pruned models run in pareback's engine as in the best dense float32 runtime.

    python benchmarks/engine.py --out results/engine.json                      # everything, about an hour and a half
    python benchmarks/engine.py --only mlp,linear --threads 1 --out part.json  # some rows, a few minutes
    python benchmarks/engine.py --only trained --data cifar100.npz --accuracy --out results/engine.json
    python benchmarks/engine.py --against v0.1 --only wrn,resnet50 --runtimes eager --out results/engine-against.json

Every runtime has a process of its own, and they take turns: PyTorch eager, torch.compile, onnxruntime and OpenVINO on
one model, the engine on the same model at each sparsity. Dense runtimes multiply zeros like other numbers, so that one
measurement of them serves all sparsities. Ratios are medians over rounds of ratios within rounds. A row is written as
soon as it is measured; rows that the file already holds are not measured again, unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

import pareback as pb
from pareback import files
from pareback.bench.comparison import machine
from pareback.bench.contest import Case, Contest, Effort, Entrant, ratio
from pareback.bench.masks import mask_uniformly_
from pareback.bench.runtimes import RUNTIMES
from pareback.bench.subject import Staged, Subject
from pareback.lab.data.npz import npz
from pareback.lab.models.wrn import WideResNet

ROOT = Path(__file__).parent.parent
#: Networks that were really trained and pruned on CIFAR-100, by the name of their column.
TRAINED = {f"{share} % trained": ROOT / f"results/paper/models/taught-{share}-1.pare" for share in (95, 98)}
DENSE = ("eager", "compile", "onnxruntime", "openvino")
#: Ends the names of columns of another version's engine.
BEFORE = ", before"


@dataclass(frozen=True)
class Workload:
    """A network, the shape of its examples, the layers that stay dense, and the batch sizes."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dense: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 16, 64)


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50()


def _vit() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


def _lenet() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


WORKLOADS = {
    "wrn": Workload("WRN-16-8, 32×32", lambda: WideResNet(16, 8), (3, 32, 32), ("fc.*",)),
    "resnet50": Workload("ResNet-50, 224×224", _resnet50, (3, 224, 224), ("conv1.*",)),
    "mlp": Workload("MLP 784-4096-4096-10", _mlp, (784,), ("4.*",)),
    "linear": Workload("Linear 4096×4096", lambda: nn.Sequential(nn.Linear(4096, 4096)), (4096,), (), (1, 8, 64)),
    "vit": Workload("ViT-Tiny/16, 224×224", _vit, (3, 224, 224), ("patch_embed.*", "head.*", "pos_embed")),
    "lenet": Workload("LeNet-300-100, 8×8", _lenet, (64,), ("4.*",)),
    "trained": Workload("WRN-16-8, trained", lambda: WideResNet(16, 8), (3, 32, 32)),
}


def subjects(name: str, sparsities: Sequence[float], examples: Tensor | None) -> dict[str, Subject]:
    """Return the models to run, by the name of their column."""
    workload = WORKLOADS[name]
    inputs = torch.randn(64, *workload.shape, generator=torch.Generator().manual_seed(7))
    if name == "trained":
        shown = inputs if examples is None else examples[:64]
        return {
            column: Subject(name, pb.load(path, workload.build()).eval(), shown) for column, path in TRAINED.items()
        }
    made = {}
    for sparsity in sparsities:
        torch.manual_seed(0)
        model = mask_uniformly_(workload.build(), sparsity, inputs[:4], exclude=workload.dense)
        made[f"{100 * sparsity:g} %"] = Subject(name, model, inputs)
    return made


def measured(
    name: str,
    variants: dict[str, Subject],
    threads: int,
    batches: Sequence[int],
    runtimes: Sequence[str],
    effort: Effort,
    before: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure a network at one number of threads and yield a row for each batch size.

    With ``before``, the sources of another version, its engine takes turns with this one's.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        staged = {column: Staged(subject, folder / str(i)) for i, (column, subject) in enumerate(variants.items())}
        first = next(iter(staged.values()))
        entrants = [Entrant(runtime, runtime, first) for runtime in runtimes]
        entrants += [Entrant(column, "engine", one) for column, one in staged.items()]
        if before is not None:
            entrants += [Entrant(f"{column}{BEFORE}", "engine", one, before) for column, one in staged.items()]
        figures = {column: subject.figures() for column, subject in variants.items()}
        with Contest(entrants, threads, folder) as contest:
            for batch in batches:
                yield row(name, contest.run(batch, effort), figures)


def row(name: str, case: Case, figures: dict[str, Any]) -> dict[str, Any]:
    """Return a case with the ratios that the table shows."""
    dense, int8 = case.best("dense"), case.best("int8")
    engines = {outcome.name: outcome for outcome in case.outcomes if outcome.kind == "engine"}
    columns = [outcome for column, outcome in engines.items() if not column.endswith(BEFORE)]
    older = {column.removesuffix(BEFORE): outcome for column, outcome in engines.items() if column.endswith(BEFORE)}
    return {
        "workload": name,
        "title": WORKLOADS[name].title,
        "date": date.today().isoformat(),
        "best_dense": dense and dense.name,
        "ratios": {one.name: ratio(dense, one) if dense else math.nan for one in columns},
        "ratios_to_int8": {one.name: ratio(int8, one) if int8 else math.nan for one in columns},
        "ratios_to_before": {one.name: ratio(older[one.name], one) for one in columns if one.name in older},
        "figures": figures,
        **case.as_dict(),
    }


# -- accuracy --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def accuracy(
    path: Path, images: Tensor, labels: Tensor, known: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Count the test images that eager and the engine get right, a hundred at a time."""
    model = pb.load(path, WideResNet(16, 8)).eval()
    engine = pb.compile(model, images[:100])
    counts = {"images": 0, "eager": 0, "engine": 0, "same": 0, **known}
    for begin in range(counts["images"], len(images), 100):
        x, y = images[begin : begin + 100], labels[begin : begin + 100]
        eager, ours = model(x).argmax(1), engine(x).argmax(1)
        counts["images"] += len(x)
        for key, right in (("eager", eager == y), ("engine", ours == y), ("same", eager == ours)):
            counts[key] += int(right.sum())
        save(counts)
    points = 100 / counts["images"]
    print(f"{path.name}, accuracy on {counts['images']:,} images: eager {points * counts['eager']:.2f} %, "
          f"engine {points * counts['engine']:.2f} %, same class {points * counts['same']:.2f} %")  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------------


def as_markdown(content: dict[str, Any]) -> str:
    """Return a table for each network and number of threads."""
    about = content["environment"]
    parts = [
        (f"Against the engine of revision {content['against']}. " if "against" in content else "")
        + f"{about['cpu']}, {about['cores']} cores, {about['register_bits']}-bit registers; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "Runtimes take turns, a tenth of a second each. × is the median over rounds of the ratio within a round, ms "
        "the median over rounds of a call: where the machine's speed moved, one does not follow from the other.",
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in content["rows"].values():
        groups.setdefault((one["title"], one["threads"]), []).append(one)
    for (title, threads), rows in groups.items():
        parts += [f"## {title}, {'one thread' if threads == 1 else f'{threads} threads'}", _table(rows)]
    for column, found in content.get("accuracy", {}).items():
        share = {key: 100 * found[key] / found["images"] for key in ("eager", "engine", "same")}
        parts.append(
            f"{column}, on {found['images']:,} test images: eager {share['eager']:.2f} %, engine "
            f"{share['engine']:.2f} %, the same class for {share['same']:.2f} %."
        )
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for one in rows for column in one["ratios"]))
    extra = [name for name in (*DENSE, "int8") if any(_found(one, name) for one in rows)]
    older = [column for column in columns if any(column in one.get("ratios_to_before", {}) for one in rows)]
    header = ["batch", "best dense", *columns, *[f"{column} over before" for column in older]]
    header += [f"{name}, ms" for name in (*extra, *columns)]
    lines = [header, ["--:"] * len(header)]
    for one in sorted(rows, key=lambda one: int(one["batch"])):
        cells = [str(one["batch"]), str(one["best_dense"])]
        cells += [_number(one["ratios"].get(column), 2, "×") for column in columns]
        cells += [_number(one.get("ratios_to_before", {}).get(column), 2, "×") for column in older]
        cells += [_number(_milliseconds(one, name), 2) for name in (*extra, *columns)]
        lines.append(cells)
    flagged = [f"{o['name']}: {o['problem'] or 'its results differ'}" for one in rows for o in one["outcomes"]
               if o["problem"] or o["differs"]]  # fmt: skip
    grid = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n\n".join([grid, *dict.fromkeys(flagged)])


def _found(one: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((outcome for outcome in one["outcomes"] if outcome["name"] == name), None)


def _milliseconds(one: dict[str, Any], name: str) -> float | None:
    found = _found(one, name)
    return None if found is None or found["seconds"] is None else 1e3 * found["seconds"]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}{unit}"


# -- another version -------------------------------------------------------------------------------------------------


@contextmanager
def built(revision: str) -> Iterator[Path]:
    """Check out a revision of this repository into a folder of its own, build it, and yield its sources."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            yield tree / "src"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


# -- the command -----------------------------------------------------------------------------------------------------


class Book:
    """The file that rows are written to, one by one, and the Markdown beside it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {"environment": machine(), "rows": {}}
        if path is not None and path.exists():
            self.content = {**json.loads(path.read_text()), "environment": machine()}

    def has(self, key: str) -> bool:
        return key in self.content["rows"]

    def write(self, key: str, value: Any) -> None:
        self.content["rows"][key] = files.plain(value)
        self._save()

    def count(self, column: str, counts: dict[str, Any]) -> None:
        self.content.setdefault("accuracy", {})[column] = counts
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            files.write_json(self._path, self.content)
            files.write_text(self._path.with_suffix(".md"), as_markdown(self.content))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default=",".join(WORKLOADS), help="networks, with commas (%(default)s)")
    add("--sparsity", default="0.8,0.85,0.9,0.95,0.98", help="shares of zeros (%(default)s)")
    add("--batch", help="batch sizes (those of the network by default)")
    add("--threads", default="1,2", help="numbers of threads (%(default)s)")
    add("--runtimes", default=",".join(DENSE), help=f"of {', '.join(RUNTIMES)} (%(default)s)")
    add("--against", metavar="REV", help="let the engine of another revision take turns, and say how it compares")
    add("--seconds", type=float, default=8.0, help="for the rounds of a row (%(default)s)")
    add("--again", action="store_true", help="measure rows that --out already holds")
    add("--data", type=Path, help="the .npz file of CIFAR-100, for the trained model's images")
    add("--accuracy", action="store_true", help="count what the trained model gets right, instead of timing")
    add("--images", type=int, default=10_000, help="test images to count (%(default)s)")
    add("--out", type=Path, help="the JSON file; the tables are written beside it as .md")
    add("--table", action="store_true", help="write the tables of --out again and measure nothing")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    book = Book(options.out)
    if options.table:
        print(as_markdown(book.content))
        return
    images = labels = None
    if options.data is not None:
        source = npz(options.data, torch.device("cpu"), augment=False)
        pairs = list(source.test_batches(batch=500))
        images, labels = (torch.cat([pair[i] for pair in pairs])[: options.images] for i in (0, 1))
    if options.accuracy:
        if images is None or labels is None:
            raise SystemExit("--accuracy needs the test images: --data cifar100.npz.")
        for column, path in TRAINED.items():
            known = {} if options.again else book.content.get("accuracy", {}).get(column, {})
            accuracy(path, images, labels, known, partial(book.count, column))
        return
    with built(options.against) if options.against else nullcontext() as before:
        if options.against:
            book.content["against"] = options.against
        measure(options, book, images, before)


def measure(options: argparse.Namespace, book: Book, images: Tensor | None, before: Path | None) -> None:
    """Measure the rows that are asked for and not there."""
    sparsities = [float(word) for word in options.sparsity.split(",")]
    effort = Effort(seconds=options.seconds)
    for name in options.only.split(","):
        batches = [int(word) for word in options.batch.split(",")] if options.batch else WORKLOADS[name].batches
        variants = None
        for threads in map(int, options.threads.split(",")):
            keys = {batch: f"{name}, batch {batch}, threads {threads}" for batch in batches}
            left = [batch for batch, key in keys.items() if options.again or not book.has(key)]
            if not left:
                continue
            variants = variants or subjects(name, sparsities, images)
            if before is not None:  # in classes of torch alone: another version may have its own elsewhere
                variants = {c: replace(one, model=torch.fx.symbolic_trace(one.model)) for c, one in variants.items()}
            for one in measured(name, variants, threads, left, options.runtimes.split(","), effort, before):
                book.write(keys[one["batch"]], one)
                print(_table([one]), flush=True)


if __name__ == "__main__":
    main()
