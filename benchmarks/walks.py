"""How much of the package one weight and one command pass through: files entered, and changes from file to file.

    python benchmarks/walks.py [--out FILE]

A weight: one step, ``finish()``, ``pb.save``, ``pb.load``, ``pb.compile`` and one call of the engine. A command:
``pareback train`` on scikit-learn's digits for one epoch, then ``pareback page`` on its folder. Only calls of functions
after importing count. docs/architecture.md has what came out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

import pareback as pb
from pareback.cli import main as pareback

PACKAGE = Path(pb.__file__).parent


class Walk:
    """The files of the package that calls go through, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls = 0

    def enter(self, code: CodeType) -> None:
        if not code.co_filename.startswith(str(PACKAGE)) or code.co_name == "<module>":
            return
        self.calls += 1
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        if not self.files or self.files[-1] != file:
            self.files.append(file)

    def of(self, what: Callable[[], object]) -> dict[str, Any]:
        """Walk through ``what`` and return the numbers."""
        sys.setprofile(lambda frame, event, _: self.enter(frame.f_code) if event == "call" else None)
        try:
            what()
        finally:
            sys.setprofile(None)
        return {"files": len(set(self.files)), "hops": len(self.files) - 1, "calls": self.calls}


def weight(folder: Path) -> dict[str, dict[str, Any]]:
    """The way of a weight, part by part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=10)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(9):
        step()
    engines: list[Any] = []
    parts: dict[str, Callable[[], object]] = {
        "step": step,
        "finish": pruner.finish,
        "save": lambda: pb.save(model, folder / "model.pare"),
        "load": lambda: pb.load(folder / "model.pare", model),
        "compile": lambda: engines.append(pb.compile(model.eval(), x[:1])),
        "call": lambda: engines[0](x[:1]),
    }
    return {name: Walk().of(what) for name, what in parts.items()}


def command(folder: Path) -> dict[str, dict[str, Any]]:
    """The way of a command: from a recipe to a run folder, and from there to a page."""
    run, page = folder / "runs" / "digits", folder / "page.html"
    options = ["--goal.kind", "budget", "--goal.sparsity", "0.9", "--train.epochs", "1", "--quiet"]
    parts = {
        "train": ["train", "--out", str(run), *options],
        "page": ["page", str(run.parent), "-o", str(page)],
    }
    found = {}
    for name, argv in parts.items():
        for _ in range(2):  # the first time imports are counted with it
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = Walk().of(lambda argv=argv: pareback(argv))  # type: ignore[misc]
            argv.append("--force") if name == "train" else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"weight": weight(Path(folder)), "command": command(Path(folder))}
    files = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    sizes = {name: len([*(PACKAGE / name).glob("*.py")]) for name in sorted(files)}
    content = {**found, "files": sum(sizes.values()), "folders": sizes}
    print(json.dumps(content, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
