"""What is timed: a model and the examples it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from ..artifact import save
from ..artifact.state import tensors_of
from ..artifact.weights import write_plain
from ..report import inspect


@dataclass(frozen=True)
class Subject:
    """A model in eval mode with float32 weights on the CPU, examples for it, and a line on where both come from."""

    name: str
    model: nn.Module
    inputs: Tensor
    about: str = ""

    def batch(self, size: int) -> Tensor:
        """Return so many examples, from the first on and around again."""
        times = -(-size // len(self.inputs))
        return self.inputs.repeat(times, *[1] * (self.inputs.ndim - 1))[:size].contiguous()

    def figures(self) -> dict[str, Any]:
        """Return the counts that do not depend on a runtime: weights, operations, bytes in a file."""
        report = inspect(self.model, example_inputs=self.inputs[:1])
        assert report.total_flops is not None
        assert report.nonzero_flops is not None
        with TemporaryDirectory() as folder:
            packed, plain = Path(folder) / "model.pare", Path(folder) / "model.safetensors"
            save(self.model, packed)
            write_plain(plain, tensors_of(self.model))
            sizes = packed.stat().st_size, plain.stat().st_size
        return {
            "parameters": report.params,
            "nonzeros": report.nonzeros,
            "sparsity": report.sparsity,
            "flops": float(report.total_flops),
            "nonzero_flops": float(report.nonzero_flops),
            "flop_density": float(report.nonzero_flops / report.total_flops) if report.total_flops else 1.0,
            "pare_bytes": sizes[0],
            "safetensors_bytes": sizes[1],
        }
