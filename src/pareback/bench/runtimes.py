"""The runtimes: how each is told its threads and its model, and what then runs one batch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

#: Runs a batch, an array, and returns the first output as another.
Call = Callable[[Any], Any]
Kind = Literal["dense", "int8", "engine"]


@dataclass(frozen=True)
class Runtime:
    """A way to run a model on the CPU."""

    label: str
    kind: Kind  #: dense: float32, the same results as eager; int8: other results; engine: pareback's own
    form: str  #: the file that it reads, see :class:`pareback.bench.subject.Staged`
    packages: tuple[str, ...]  #: what has to be installed
    start: Callable[[Path, Any, int], tuple[Call, str]]  #: from a file, a batch and threads; with a remark

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]


def _module(path: Path) -> torch.nn.Module:
    """Read the model that the parent process has just written."""
    model: torch.nn.Module = torch.load(path, weights_only=False)
    return model.eval()


def _first(result: Any) -> Any:
    return torch.utils._pytree.tree_leaves(result)[0].numpy()


def _eager(path: Path, batch: Any, threads: int) -> tuple[Call, str]:
    model = _module(path)

    def call(x: Any) -> Any:
        with torch.inference_mode():
            return _first(model(torch.from_numpy(x)))

    return call, ""


def _compiled(path: Path, batch: Any, threads: int) -> tuple[Call, str]:
    import torch._inductor.config

    torch._dynamo.reset()
    torch._inductor.config.freezing = True  # weights are constants: batch norms folded, weights laid out once
    model = torch.compile(_module(path), dynamic=False)

    def call(x: Any) -> Any:
        with torch.no_grad():
            return _first(model(torch.from_numpy(x)))

    return call, ""


def _engine(path: Path, batch: Any, threads: int) -> tuple[Call, str]:
    from ..runtime import compile

    engine = compile(_module(path), torch.from_numpy(batch), threads=threads)
    return lambda x: _first(engine(torch.from_numpy(x))), str(engine.report())


def _onnxruntime(path: Path, batch: Any, threads: int) -> tuple[Call, str]:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name("batch", len(batch))
    # Its threads would go on spinning after a call, at the cost of whatever is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name, outputs = session.get_inputs()[0].name, [session.get_outputs()[0].name]
    return lambda x: session.run(outputs, {name: x})[0], ""


def _openvino(path: Path, batch: Any, threads: int) -> tuple[Call, str]:
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape({model.inputs[0]: list(batch.shape)})
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # otherwise bfloat16 where the processor has it
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def call(x: Any) -> Any:
        request.infer({0: x}, share_inputs=True)
        return request.get_output_tensor(0).data

    return call, ""


_ONNX = ("onnx", "onnxscript")
RUNTIMES: dict[str, Runtime] = {
    "eager": Runtime("PyTorch eager", "dense", "module", (), _eager),
    "compile": Runtime("torch.compile", "dense", "module", (), _compiled),
    "onnxruntime": Runtime("onnxruntime", "dense", "onnx", (*_ONNX, "onnxruntime"), _onnxruntime),
    "openvino": Runtime("OpenVINO", "dense", "onnx", (*_ONNX, "openvino"), _openvino),
    "int8": Runtime("onnxruntime int8", "int8", "int8-static", (*_ONNX, "onnxruntime"), _onnxruntime),
    "int8-dynamic": Runtime("onnxruntime int8, dynamic", "int8", "int8-dynamic", (*_ONNX, "onnxruntime"), _onnxruntime),
    "engine": Runtime("pareback engine", "engine", "module", (), _engine),
}
DEFAULT = tuple(RUNTIMES)


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    names = ("torch", "numpy", "onnx", "onnxruntime", "openvino", "timm", "torchvision")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
