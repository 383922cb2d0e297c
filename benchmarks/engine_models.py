"""Models of torchvision and timm in pareback's engine: how fast against eager and the best dense runtime, and what is
left to PyTorch and why.

    python benchmarks/engine_models.py --out results/engine-models.json        # all of them, about an hour
    python benchmarks/engine_models.py --only mobilenet_v2,convnext_tiny       # some, a minute each

One thread, batch 1, the same share of zeros in every layer. Eager, onnxruntime, OpenVINO and the engine have a process
each and take turns; ratios are medians over rounds of ratios within rounds. Models that the file already holds are not
measured again, unless --again is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine_networks import GptBlock, UNet
from pareback import files
from pareback.bench.comparison import machine
from pareback.bench.contest import Contest, Effort, Entrant, ratio
from pareback.bench.masks import mask_uniformly_
from pareback.bench.subject import Staged, Subject

RUNTIMES = ("eager", "onnxruntime", "openvino")


# -- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A model and the shape of its examples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 224, 224)


def _torchvision(name: str, **options: Any) -> nn.Module:
    model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(**options)
    return model


def _timm(name: str) -> nn.Module:
    """Return a network as training leaves it: norms that begin at zero would take their convolutions out of it."""
    model: nn.Module = importlib.import_module("timm").create_model(name)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 and key.endswith("weight") and not parameter.any():
            nn.init.ones_(parameter)
    return model


_OF_TORCHVISION = (
    *("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s"),
    *("convnext_tiny", "densenet121", "squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "regnet_y_800mf"),
    *("regnet_x_800mf", "resnet18", "resnet50", "resnext50_32x4d", "vgg11_bn", "alexnet", "swin_t", "vit_b_16"),
)
_OF_TIMM = (
    *("darknet53", "cspresnet50", "ghostnet_100", "seresnet50", "repvgg_a0", "mixnet_s", "tf_efficientnet_lite0"),
    *("mobilenetv4_conv_small", "convnextv2_nano", "vit_tiny_patch16_224", "hrnet_w18_small", "dla34", "mixer_s16_224"),
    "resnet50_gn",
)
ENTRIES: dict[str, Entry] = {
    **{name: Entry(partial(_torchvision, name)) for name in _OF_TORCHVISION},
    "googlenet": Entry(partial(_torchvision, "googlenet", init_weights=False, aux_logits=False)),
    **{name: Entry(partial(_timm, name)) for name in _OF_TIMM},
    "unet_bilinear": Entry(partial(UNet, "bilinear"), (3, 128, 128)),
    "unet_nearest": Entry(partial(UNet, "nearest"), (3, 128, 128)),
    "gpt_block": Entry(GptBlock, (128, 768)),
}


def measured(name: str, sparsity: float, effort: Effort) -> dict[str, Any]:
    """Return a model's times, ratios and what the engine left to PyTorch."""
    entry = ENTRIES[name]
    torch.manual_seed(0)
    inputs = torch.randn(2, *entry.shape)
    model = mask_uniformly_(entry.build(), sparsity, inputs)
    with tempfile.TemporaryDirectory() as place:
        os.environ["PAREBACK_CACHE"] = str(Path(place) / "cache")  # so that the time to be ready is a cold compile's
        staged = Staged(Subject(name, model, inputs), Path(place))
        entrants = [Entrant(runtime, runtime, staged) for runtime in (*RUNTIMES, "engine")]
        with Contest(entrants, 1, Path(place)) as contest:
            case = contest.run(1, effort)
    engine, best, eager = case["engine"], case.best("dense"), case["eager"]
    return {
        "date": date.today().isoformat(),
        "best_dense": best and best.name,
        "ratio": best and ratio(best, engine),
        "ratio_to_eager": ratio(eager, engine),
        "report": engine.remark,
        "compile_seconds": engine.ready,
        **case.as_dict(),
    }


def as_line(name: str, one: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    times = {outcome["name"]: outcome for outcome in one["outcomes"]}
    engine = times["engine"]
    if engine["problem"] or one["ratio"] is None:
        return [name, "–", "–", "–", "–", "–", "–", "–", engine["problem"] or "no dense runtime ran it"]
    milliseconds = [f"{1e3 * times[runtime]['seconds']:.2f}" for runtime in (*RUNTIMES, "engine")]
    left = " ".join(line for line in one["report"].splitlines()[1:])
    wrong = f"differs by {engine['error']:.0e}; " if engine["differs"] else ""
    ratios = [f"{one['ratio']:.2f}×", f"{one['ratio_to_eager']:.2f}×"]
    return [name, *ratios, *milliseconds, f"{one['compile_seconds']:.0f}", wrong + (left or "nothing")]


def as_markdown(content: dict[str, Any]) -> str:
    """Return the table."""
    about = content["environment"]
    header = ["model", "over best dense", "over eager", *[f"{one}, ms" for one in (*RUNTIMES, "engine")]]
    header += ["ready after, s", "left to PyTorch, and why"]
    rows = [header, ["---", *["--:"] * (len(header) - 2), "---"]]
    rows += [as_line(name, one) for name, one in content["models"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    grid = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    about_it = f"{about['cpu']}, one thread, batch 1, {content['sparsity']:.0%} zeros; {versions}"
    return f"# Networks in the engine\n\n{about_it}\n\n{grid}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ENTRIES), help="models, with commas (%(default)s)")
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of zeros (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the rounds of a model (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure models that --out already holds")
    parser.add_argument("--out", type=Path, help="the JSON file; the table is written beside it as .md")
    options = parser.parse_args()
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))  # for the processes that load the networks
    content: dict[str, Any] = {"sparsity": options.sparsity, "models": {}}
    if options.out is not None and options.out.exists():
        content = json.loads(options.out.read_text())
    content["environment"] = machine()
    for name in options.only.split(","):
        if name in content["models"] and not options.again:
            continue
        content["models"][name] = files.plain(measured(name, options.sparsity, Effort(options.seconds)))
        print("  ".join(as_line(name, content["models"][name])), flush=True)
        if options.out is not None:
            files.write_json(options.out, content)
            files.write_text(options.out.with_suffix(".md"), as_markdown(content))


if __name__ == "__main__":
    main()
