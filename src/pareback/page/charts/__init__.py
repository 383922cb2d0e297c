"""Every chart of the page, by the name of its place there."""

from __future__ import annotations

from .runs import convergence, histograms, layers, sparsity
from .tradeoff import tradeoff

CHARTS = {
    "tradeoff": tradeoff,
    "convergence": convergence,
    "sparsity": sparsity,
    "layers": layers,
    "histograms": histograms,
}
