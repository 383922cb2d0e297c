"""What a saved engine holds and was tuned for, without making it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...artifact import Description, describe
from ...artifact.container import Reader, blaming
from ...messages import counted
from ..graph.operation import TorchCall, is_bookkeeping
from ..graph.ops import WeightedOp
from ..report import operation_name
from ..stages.plan import EnginePlan
from .reading import plan_in, processor_in
from .writing import made_by


@dataclass(frozen=True)
class EngineFile:
    """A compiled engine in a file. Prints as lines and a table; :meth:`as_dict` is for machines."""

    inputs: tuple[tuple[str, str], ...]  #: name and shape
    layers: int  #: convolutions and linear layers in the engine's own kernels
    left: tuple[str, ...]  #: operators that PyTorch runs
    tuned: tuple[tuple[int, tuple[int, ...]], ...]  #: numbers of threads, each with its batch sizes
    made_by: tuple[tuple[str, Any], ...]
    ready: bool  #: whether what was measured counts on this machine
    tensors: Description

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, ready for JSON."""
        own = {key: value for key, value in asdict(self).items() if key != "tensors"}
        own["made_by"] = dict(self.made_by)
        own["tuned"] = {str(threads): list(batches) for threads, batches in self.tuned}
        return {"engine": own, **self.tensors.as_dict()}

    def __str__(self) -> str:
        made = dict(self.made_by)
        inputs = ", ".join(f"{name} {shape}" for name, shape in self.inputs)
        lines = [
            str(self.tensors),
            f"engine:   {counted(self.layers, 'layer')} for {inputs}"
            + (f"; PyTorch runs {', '.join(self.left)}" if self.left else ""),
        ]
        for threads, batches in self.tuned:
            lines.append(f"tuned:    {counted(threads, 'thread')}, batch {', '.join(map(str, batches)) or 'none'}")
        where = "ready here" if self.ready else "it is tuned anew here"
        lines.append(f"made by:  pareback {made.get('pareback')} on {made.get('processor')}; {where}")
        return "\n".join(lines)


def describe_engine(path: Path) -> EngineFile:
    """Check a saved engine and say what it is."""
    found = describe(path)
    with blaming(path), Reader(path) as reader:
        plan, content = plan_in(reader)
        made = processor_in(content)
    return EngineFile(
        tuple((shown, _shape(plan, name)) for shown, name in zip(plan.call.names, plan.inputs, strict=True)),
        sum(isinstance(one, WeightedOp) for one in _own(plan)),
        tuple(sorted({operation_name(one) for one in _left(plan)})),
        tuple((threads, tuple(sorted(choices.dense))) for threads, choices in sorted(plan.chosen.items())),
        tuple(sorted(made.items())),
        made == made_by(),
        found,
    )


def _shape(plan: EnginePlan, name: str) -> str:
    sizes = [str(size) if isinstance(size, int) else "batch" for size in plan.shapes.sizes[name]]
    return "×".join(sizes)


def _own(plan: EnginePlan) -> list[Any]:
    return [one for stage in plan.stages if stage.kind != "torch" for one in stage.chain.operations]


def _left(plan: EnginePlan) -> list[Any]:
    calls = [one for stage in plan.stages if stage.kind == "torch" for one in stage.chain.operations]
    return [one for one in calls if not isinstance(one, TorchCall) or not is_bookkeeping(one)]
