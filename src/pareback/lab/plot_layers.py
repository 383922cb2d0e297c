"""How sparse each layer became, for several runs of a network: the paper's figure of per-layer sparsity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plot_style import figure, layer, legend_below, look
from .record import Record


def plot(groups: Mapping[str, Sequence[Record]], path: Path, label: Callable[[Record], str] | None = None) -> Path:
    """Draw each network's runs in a panel of its own, under its title, and return ``path``.

    The legend is the first panel's: where there are several, ``label`` gives runs that belong together one name.
    """
    most = max(len(_layers(records)) for records in groups.values())
    size = (max(4.5, 0.42 * most + 1.5) * len(groups), 4.6)
    with figure(1, len(groups), size, path) as (drawn, axes):
        for panel, (title, records) in zip(axes[0], groups.items(), strict=True):
            _panel(panel, title, records, label or _label)
        axes[0][0].set_ylabel("zeros in the layer (%)")
        legend_below(drawn, axes[0][0])
    return path


def sparsities(record: Record) -> dict[str, float]:
    """Return the percentage of zeros of each pruned tensor, by name."""
    return {t["name"]: 100.0 * (1.0 - t["nonzeros"] / t["size"]) for t in record.pruned_tensors}


def _layers(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in sparsities(record)))


def _label(record: Record) -> str:
    return f"{record.name} ({100 * record.result['sparsity']:.2f} % in all)"


def _panel(panel: Any, title: str, records: Sequence[Record], label: Callable[[Record], str]) -> None:
    names = _layers(records)
    for record, style in zip(records, look(records), strict=True):
        found = sparsities(record)
        places = [place for place, name in enumerate(names) if name in found]
        panel.plot(places, [found[names[place]] for place in places], label=label(record), markersize=5, **style)
    shapes = {tensor["name"]: tensor["shape"] for record in records for tensor in record.pruned_tensors}
    panel.set_xticks(range(len(names)), [layer(name, shapes[name]) for name in names], rotation=90, fontsize=8)
    panel.set_xlim(-0.5, len(names) - 0.5)
    panel.margins(y=0.06)
    panel.set_ylim(max(0.0, panel.get_ylim()[0]), min(101.0, panel.get_ylim()[1]))
    panel.set_title(title)
