"""Measures what could help at 98 %: small networks on scikit-learn's digits, from scratch.

    python benchmarks/ablations.py --out results/ablations.json
    python benchmarks/ablations.py --networks vit-tiny --seeds 4 --out results/ablations-vit.json

Beside the library as it is: a longer ramp, half the gradient for pruned weights, HAM's multiplicative step after each
of SGD's, dense and pruned passes that teach each other, and the average of the network's own weights as its teacher.
The dense network is given HAM's step and such a teacher as well. A quarter of the training images is held out and
judges; the test images are not looked at. Eight seeds, some minutes on one core. The transformer takes half an hour;
it is trained with AdamW, which HAM's step is not made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pareback.reproduce.peers_table import standard_error, with_error
from ramps import LONG, SPARSITY, accuracies, main
from threshold_rates import dense

#: Learning rates of each network. At the lower one conv broke down while thresholds followed the spread of weights.
RATES = {"lenet-300-100": (0.1,), "conv": (0.1, 0.05), "vit-tiny": (0.001,)}
SLOW = ("vit-tiny",)

_HAM = {"optimizer.kind": "ham"}
_SELF = {"teacher.run": "self", "teacher.weight": 0.5}
#: What is changed, by name; the first is the library as it is. Names that begin with dense are not pruned.
TRIED: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "ramp 0.75": {"goal.ramp": 0.75},
    "half the gradient": {"goal.straight_through": 0.5},
    "HAM": _HAM,
    "mutual": {"train.mutual": True},
    "taught by itself": _SELF,
    "dense": {},
    "dense, HAM": _HAM,
    "dense, taught by itself": _SELF,
}


def rows(folder: Path, networks: Sequence[str], seeds: int) -> Iterator[dict[str, Any]]:
    """Train each network with everything that is tried, and yield mean accuracies and what each gains."""
    for network, rate in [(one, rate) for one in networks for rate in RATES[one]]:
        kind = "adamw" if network in SLOW else "sgd"
        start, apart = dense(network, kind, rate, LONG), folder / f"{rate:g}"
        tried = {name: changes for name, changes in TRIED.items() if kind == "sgd" or changes is not _HAM}
        found = {name: accuracies(apart, start, name, changes, seeds) for name, changes in tried.items()}
        for name, values in found.items():
            plain = found["dense" if name.startswith("dense") else "as it is"]
            gained = [one - other for one, other in zip(values, plain, strict=True)]
            asked = {"model": network, "lr": rate, "tried": name}
            row = {**asked, "sparsity": 0.0 if name.startswith("dense") else SPARSITY}
            error = standard_error(gained)
            print(*asked.values(), f"{mean(values):.2f}", with_error(mean(gained), error, sign=True), flush=True)
            yield {**row, "accuracy": mean(values), "gained": mean(gained), "error": error, "accuracies": values}


if __name__ == "__main__":
    main(__doc__, rows, [one for one in RATES if one not in SLOW], 8, LONG, SLOW)
