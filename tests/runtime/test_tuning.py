"""Ways to run a sparse convolution are timed by some of its rows, and its lists hold every weight."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pareback as pb
from pareback.runtime.graph.ops import Taps
from pareback.runtime.lower.convolution import KernelChoice, TiledConvolution
from pareback.runtime.lower.layout import LaneGrid, Layout
from pareback.runtime.lower.weights import nonzeros, tap_offsets


def _layer(size: int, height: int) -> TiledConvolution:
    taps = Taps(torch.randn(size, size, 3, 3), padding=1)
    source = Layout(size, height, height, LaneGrid(16, 1, 1), height, height, 1)
    return TiledConvolution(taps, torch.zeros(size), source, source, 0)


def test_a_sample_is_whole_tiles() -> None:
    layer = _layer(128, 28)
    rows, times = layer.sample(KernelChoice(False, (4, 4), 16, 128))
    assert rows % 4 == 0
    assert rows < 28
    assert rows * times == 28
    rows, times = layer.sample(KernelChoice(False, (3, 4), 16, 128))
    assert rows * times == 30  # ten tiles, the last of which overlaps the one before


def test_a_small_layer_is_timed_whole() -> None:
    assert _layer(4, 7).sample(KernelChoice(False, (4, 7), 4, 4)) == (7, 1.0)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_lists_hold_every_weight(block: int) -> None:
    weight = torch.randn(11, 8, 3, 3) * (torch.rand(11, 8, 3, 3) < 0.4)
    layout = Layout(8, 5, 5, LaneGrid(16, 1, 1), 5, 5, 1)
    taps = Taps(weight, padding=1)
    table, rows = nonzeros(taps, layout, block)
    flat, offsets, found = table.flatten(), tap_offsets(taps, layout).flatten(), torch.zeros(11, 72)
    for starts in rows.tolist():
        for out, (first, last) in enumerate(itertools.pairwise(starts)):
            for at in range(first, last):
                number, size = at - first, last - first
                four = 2 * (at - number % 4) if number < size // 4 * 4 else None
                place = 2 * at if four is None else four + number % 4
                value = 2 * at + 1 if four is None else four + 4 + number % 4
                tap = (offsets == flat[place]).nonzero().item()
                found[out, int(tap)] = flat[value : value + 1].view(torch.float32)
    assert torch.equal(found, weight.flatten(1))


FORGED = {
    "a tile that does not exist": [False, 5, 9, 16, 32],
    "no tile": [False, 0, 0, 16, 32],
    "more channels than there are": [False, 1, 4, 4096, 32],
    "no channels": [False, 1, 4, 0, 0],
    "negative": [False, -1, 4, -8, -1],
    "dense where it is not": [True, 16, 1, 0, 0],
    "halves": [False, 1.5, 4, 16.5, 32],
    "huge": [False, 1, 4, 16, 2**40],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_cache_is_tuned_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that no layer here would try gave errors of 1e16 or ended the process; they are not used."""
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)).eval()
    pb.prune_(model, pb.Budget(sparsity=0.9))
    x = torch.randn(2, 8, 12, 12)
    pb.compile(model, x, threads=1)
    (file,) = tmp_path.glob("tuning-*.json")
    content = json.loads(file.read_text())
    assert content["version"] == 2
    assert content["processor"]
    content["choices"] = dict.fromkeys(content["choices"], FORGED[name])
    file.write_text(json.dumps(content))
    with torch.no_grad():
        torch.testing.assert_close(pb.compile(model, x, threads=1)(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [{"version": 1}, {"processor": "another one"}, {"choices": 3}])
def test_a_cache_from_elsewhere_is_left_alone(change: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, another processor or no choices: everything is tuned, and written anew."""
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path))
    model, x = nn.Conv2d(8, 16, 3), torch.randn(1, 8, 10, 10)
    pb.prune_(model, pb.Budget(sparsity=0.9))
    pb.compile(model, x, threads=1)
    (file,) = tmp_path.glob("tuning-*.json")
    good = json.loads(file.read_text())
    file.write_text(json.dumps({**good, **change}))
    pb.compile(model, x, threads=1)
    assert json.loads(file.read_text()).keys() == good.keys()
    assert json.loads(file.read_text())["choices"].keys() == good["choices"].keys()
