"""Measures what could help at 98 %: small networks on scikit-learn's digits, from scratch, with SGD.

    python benchmarks/ablations.py --out results/ablations.json

Beside the library as it is: half the gradient for pruned weights, HAM's multiplicative step after each of SGD's, dense
and pruned passes that teach each other, and the average of the network's own weights as its teacher. The dense network
is given HAM's step and such a teacher as well. A quarter of the training images is held out and judges; the test images
are not looked at. Eight seeds, some minutes on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from pareback.reproduce.peers_table import standard_error, with_error
from ramps import LONG, SPARSITY, accuracies, main
from threshold_rates import dense

#: Network and learning rate. At the lower one the second broke down while thresholds followed the spread of weights.
NETWORKS = (("lenet-300-100", 0.1), ("conv", 0.1), ("conv", 0.05))

_HAM = {"optimizer.kind": "ham"}
_SELF = {"teacher.run": "self", "teacher.weight": 0.5}
#: What is changed, by name; the first is the library as it is. Names that begin with dense are not pruned.
TRIED: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "half the gradient": {"goal.straight_through": 0.5},
    "HAM": _HAM,
    "mutual": {"train.mutual": True},
    "taught by itself": _SELF,
    "dense": {},
    "dense, HAM": _HAM,
    "dense, taught by itself": _SELF,
}


def rows(folder: Path, seeds: int) -> Iterator[dict[str, Any]]:
    """Train each network with everything that is tried, and yield mean accuracies and what each gains."""
    for network, rate in NETWORKS:
        start, apart = dense(network, "sgd", rate, LONG), folder / f"{rate:g}"
        found = {name: accuracies(apart, start, name, changes, seeds) for name, changes in TRIED.items()}
        for name, values in found.items():
            plain = found["dense" if name.startswith("dense") else "as it is"]
            gained = [one - other for one, other in zip(values, plain, strict=True)]
            asked = {"model": network, "lr": rate, "tried": name}
            row = {**asked, "sparsity": 0.0 if name.startswith("dense") else SPARSITY}
            error = standard_error(gained)
            print(*asked.values(), f"{mean(values):.2f}", with_error(mean(gained), error, sign=True), flush=True)
            yield {**row, "accuracy": mean(values), "gained": mean(gained), "error": error, "accuracies": values}


if __name__ == "__main__":
    main(__doc__, rows, 8, LONG)
