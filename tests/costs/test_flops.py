"""What count_flops promises: hand-computed counts, and a model that is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pareback.costs.flops import FlopCount, count_flops


def weights(count: FlopCount) -> dict[str, int]:
    """The parameters that cost something, as plain integers."""
    assert all(flops.denominator == 1 for flops in count.per_parameter.values())
    return {name: int(flops) for name, flops in count.per_parameter.items() if flops}


class Lambda(nn.Module):
    """A model made of one function, with any parameters and buffers."""

    def __init__(self, function: Any, **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


# ---------------------------------------------------------------- linear layers and operators


def test_linear_counts_two_operations_per_weight() -> None:
    """Each of the 3 x 5 weights costs a multiplication and an addition; the bias is free."""
    count = count_flops(nn.Linear(3, 5), torch.randn(4, 3))
    assert count == FlopCount({"weight": Fraction(30), "bias": Fraction(0)}, Fraction(30), 4)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_applied_at_every_leading_position(bias: bool) -> None:
    """An example of 6 x 7 vectors runs through the layer 6 * 7 times."""
    count = count_flops(nn.Linear(3, 5, bias=bias), torch.randn(4, 6, 7, 3))
    assert weights(count) == {"weight": 6 * 7 * 2 * 3 * 5}
    assert count.batch == 4


def test_linear_of_a_transposed_input() -> None:
    """An input that is not contiguous takes another kernel and costs the same."""
    model = Lambda(lambda self, x: F.linear(x.transpose(1, 2), self.weight), weight=parameter(5, 3))
    assert weights(count_flops(model, torch.randn(4, 3, 7))) == {"weight": 7 * 2 * 3 * 5}


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: F.linear(x, w),
        lambda w, x: x @ w.t(),
        lambda w, x: (w @ x.t()).t(),
        lambda w, x: torch.einsum("bi,oi->bo", x, w),
        lambda w, x: torch.einsum("oi,bi->bo", w, x),
        lambda w, x: torch.bmm(w.expand(len(x), 5, 3), x.unsqueeze(2)),
        lambda w, x: torch.stack([torch.mv(w, row) for row in x]),
        lambda w, x: torch.stack([w @ row for row in x]),
        lambda w, x: torch.addmm(torch.zeros(5), x, w.t()),
        lambda w, x: torch.stack([torch.dot(w_row, row) for row in x for w_row in w]),
        lambda w, x: torch.tensordot(x, w, dims=([1], [1])),
    ],
)
def test_functional_uses_are_credited_to_the_weight(use: Any) -> None:
    """However a 5 x 3 weight is multiplied with the examples, it costs 2 * 5 * 3 for each."""
    count = count_flops(Lambda(lambda self, x: use(self.weight, x), weight=parameter(5, 3)), torch.randn(4, 3))
    assert weights(count) == {"weight": 30}
    assert count.total == 30


@pytest.mark.parametrize(
    "reach",
    [
        lambda w: w.t().contiguous().t(),
        lambda w: w.double().float(),
        lambda w: w.clone(),
        lambda w: w[torch.arange(5, -1, -1)],
        lambda w: w.view(2, 3, 3).reshape(6, 3),
        lambda w: w.to(memory_format=torch.preserve_format, copy=True),
        lambda w: w * torch.tensor(0.5),
        lambda w: w.detach() / w.norm(),
        lambda w: torch.where(w > 0, w, 0.0),
        lambda w: torch.empty(6, 3).copy_(w),
    ],
)
def test_copies_of_a_weight_are_credited_to_it(reach: Any) -> None:
    """A product with a copy of the 6 x 3 weight counts for the weight."""
    model = Lambda(lambda self, x: F.linear(x, reach(self.weight)), weight=parameter(6, 3))
    assert weights(count_flops(model, torch.randn(4, 3))) == {"weight": 2 * 6 * 3}


def test_slices_of_a_weight_count_what_they_use() -> None:
    """Using the last 2 of 6 rows, and every second row, costs 2 and 3 rows of 2 * 3."""
    model = Lambda(
        lambda self, x: (F.linear(x, self.weight[4:]), F.linear(x, self.weight[::2])), weight=parameter(6, 3)
    )
    assert weights(count_flops(model, torch.randn(4, 3))) == {"weight": (2 + 3) * 2 * 3}


def test_products_without_a_weight_are_in_the_total_only() -> None:
    """The 7 x 7 scores between positions of size 3 belong to no parameter."""
    model = Lambda(lambda self, x: x @ x.mT + self.bias, bias=parameter(7))
    count = count_flops(model, torch.randn(4, 7, 3))
    assert weights(count) == {}
    assert count.total == 2 * 7 * 7 * 3


def test_an_activation_that_a_parameter_was_added_to_is_no_weight() -> None:
    """Positions added to the input do not make its scores a product with the position parameter."""
    model = Lambda(lambda self, x: (x + self.position) @ (x + self.position).mT, position=parameter(1, 7, 3))
    count = count_flops(model, torch.randn(1, 7, 3))
    assert weights(count) == {}
    assert count.total == 2 * 7 * 7 * 3


def test_a_written_buffer_is_no_longer_constant() -> None:
    """A tensor into which activations were written does not pass a weight's name on."""

    def forward(self: Any, x: Tensor) -> Tensor:
        product = self.position + torch.zeros(4, 3).copy_(x)
        return product @ product.t()

    count = count_flops(Lambda(forward, position=parameter(4, 3)), torch.randn(4, 3))
    assert weights(count) == {}
    assert count.total == 2 * 4 * 3  # 4 x 4 products of length 3, for 4 examples


def test_the_right_weight_of_two_is_credited() -> None:
    """Learned queries (2 x 3) run through a layer like inputs: the layer's weight pays."""
    model = Lambda(
        lambda self, x: x + F.linear(self.query, self.weight).sum(), query=parameter(2, 3), weight=parameter(5, 3)
    )
    count = count_flops(model, torch.randn(4, 3))
    assert count.per_parameter == {"query": 0, "weight": Fraction(2 * 2 * 3 * 5, 4)}


def test_a_module_called_twice_counts_twice() -> None:
    """The shared 3 x 3 layer is used two times."""
    layer = nn.Linear(3, 3)
    assert weights(count_flops(nn.Sequential(layer, layer), torch.randn(4, 3))) == {"0.weight": 2 * 2 * 9}


def test_a_tied_output_layer_counts_for_the_embedding() -> None:
    """Looking up a token is free, the 10 scores of each of 7 positions are not."""
    model = Lambda(lambda self, ids: F.linear(F.embedding(ids, self.table), self.table), table=parameter(10, 4))
    count = count_flops(model, torch.randint(10, (2, 7)))
    assert weights(count) == {"table": 7 * 2 * 4 * 10}


def test_tied_modules_appear_once_under_the_first_name() -> None:
    """Two layers with one parameter: one key, both uses."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert count_flops(model, torch.randn(4, 3)).per_parameter == {"0.weight": 2 * 2 * 9}


def test_embeddings_and_norms_are_free() -> None:
    """Lookups and norms multiply no matrices, but their parameters are listed."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4))
    count = count_flops(model, torch.randint(10, (2, 7)))
    assert count == FlopCount({"0.weight": Fraction(0), "1.weight": Fraction(0), "1.bias": Fraction(0)}, Fraction(0), 2)
    assert count_flops(nn.EmbeddingBag(10, 4), torch.randint(10, (2, 7))).per_parameter == {"weight": 0}


def test_bilinear() -> None:
    """left (3) @ weight (5 x 3 x 4) is 5 vectors of 4, each of which is multiplied with right (4)."""
    count = count_flops(nn.Bilinear(3, 4, 5), (torch.randn(2, 6, 3), torch.randn(2, 6, 4)))
    assert weights(count) == {"weight": 6 * 2 * 5 * 3 * 4}
    assert count.total == 6 * 2 * (5 * 3 * 4 + 5 * 4)


def test_graph_layer_with_a_sparse_buffer() -> None:
    """A sparse graph, which has no storage to recognise, does not keep the 5 x 3 weight from counting."""
    model = Lambda(
        lambda self, x: torch.sparse.mm(self.graph, x @ self.weight),
        graph=torch.eye(4).to_sparse(),
        weight=parameter(5, 3),
    )
    assert weights(count_flops(model, torch.randn(4, 5))) == {"weight": 2 * 5 * 3}


def test_formulas_registered_with_torch_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom operation, here mul, counts what its formula for torch's counter says."""
    monkeypatch.setitem(flop_registry, torch.ops.aten.mul, lambda x, w, *, out_val: 2 * out_val.numel())
    count = count_flops(Lambda(lambda self, x: x * self.weight, weight=parameter(5, 3)), torch.randn(4, 5, 3))
    assert weights(count) == {"weight": 2 * 5 * 3}


def test_parameters_in_one_storage_are_told_apart() -> None:
    """Weights cut from one flat tensor, as cuDNN's LSTM has them, keep their own counts."""
    flat = torch.randn(6 + 12)
    model = Lambda(
        lambda self, x: F.linear(F.linear(x, self.a), self.b),
        a=nn.Parameter(flat[:6].view(2, 3)),
        b=nn.Parameter(flat[6:].view(6, 2)),
    )
    assert weights(count_flops(model, torch.randn(4, 3))) == {"a": 2 * 2 * 3, "b": 2 * 6 * 2}


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize(
    ("conv", "size", "expected"),
    [
        # operations = 2 * output positions * output channels * input channels / groups * kernel size
        (nn.Conv1d(3, 4, 5), (3, 20), 2 * 16 * 4 * 3 * 5),
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 10), 2 * 5 * 6 * 2 * 3),
        (nn.Conv2d(3, 8, 3, padding=1), (3, 6, 7), 2 * 42 * 8 * 3 * 9),
        (nn.Conv2d(3, 8, (3, 5), padding="same"), (3, 6, 7), 2 * 42 * 8 * 3 * 15),
        (nn.Conv2d(8, 8, 3, groups=8), (8, 6, 6), 2 * 16 * 8 * 1 * 9),
        (nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2), (4, 11, 9), 2 * (4 * 3) * 6 * 2 * 9),
        (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), (3, 6, 7), 2 * 42 * 8 * 3 * 9),
        (nn.Conv3d(2, 3, (1, 2, 3)), (2, 4, 4, 4), 2 * (4 * 3 * 2) * 3 * 2 * 6),
        # transposed: every input position is multiplied with the kernel
        (nn.ConvTranspose1d(3, 4, 5, stride=2), (3, 10), 2 * 10 * 3 * 4 * 5),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5, 6), 2 * 30 * 4 * 3 * 9),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2), (4, 5, 6), 2 * 30 * 4 * 6 * 9),
        (nn.ConvTranspose3d(2, 3, 2), (2, 3, 4, 5), 2 * 60 * 2 * 3 * 8),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("batch", [1, 3])
def test_convolution(conv: nn.Module, size: tuple[int, ...], expected: int, batch: int) -> None:
    """The hand formula holds with strides, padding, dilation and groups, whatever the batch."""
    count = count_flops(conv, torch.randn(batch, *size))
    assert weights(count) == {"weight": expected}
    assert (count.total, count.batch) == (expected, batch)


# ---------------------------------------------------------------- recurrent layers

GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


def recurrent_flops(kind: Any, sizes: list[int], hidden: int, steps: int) -> dict[str, int]:
    """2 * gates * hidden * (input + hidden) in each step, for layers with these input sizes."""
    costs = {}
    for layer, size in enumerate(sizes):
        costs[f"weight_ih_l{layer}"] = steps * 2 * GATES[kind] * hidden * size
        costs[f"weight_hh_l{layer}"] = steps * 2 * GATES[kind] * hidden * hidden
    return costs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(GATES))
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(kind: Any, batch_first: bool, dtype: torch.dtype) -> None:
    """Two layers over 6 steps cost the same fused (LSTM in float32) or not, batch first or second."""
    model = kind(3, 5, num_layers=2, batch_first=batch_first, dtype=dtype)
    x = torch.randn(2, 6, 3, dtype=dtype) if batch_first else torch.randn(6, 2, 3, dtype=dtype)
    count = count_flops(model, x)
    assert weights(count) == recurrent_flops(kind, [3, 5], 5, steps=6)
    assert (count.batch, count.total) == (2, sum(weights(count).values()))


@pytest.mark.parametrize("kind", list(GATES))
def test_bidirectional_recurrent_layers(kind: Any) -> None:
    """The reverse direction costs the same; the second layer sees both outputs (2 * 5)."""
    count = count_flops(kind(3, 5, num_layers=2, bidirectional=True, bias=False), torch.randn(6, 2, 3))
    forward = recurrent_flops(kind, [3, 10], 5, steps=6)
    assert weights(count) == forward | {f"{name}_reverse": flops for name, flops in forward.items()}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_lstm_with_projection() -> None:
    """The state of 5 is projected to 2, which is what the recurrence multiplies."""
    count = count_flops(nn.LSTM(3, 5, proj_size=2, batch_first=True), torch.randn(4, 6, 3))
    assert weights(count) == {
        "weight_ih_l0": 6 * 2 * 4 * 5 * 3,
        "weight_hh_l0": 6 * 2 * 4 * 5 * 2,
        "weight_hr_l0": 6 * 2 * 2 * 5,
    }


def test_lstm_with_given_states() -> None:
    """Initial states, learned or passed as inputs, change nothing."""
    model = Lambda(lambda self, x: self.lstm(x, (self.h0.expand(1, 2, 5).contiguous(), torch.zeros(1, 2, 5))))
    model.h0 = parameter(1, 1, 5)
    model.lstm = nn.LSTM(3, 5)
    expected = recurrent_flops(nn.LSTM, [3], 5, steps=6)
    assert weights(count_flops(model, torch.randn(6, 2, 3))) == {f"lstm.{k}": v for k, v in expected.items()}


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell(3, 5), 4), (nn.GRUCell(3, 5), 3), (nn.RNNCell(3, 5), 1)])
def test_recurrent_cells(cell: nn.Module, gates: int) -> None:
    """One step of a cell is one step of its layer."""
    assert weights(count_flops(cell, torch.randn(2, 3))) == {
        "weight_ih": 2 * gates * 5 * 3,
        "weight_hh": 2 * gates * 5 * 5,
    }


def test_packed_sequences_count_their_real_steps() -> None:
    """Sequences of 4 and 2 steps have 6 steps, 3 per example."""
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    for inputs in (packed, (packed,)):
        count = count_flops(nn.LSTM(3, 5), inputs)
        assert count.batch == 2
        assert weights(count) == recurrent_flops(nn.LSTM, [3], 5, steps=3)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_inputs_packed_inside_the_model(batch_first: bool) -> None:
    """The packed batch (2 examples of 6 and 2 steps) tells where the padded one has its batch."""
    model = Lambda(lambda self, x, n: self.rnn(pack_padded_sequence(x, n, batch_first=batch_first)))
    model.rnn = nn.GRU(3, 5)
    x = torch.randn(2, 6, 3) if batch_first else torch.randn(6, 2, 3)
    count = count_flops(model, (x, torch.tensor([6, 2])))
    assert count.batch == 2
    assert count.per_parameter["rnn.weight_ih_l0"] == (6 + 2) * 2 * 3 * 5 * 3 // 2


# ---------------------------------------------------------------- attention


def attention_flops(queries: int, keys: int, size: int) -> int:
    """Scores between all queries and keys, and sums of the values; heads split ``size``."""
    return 2 * queries * keys * size + 2 * queries * keys * size


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first: bool, need_weights: bool) -> None:
    """Three projections in one parameter, scores and sums over 7 positions, and an output projection."""
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    x = torch.randn(3, 7, 8) if batch_first else torch.randn(7, 3, 8)
    count = count_flops(model, {"query": x, "key": x, "value": x, "need_weights": need_weights})
    assert weights(count) == {"in_proj_weight": 7 * 2 * 8 * 24, "out_proj.weight": 7 * 2 * 8 * 8}
    assert count.total - sum(weights(count).values()) == attention_flops(7, 7, 8)
    assert count.batch == 3


def test_cross_attention_with_packed_projection() -> None:
    """4 queries use a third of the packed projection, 7 keys and values two thirds."""
    memory = torch.randn(3, 7, 8)
    count = count_flops(nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(3, 4, 8), memory, memory))
    assert weights(count) == {
        "in_proj_weight": 4 * 2 * 8 * 8 + 7 * 2 * 8 * 16,
        "out_proj.weight": 4 * 2 * 8 * 8,
    }
    assert count.total - sum(weights(count).values()) == attention_flops(4, 7, 8)


def test_cross_attention_with_separate_projections() -> None:
    """Keys of size 5 and values of size 6 have projections of their own."""
    model = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True)
    count = count_flops(model, (torch.randn(3, 4, 8), torch.randn(3, 7, 5), torch.randn(3, 7, 6)))
    assert weights(count) == {
        "q_proj_weight": 4 * 2 * 8 * 8,
        "k_proj_weight": 7 * 2 * 5 * 8,
        "v_proj_weight": 7 * 2 * 6 * 8,
        "out_proj.weight": 4 * 2 * 8 * 8,
    }


def test_attention_with_shared_heads() -> None:
    """4 query heads on 2 key and value heads cost as much as with 4."""
    model = Lambda(lambda self, q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))
    count = count_flops(model, (torch.randn(3, 4, 5, 8), torch.randn(3, 2, 7, 8)))
    assert count.total == attention_flops(5, 7, 4 * 8)


def transformer_flops(positions: int, size: int, inner: int) -> tuple[dict[str, int], int]:
    """Weights and total of one encoder layer."""
    costs = {
        "self_attn.in_proj_weight": positions * 2 * size * 3 * size,
        "self_attn.out_proj.weight": positions * 2 * size * size,
        "linear1.weight": positions * 2 * size * inner,
        "linear2.weight": positions * 2 * inner * size,
    }
    return costs, sum(costs.values()) + attention_flops(positions, positions, size)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_without_the_fast_path(batch_first: bool, training: bool) -> None:
    """In eval mode torch fuses a layer into one operation; it is counted all the same."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).train(training)
    count = count_flops(model, torch.randn(3, 7, 8) if batch_first else torch.randn(7, 3, 8))
    costs, total = transformer_flops(7, 8, 16)
    assert weights(count) == {f"layers.{i}.{name}": flops for i in range(2) for name, flops in costs.items()}
    assert (count.total, count.batch) == (2 * total, 3)


def test_padding_in_a_transformer_counts() -> None:
    """A padding mask, which turns the batch into a nested tensor on the fast path, changes nothing."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    count = count_flops(model, {"src": torch.randn(2, 7, 8), "src_key_padding_mask": mask})
    assert count.total == transformer_flops(7, 8, 16)[1]


# ---------------------------------------------------------------- parametrized and pruned weights


def test_weight_norm_counts_for_the_direction() -> None:
    """Of magnitude and direction, the direction has the shape of the weight."""
    count = count_flops(parametrizations.weight_norm(nn.Linear(3, 5)), torch.randn(4, 3))
    assert weights(count) == {"parametrizations.weight.original1": 2 * 3 * 5}


def test_masks_of_torch_prune_count_for_the_original_weight() -> None:
    """A pruned layer costs what its dense one does, and keeps its weight attribute."""
    model = prune.random_unstructured(nn.Conv2d(3, 4, 3), "weight", amount=0.5)
    before = model.weight
    assert weights(count_flops(model, torch.randn(2, 3, 5, 5))) == {"weight_orig": 2 * 9 * 4 * 3 * 9}
    assert model.weight is before


def test_a_low_rank_update_counts_for_its_factors_too() -> None:
    """W + up @ down is a product in itself, made once for all 4 examples, and a version of W."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = parameter(5, 1), parameter(1, 3)

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.up @ self.down

    model = nn.Linear(3, 5)
    parametrize.register_parametrization(model, "weight", LowRank())
    count = count_flops(model, torch.randn(4, 3)).per_parameter
    assert count["parametrizations.weight.original"] == 2 * 3 * 5
    assert count["parametrizations.weight.0.down"] == Fraction(2 * 5 * 1 * 3, 4)


# ---------------------------------------------------------------- whole models against torch's counter


@contextmanager
def unfused_attention() -> Iterator[None]:
    """torch's counter sees nothing in fused encoder layers, nor in older versions in fused attention."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("resnet18", 64), ("mobilenet_v3_small", 64), ("vit_b_32", 224)])
def test_vision_models_agree_with_the_counter_of_torch(name: str, size: int) -> None:
    """On the meta device, with no arithmetic done, the totals are the same."""
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = getattr(torchvision.models, name)(weights=None).eval()
    x = torch.randn(2, 3, size, size)
    with unfused_attention(), torch.no_grad(), FlopCounterMode(display=False) as reference:
        model(x.to("meta"))
    assert count_flops(model, x).total * 2 == reference.get_total_flops()


def test_resnet18_has_its_published_cost() -> None:
    """1.81 billion multiply-adds at 224 x 224, all of them in weights."""
    torchvision = pytest.importorskip("torchvision")
    count = count_flops(torchvision.models.resnet18(weights=None), torch.randn(1, 3, 224, 224))
    assert count.total == sum(count.per_parameter.values()) == 2 * 1_814_073_344
    assert count.per_parameter["conv1.weight"] == 2 * 112 * 112 * 64 * 3 * 49


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_decoder_agrees_with_the_counter_of_torch() -> None:
    """Sequence-first nn.Transformer, with 7 source and 5 target positions."""
    model = nn.Transformer(8, 2, 1, 1, 16).eval()
    inputs = (torch.randn(7, 3, 8), torch.randn(5, 3, 8))
    with unfused_attention(), torch.no_grad(), FlopCounterMode(display=False) as reference:
        model(*inputs)
    count = count_flops(model, inputs)
    assert count.batch == 3
    assert count.total * 3 == reference.get_total_flops()


# ---------------------------------------------------------------- batch size


@pytest.mark.parametrize(
    ("model", "inputs", "batch"),
    [
        (nn.LSTM(3, 5), torch.randn(6, 2, 3), 2),
        (nn.LSTM(3, 5, batch_first=True), torch.randn(6, 2, 3), 6),
        (nn.LSTM(3, 5), torch.randn(6, 3), 1),
        (nn.GRU(3, 5, batch_first=True), torch.randn(6, 3), 1),
        (nn.Sequential(nn.Embedding(9, 3), nn.RNN(3, 5)), torch.randint(9, (6, 2)), 2),
        (nn.Sequential(nn.Embedding(9, 3), nn.RNN(3, 5)), torch.randint(9, (6,)), 1),
        (nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 5), nn.LSTM(5, 2)), torch.randn(6, 2, 3), 6),
        (Lambda(lambda self, n, x: x * n), (torch.tensor(2), torch.randn(6, 2)), 6),
    ],
)
def test_batch_size(model: nn.Module, inputs: Any, batch: int) -> None:
    """Dim 0, dim 1 in front of a sequence-first module, 1 for an unbatched sequence."""
    assert count_flops(model, inputs).batch == batch


def test_a_batch_first_model_with_a_sequence_first_layer_inside() -> None:
    """Transposing before the layer shows that the batch was in dim 0."""
    model = Lambda(lambda self, x: self.lstm(x.transpose(0, 1)))
    model.lstm = nn.LSTM(3, 5)
    count = count_flops(model, torch.randn(2, 6, 3))
    assert count.batch == 2
    assert count.per_parameter["lstm.weight_ih_l0"] == 6 * 2 * 4 * 5 * 3


# ---------------------------------------------------------------- no traces


class Restless(nn.Module):
    """Changes whatever a forward pass can change, and fails on inputs of another size than 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        self.last = self.fresh = torch.rand(3)
        assert not self.training
        assert not self.norm.training
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        return self.linear(self.norm(x.add_(1))) + self.last


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    """Flags, buffers, attributes, gradients, inputs, random state and switches are as before."""
    model = Restless()
    model.norm.eval()
    state, keys = copy.deepcopy(model.state_dict()), set(vars(model))
    parameters = list(model.parameters())
    x = torch.randn(2, 4 if fails else 3)
    x_before, random_before, fast_path = x.clone(), torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    with torch.autocast("cpu"):
        if fails:
            with pytest.raises(ValueError, match=r"did not fit Restless\.forward"):
                count_flops(model, x)
        else:
            assert weights(count_flops(model, x)) == {"linear.weight": 18}
        assert torch.is_autocast_enabled("cpu")
    assert (model.training, model.norm.training, model.linear.training) == (True, False, True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert set(vars(model)) == keys
    assert model.last is None
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in parameters)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_for_the_batch_size_are_removed() -> None:
    """A sequence module has no hooks left after counting, and none after failing."""
    model = nn.LSTM(3, 5)
    count_flops(model, torch.randn(6, 2, 3))
    with pytest.raises(ValueError, match="did not fit"):
        count_flops(model, torch.randn(6, 2, 4))
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_flags_of_scripted_parts_are_restored() -> None:
    """A part compiled with TorchScript is counted, and in training mode again."""
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 5)))
    assert weights(count_flops(model, torch.randn(2, 3))) == {"0.weight": 30}
    assert all(module.training for module in model.modules())


def test_counting_is_repeatable() -> None:
    """Counting twice, also in inference mode, gives the same."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten(1), nn.Linear(4 * 8, 2))
    x = torch.randn(2, 3, 10)
    count = count_flops(model, x)
    with torch.inference_mode():
        assert count_flops(model, x) == count
    assert weights(count) == {"0.weight": 8 * 2 * 3 * 4 * 3, "2.weight": 2 * 32 * 2}


# ---------------------------------------------------------------- inputs that do not work


def test_a_model_without_parameters() -> None:
    """No parameters, no keys."""
    assert count_flops(nn.ReLU(), torch.randn(2, 3)) == FlopCount({}, Fraction(0), 2)


def test_inputs_are_moved_to_the_model() -> None:
    """Inputs on the CPU fit a model on another device."""
    assert weights(count_flops(nn.Linear(3, 5, device="meta"), torch.randn(2, 3))) == {"weight": 30}


@pytest.mark.parametrize("inputs", ["x", 3, None, {1: torch.zeros(1)}])
def test_other_types_of_inputs(inputs: Any) -> None:
    """The error says what to write."""
    with pytest.raises(TypeError, match=r"tensor, a tuple of positional arguments such as \(x, mask\)"):
        count_flops(nn.Linear(3, 5), inputs)


@pytest.mark.parametrize("inputs", [(), {"input": 3}, torch.tensor(1.0), torch.zeros(0, 3)])
def test_inputs_without_examples(inputs: Any) -> None:
    """Nothing to divide by."""
    with pytest.raises(ValueError, match="holds no examples"):
        count_flops(nn.Linear(3, 5), inputs)


def test_inputs_that_do_not_fit_say_what_to_pass() -> None:
    """The original error is named and chained."""
    with pytest.raises(ValueError, match=r"Linear\.forward: pass a tensor.*a tuple.*a dict.*RuntimeError") as caught:
        count_flops(nn.Linear(3, 5), torch.zeros(2, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_lazy_parameters() -> None:
    """A weight without a shape cannot be counted, and is not given one."""
    model = nn.LazyLinear(5)
    with pytest.raises(ValueError, match="lazy"):
        count_flops(model, torch.zeros(2, 4))
    assert isinstance(model, nn.LazyLinear)
