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
from pareback.runtime.lower.layout import LaneGrid, Layout, rows_layout
from pareback.runtime.lower.linear_many_rows import TiledLinear
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


@pytest.mark.parametrize("block", [1, 3, 8])
def test_lists_of_groups_are_in_the_kernels_order(block: int) -> None:
    """By block, output, channel and tap, each in fours; every group from channels of its own."""
    weight = torch.randn(6, 4, 1, 3) * (torch.rand(6, 4, 1, 3) < 0.6)
    layout = Layout(8, 5, 5, LaneGrid(16, 1, 1), 5, 5, 1)
    taps = Taps(weight, groups=2)
    offsets = tap_offsets(taps, layout)
    table, rows = nonzeros(taps, layout, block)
    flat, wanted, starts = table.flatten().tolist(), list[int](), [[0]]
    for number in range(-(-8 // block)):
        starts[-1] = [len(wanted) // 2]
        for out in range(6):
            group = out // 3
            pairs = [
                (int(offsets[group, channel, 0, tap]), int(weight[out, channel, 0, tap].view(torch.int32)))
                for channel in range(4)
                for tap in range(3)
                if (4 * group + channel) // block == number and weight[out, channel, 0, tap] != 0
            ]
            fours = len(pairs) // 4 * 4
            for first in range(0, fours, 4):
                wanted += [one for side in (0, 1) for one in (pair[side] for pair in pairs[first : first + 4])]
            wanted += [one for pair in pairs[fours:] for one in pair]
            starts[-1].append(len(wanted) // 2)
        starts.append([])
    assert flat == wanted
    assert rows.tolist() == starts[:-1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("density", [0.004, 0.1, 0.5])
def test_what_was_found_for_linear_layers_is_allowed(density: float, threads: int) -> None:
    """Whatever would be tried; else they would be tuned again with every compile. Other blocks are not."""
    taps = Taps(torch.randn(64, 2000, 1, 1) * (torch.rand(64, 2000, 1, 1) < density))
    layer = TiledLinear(taps, torch.zeros(64), rows_layout(2000, 200), rows_layout(64, 200), 0)
    tried = list(layer.choices())
    assert {choice.block for choice in tried} - {8, 12, 16, 24, 32, 48, 64, 128, 2000}
    for choice in tried:
        assert all(layer.allows(one, threads) for one in layer.divided(choice, threads))
    assert not layer.allows(KernelChoice(False, tried[0].tile, 7, 64), threads)


def test_layers_of_about_the_same_density_share_what_was_found() -> None:
    """What is worth trying follows from what the key says, so that one's choice is never another's to refuse."""
    layers = []
    for nonzeros_of in (3964, 4036):  # 0.1982 and 0.2018: 0.20 for both, on two sides of where dense tiles are tried
        weight = torch.zeros(40, 500, 1, 1)
        weight.view(-1)[:nonzeros_of] = 1.0
        source = Layout(500, 8, 8, LaneGrid(16, 1, 1), 8, 8, 0)
        target = Layout(40, 8, 8, LaneGrid(16, 1, 1), 8, 8, 0)
        layers.append(TiledConvolution(Taps(weight), torch.zeros(40), source, target, 0))
    assert layers[0].key(1) == layers[1].key(1)
    assert list(layers[0].choices()) == list(layers[1].choices())


def test_a_model_has_its_folded_weights_once() -> None:
    """For PyTorch's operators and for the engine's own."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    engine = pb.compile(model, torch.randn(1, 3, 6, 6), threads=1)
    whole, stage = engine._plan.whole[0], engine._plan.stages[0].chain.operations[0]
    assert whole.taps.weight is stage.taps.weight  # type: ignore[attr-defined]


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
