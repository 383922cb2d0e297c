"""Sparse linear layers: any number of rows, any size, several threads, and every way the tuner may choose."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from engine_toys import engines, errors, kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime.graph.ops import Linear, Taps
from pareback.runtime.lower import linear_few_rows
from pareback.runtime.lower.layout import LANES, rows_layout
from pareback.runtime.lower.linear_few_rows import lookup_table
from pareback.runtime.lower.linear_many_rows import TiledLinear, weight_lists
from pareback.runtime.lower.memory import aligned
from pareback.runtime.native import bindings


def _sparse(outputs: int, inputs: int, density: float) -> Tensor:
    return torch.randn(outputs, inputs) * (torch.rand(outputs, inputs) < density)


def _mlp(*sizes: int, density: float = 0.15, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        linear.weight.data.copy_(_sparse(outputs, inputs, density))
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1]).eval()


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_any_number_of_rows(activation: type[nn.Module]) -> None:
    """Looked up, in lanes with and without empty ones, and in several portions."""
    model = _mlp(50, 270, 33, 7, activation=activation)
    for engine in engines(model, torch.randn(1, 50)):
        assert kinds(engine) == ["rows"]
        for rows in (*range(1, 34), 64, 100, 300, 500):
            x = torch.randn(rows, 50)
            error, own = errors(engine.run_sparse(x), model, x)
            assert error < max(2 * own, 5e-7), (engine.report().threads, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (17, 33), (100, 31), (3, 700), (700, 3), (257, 300)])
def test_any_size(outputs: int, inputs: int) -> None:
    """Fewer outputs than lanes, fewer inputs than a register, and neither a multiple of them."""
    for density in (0.0, 0.05, 0.5, 1.0):
        model = _mlp(inputs, outputs, density=density)
        for engine in engines(model, torch.randn(1, inputs)):
            for rows in (1, 3, 8, 16, 40):
                x = torch.randn(rows, inputs)
                error, _ = errors(engine.run_sparse(x), model, x)
                # Of a few numbers, which may be near zero.
                assert error < 5e-6, (density, engine.report().threads, rows)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_long_sums_keep_their_digits(rows: int) -> None:
    """Thousands of products in one sum are no less exact than PyTorch's."""
    model = _mlp(8192, 64, density=0.3)
    x = torch.rand(rows, 8192)
    error, own = errors(compiled(model, x, threads=1).run_sparse(x), model, x)
    assert error < 2 * own


def test_weights_all_in_some_rows() -> None:
    """Outputs without weights are their bias; some have all the weights of their block."""
    model = _mlp(200, 90, density=1.0)
    model[0].weight.data[::3] = 0  # type: ignore[operator,index]
    model[0].weight.data[:, 64:128] = 0  # type: ignore[index]
    for rows in (1, 5, 16):
        x = torch.randn(rows, 200)
        error, own = errors(compiled(model, x, threads=2).run_sparse(x), model, x)
        assert error < max(2 * own, 5e-7)


_FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh_gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
}


@pytest.mark.slow
@pytest.mark.parametrize("vectors", [1, 2, 3, 5, 8, 14])
@pytest.mark.parametrize("name", ["none", "relu", "gelu", "tanh_gelu", "silu"])
def test_all_choices_agree(vectors: int, name: str) -> None:
    """Whatever the tuner may choose gives the same result, on one thread and on several."""
    weight, bias = _sparse(83, 999, 0.1), torch.randn(83)
    x = torch.randn(999, vectors * LANES)
    source, target = rows_layout(999, vectors * LANES), rows_layout(83, vectors * LANES)
    truth = weight.double() @ x.double() + bias.double()[:, None]
    truth, activation = _FOLLOWING[name](truth), bindings.ACTIVATIONS[name]
    for threads in (1, 3):
        layer = TiledLinear(Taps(weight[:, :, None, None]), bias, source, target, activation)
        choices = list(dict.fromkeys(way for one in layer.choices() for way in layer.divided(one, threads)))
        assert len({(choice.block, choice.chunk) for choice in choices}) > 2
        for choice in choices:
            arena = aligned(torch.cat([x.flatten(), torch.full((target.floats,), torch.nan)]))
            bindings.NativeProgram([layer.operation(choice, 0, source.floats, None)]).run(arena.data_ptr(), [], threads)
            found = arena[source.floats :].view(83, -1)
            torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5, msg=str(choice))


def test_more_outputs_than_sixteen_bits_number() -> None:
    """A large vocabulary on two threads, however its outputs are divided."""
    weight, bias = _sparse(140_000, 10, 0.2), torch.randn(140_000)
    x = torch.randn(10, LANES)
    source, target = rows_layout(10, LANES), rows_layout(140_000, LANES)
    truth = torch.addmm(bias[:, None], weight, x)
    layer = TiledLinear(Taps(weight[:, :, None, None]), bias, source, target, bindings.ACTIVATIONS["none"])
    for choice in layer.divided(next(layer.choices()), 2):
        arena = aligned(torch.cat([x.flatten(), torch.full((target.floats,), torch.nan)]))
        bindings.NativeProgram([layer.operation(choice, 0, source.floats, None)]).run(arena.data_ptr(), [], 2)
        torch.testing.assert_close(arena[source.floats :].view(140_000, -1), truth, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 70), st.integers(1, 150), st.floats(0, 1))
def test_lists_hold_every_weight(outputs: int, inputs: int, part: int, block: int, density: float) -> None:
    """The matrix can be read back from its lists, and a block's outputs come in order of their numbers of weights."""
    weight = _sparse(outputs, inputs, density)
    lists = weight_lists(weight, 2, part, block)
    found = torch.zeros(outputs, inputs)
    words = lists.list.tolist()
    entries = lists.entries.tolist()
    at = 0
    for number, (first, last) in enumerate(pairwise(lists.bounds.tolist())):
        if number % lists.blocks == 0:
            assert at * 2 == lists.lists[number // lists.blocks]
        counts = [count for _, count in entries[first:last]]
        assert counts == sorted(counts)
        for output, count in entries[first:last]:
            for i in range(count):
                four = at + i // 4 * 12
                place, value = (
                    (four + i % 4, four + 4 + i % 4 * 2) if i < count // 4 * 4 else (at + 3 * i, at + 3 * i + 1)
                )
                column = number % lists.blocks * block + words[place] * 8 // (2 * LANES * 4)
                halves = torch.tensor(words[value : value + 2], dtype=torch.int16)
                found[number // lists.blocks * part + output, column] = halves.view(torch.float32)[0]
            at += 3 * count
    assert at == len(words)
    assert torch.equal(found, weight)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.integers(1, 150), st.integers(1, 7), st.floats(0, 1))
def test_steps_hold_every_weight(outputs: int, inputs: int, part: int, density: float) -> None:
    """The matrix can be read back from its steps."""
    weight = _sparse(outputs, inputs, density)
    matrix = lookup_table(weight, part)
    found = torch.zeros(-(-outputs // LANES) * LANES, inputs)
    blocks = -(-inputs // 32)
    value = step = entry = 0
    for number, counts in enumerate(matrix.counts.tolist()):
        if number % blocks == 0:
            assert [value, step, entry] == matrix.starts[number // blocks].tolist()
        for length in [n + 1 for n, count in enumerate(counts) for _ in range(count)]:
            for at in range(step, step + length):
                for lane in (lane for lane in range(LANES) if int(matrix.masks[at]) >> lane & 1):
                    output = int(matrix.slices[entry]) * LANES + lane
                    found[output, number % blocks * 32 + int(matrix.picks[at, lane])] = matrix.values[value]
                    value += 1
            step, entry = step + length, entry + 1
    assert torch.equal(found[:outputs], weight)


def test_the_same_steps_serve_any_number_of_rows() -> None:
    """A network that is called with two batch sizes does not hold its weights twice."""
    layer = Linear("y", "x", Taps(_sparse(64, 64, 0.1)[:, :, None, None]), torch.zeros(64))
    one, four = (linear_few_rows.operation(layer, rows, bindings.ACTIVATIONS["none"], -2, -3, 0, 1) for rows in (1, 4))
    assert one.values == four.values
