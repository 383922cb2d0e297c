"""What is timed: a model with the examples it is called with, and the files that runtimes read it from."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact import save, to_onnx
from ..artifact.state import tensors_of
from ..artifact.weights import write_plain
from ..report import inspect

#: Examples from which static quantisation learns the range of activations.
_CALIBRATION = 32


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


class Staged:
    """A subject's files, each written when the first runtime asks for it, into a folder that only its workers use."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self._folder = subject, folder
        self._references: dict[int, Tensor] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._makers = {
            "module": self._module,
            "onnx": self._onnx,
            "int8-static": self._static,
            "int8-dynamic": self._dynamic,
        }

    def path(self, form: str) -> Path:
        """Return the file in this form: module, onnx, int8-static or int8-dynamic."""
        path = self._folder / f"{form}.{'pt' if form == 'module' else 'onnx'}"
        if not path.exists():
            with _quiet():
                self._makers[form](path)
        return path

    @torch.inference_mode()
    def reference(self, batch: int) -> Tensor:
        """Return eager's results for a batch, the first output if there are several."""
        if batch not in self._references:
            leaves = torch.utils._pytree.tree_leaves(self.subject.model(self.subject.batch(batch)))
            self._references[batch] = leaves[0]
        return self._references[batch]

    def _module(self, path: Path) -> None:
        torch.save(self.subject.model, path)

    def _onnx(self, path: Path) -> None:
        to_onnx(self.subject.model, path, self.subject.batch(2))

    def _prepared(self) -> Path:
        """Return the ONNX file with batch norms folded, as quantisation wants it."""
        onnx = importlib.import_module("onnx")
        shapes = importlib.import_module("onnxruntime.quantization.shape_inference")
        path = self._folder / "prepared.onnx"
        if not path.exists():
            shapes.quant_pre_process(str(self.path("onnx")), str(path), skip_symbolic_shape=True)
            model = onnx.load(str(path))
            del model.graph.value_info[:]  # shapes from before weights were transposed
            onnx.save(model, str(path))
        return path

    def _static(self, path: Path) -> None:
        quantization = importlib.import_module("onnxruntime.quantization")
        quantization.quantize_static(
            str(self._prepared()),
            str(path),
            _examples(self.subject, self._prepared()),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
        )

    def _dynamic(self, path: Path) -> None:
        quantization = importlib.import_module("onnxruntime.quantization")
        quantization.quantize_dynamic(
            str(self._prepared()), str(path), weight_type=quantization.QuantType.QInt8, per_channel=True
        )


def _examples(subject: Subject, model: Path) -> Any:
    """Return what onnxruntime calibrates with."""
    quantization = importlib.import_module("onnxruntime.quantization")
    name = importlib.import_module("onnx").load(str(model)).graph.input[0].name

    class Examples(quantization.CalibrationDataReader):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            pairs = subject.batch(_CALIBRATION).split(2)
            self._left = iter([{name: pair.numpy()} for pair in pairs])

        def get_next(self) -> Any:
            return next(self._left, None)

    return Examples()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep exporters and quantisers from talking about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
