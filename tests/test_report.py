"""pb.inspect: counts, denominators, FLOPs and predictions by hand; the table and the dict."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
import torch
from networks import mlp
from torch import nn

import pareback as pb
from pareback.report import Row, percent, table


def by_hand() -> nn.Sequential:
    """12 + 3 and 6 + 2 parameters; five zeros in the first weight and one in its bias."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        model[0].weight[0] = 0.0
        model[0].weight[1, 0] = -0.0
        model[0].bias[1] = 0.0
    return model


# ---------------------------------------------------------------- counts


def test_counts_by_hand() -> None:
    """Zeros of the bias count for the whole model and not for the pruned tensors; −0.0 is a zero."""
    report = pb.inspect(by_hand())
    assert [(row.name, row.params, row.nonzeros, row.pruned) for row in report.rows] == [
        ("0.weight", 12, 7, True),
        ("0.bias", 3, 2, False),
        ("1.weight", 6, 6, False),
        ("1.bias", 2, 2, False),
    ]
    assert (report.params, report.nonzeros, report.kept) == (23, 17, 18)
    assert (report.pruned_params, report.pruned_nonzeros) == (12, 7)


def test_each_sparsity_has_its_denominator() -> None:
    """5 of 12 weights of pruned tensors, 6 of 23 parameters of the model."""
    report = pb.inspect(by_hand())
    assert report.sparsity == pytest.approx(5 / 12)
    assert report.model_sparsity == pytest.approx(6 / 23)
    assert report.rows[0].sparsity == pytest.approx(5 / 12)


def test_flops_by_hand() -> None:
    """2·12 + 2·6 FLOPs; the five zeros save 10; tensors that are not pruned count whole."""
    report = pb.inspect(by_hand(), example_inputs=torch.zeros(5, 4))
    assert (report.total_flops, report.nonzero_flops) == (36, 26)
    assert [row.flops for row in report.rows] == [24, 0, 12, 0]
    assert [row.nonzero_flops for row in report.rows] == [14, 0, 12, 0]


def test_without_inputs_there_are_no_flops() -> None:
    """Unknown is None, not zero."""
    report = pb.inspect(by_hand())
    assert (report.total_flops, report.nonzero_flops, report.rows[0].flops) == (None, None, None)


def test_a_dense_model_has_nothing_pruned() -> None:
    """No zeros: sparsity is zero and the summary does not speak of pruned tensors."""
    report = pb.inspect(mlp(50, 40, 50))
    assert (report.pruned_params, report.sparsity, report.model_sparsity) == (0, 0.0, 0.0)
    assert "pruned tensors" not in str(report)
    assert report.kept == report.params == 4090


def test_an_empty_model_can_be_inspected() -> None:
    """Nothing is divided by zero."""
    report = pb.inspect(nn.ReLU())
    assert (report.params, report.sparsity, report.model_sparsity, report.rows) == (0, 0.0, 0.0, ())
    assert "0 of all 0 parameters" in str(report)


def test_an_empty_tensor_is_not_sparse() -> None:
    """A tensor without elements has no zeros."""
    model = nn.Module()
    model.none = nn.Parameter(torch.zeros(0, 3))
    row = pb.inspect(model).rows[0]
    assert (row.params, row.nonzeros, row.sparsity, row.pruned) == (0, 0, 0.0, False)


def test_tied_weights_are_counted_once() -> None:
    """An embedding tied to the output is one row with the FLOPs of every use."""
    model = nn.Sequential(nn.Embedding(60, 20), nn.Linear(20, 60, bias=False))
    model[1].weight = model[0].weight
    report = pb.inspect(model, example_inputs=torch.zeros(2, 3, dtype=torch.long))
    assert [(row.name, row.params, row.flops) for row in report.rows] == [("0.weight", 1200, 7200)]


def test_integer_parameters_are_counted_but_not_pruned() -> None:
    """Zeros of a lookup table of integers are no sparsity."""
    model = nn.Linear(4, 3)
    model.register_parameter("index", nn.Parameter(torch.zeros(5, 5, dtype=torch.int64), requires_grad=False))
    row = next(row for row in pb.inspect(model).rows if row.name == "index")
    assert (row.params, row.nonzeros, row.pruned, row.bytes) == (25, 0, False, 200)


def test_bytes_are_those_of_the_dense_tensor() -> None:
    """Four per float32, two per bfloat16."""
    assert pb.inspect(nn.Linear(4, 3)).rows[0].bytes == 48
    assert pb.inspect(nn.Linear(4, 3).bfloat16()).rows[0].bytes == 24


# ---------------------------------------------------------------- with a pruner


def pruned() -> tuple[nn.Sequential, torch.optim.Optimizer, pb.Pruner]:
    model = mlp(50, 40, 50)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, pb.Pruner(model, optimizer, pb.Fixed(0.9, bound="gaussian"), include=["0.weight"])


def test_a_pruner_says_which_tensors_are_pruned() -> None:
    """Its tensors and no others, even if another holds zeros or one of its own holds none."""
    model, _, pruner = pruned()
    with torch.no_grad():
        model[2].weight[0] = 0.0
    report = pb.inspect(model, pruner)
    assert [row.name for row in report.rows if row.pruned] == ["0.weight"]
    assert report.pruned_params == 2000
    by_flops = pb.inspect(model, pruner, torch.zeros(1, 50))
    assert [row.nonzero_flops for row in by_flops.rows][::2] == [2 * report.rows[0].nonzeros, 4000]
    other = mlp(50, 40, 50)
    idle = pb.Pruner(other, torch.optim.SGD(other.parameters(), lr=0.1), pb.Fixed(0.0))
    assert pb.inspect(other, idle).pruned_params == 4000


def test_prediction_beside_the_truth() -> None:
    """The Gaussian bound for 90 % predicts 90 %; the actual count is what it is, near on normal weights."""
    model, _, pruner = pruned()
    report = pb.inspect(model, pruner)
    assert report.predicted_sparsity == pytest.approx(0.9, abs=1e-5)
    assert [row.predicted is None for row in report.rows] == [False, True, True, True]
    assert report.sparsity == 1 - int(model[0].weight.count_nonzero()) / 2000
    assert report.sparsity == pytest.approx(0.9, abs=0.03)


def test_the_prediction_is_weighted_by_size() -> None:
    """erf(r/√2) of each tensor, by its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30))
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(0.8))
    report = pb.inspect(model, pruner)
    each = [math.erf(r / math.sqrt(2)) for r in pruner.r().tolist()]
    assert [row.predicted for row in report.rows if row.pruned] == pytest.approx(each, rel=1e-5)
    assert report.predicted_sparsity == pytest.approx((2000 * each[0] + 1200 * each[1]) / 3200, rel=1e-5)


def test_counts_follow_training() -> None:
    """After steps the report has the model's own counts."""
    model, optimizer, pruner = pruned()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()
    assert pb.inspect(model, pruner).rows[0].nonzeros == int(model[0].weight.count_nonzero())


def test_counts_are_of_the_model_as_it_is() -> None:
    """Weights loaded between steps are not pruned yet, and the exact count says so."""
    model, _, pruner = pruned()
    model.load_state_dict(mlp(50, 40, 50).state_dict())
    assert pb.inspect(model, pruner).rows[0].nonzeros == int(model[0].weight.count_nonzero()) == 2000


def test_finish_returns_the_report_of_its_pruner() -> None:
    """The same tensors are pruned in it, and the counts are final."""
    model, _, pruner = pruned()
    report = pruner.finish()
    assert isinstance(report, pb.Report)
    assert report.pruned_nonzeros == int(model[0].weight.count_nonzero())
    assert report.predicted_sparsity == pytest.approx(0.9, abs=1e-4)
    assert pb.inspect(model, pruner).as_dict() == report.as_dict()


def test_a_parametrized_model_is_reported_under_its_own_names() -> None:
    """With the other mount names and counts are those of the pruned weights."""
    model = mlp(50, 40, 50)
    pruner = pb.ParametrizedPruner(model, torch.optim.SGD(model.parameters(), lr=0.1), pb.Fixed(0.9))
    report = pb.inspect(model, pruner)
    assert {row.name: row.nonzeros for row in report.rows if row.pruned} == {"0.weight": 200, "2.weight": 200}
    assert {row.name for row in report.rows} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_compiled_model_is_reported_under_plain_names() -> None:
    """torch.compile's prefix is left out."""
    assert [row.name for row in pb.inspect(torch.compile(nn.Linear(4, 3))).rows] == ["weight", "bias"]  # type: ignore[arg-type]


# ---------------------------------------------------------------- dict and table


def test_as_dict_is_plain_json() -> None:
    """Totals and rows survive a round trip through JSON."""
    found = pb.inspect(by_hand(), example_inputs=torch.zeros(1, 4)).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert {key: found[key] for key in ("params", "nonzeros", "kept", "flops", "nonzero_flops")} == {
        "params": 23,
        "nonzeros": 17,
        "kept": 18,
        "flops": 36,
        "nonzero_flops": 26,
    }
    assert found["sparsity"] == pytest.approx(5 / 12)
    assert found["predicted_sparsity"] is None
    first = found["tensors"][0]
    assert (first["name"], first["shape"], first["nonzeros"], first["flops"]) == ("0.weight", [3, 4], 7, 24)
    assert [type(found[k]) for k in ("flops", "sparsity")] == [int, float]


def test_as_dict_with_a_pruner_is_plain_json() -> None:
    """Predictions are floats, not tensors."""
    model, _, pruner = pruned()
    found = pb.inspect(model, pruner).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert isinstance(found["tensors"][0]["predicted"], float)


def test_flops_that_are_no_whole_number_become_floats() -> None:
    """Counted over a batch, FLOPs per example may be a fraction."""
    row = Row("w", (2, 2), 4, 1, True, None, Fraction(7, 2), 16)
    found = pb.Report((row,), Fraction(7, 2)).as_dict()
    assert (found["flops"], found["nonzero_flops"]) == (3.5, 0.875)
    json.dumps(found)


def test_table_by_hand() -> None:
    """The report prints as a table with totals and their denominators below it."""
    assert str(pb.inspect(by_hand(), example_inputs=torch.zeros(1, 4))).splitlines() == [
        "tensor    shape  params  non-zero  sparsity  FLOPs  left",
        "--------  -----  ------  --------  --------  -----  ----",
        "0.weight  3×4        12         7  41.667 %     24    14",
        "0.bias    3           3         2         –      0     0",
        "1.weight  2×3         6         6         –     12    12",
        "1.bias    2           2         2         –      0     0",
        "whole model:    17 of all 23 parameters non-zero (26.087 % sparse)",
        "partly zero:    7 of 12 weights non-zero in 1 of 2 matrices, the tensors that hold zeros (41.667 % sparse)",
        "FLOPs:          26 of 36 per example left (72.222 %)",
    ]


def test_table_with_a_prediction() -> None:
    """The Gaussian's sparsity stands beside the actual one, per tensor and in total."""
    model, _, pruner = pruned()
    lines = str(pb.inspect(model, pruner)).splitlines()
    assert lines[0].split() == ["tensor", "shape", "params", "non-zero", "sparsity", "Gaussian"]
    assert lines[2].split()[-2:] == ["90.000", "%"]
    assert lines[3].split()[-1] == "–"
    assert "a Gaussian would give 90.000 %" in lines[-1]


def test_table_without_any_flops() -> None:
    """A model of lookups has no FLOPs to speak of."""
    assert "FLOPs:          none counted" in str(
        pb.inspect(nn.Embedding(5, 4), example_inputs=torch.zeros(2, dtype=torch.long))
    )


def test_short_form() -> None:
    """In a list or a debugger one line is enough."""
    assert repr(pb.inspect(by_hand())) == "Report(17 of 23 parameters non-zero)"


def test_percent_and_layout() -> None:
    """Three digits tell budgets apart; columns are as wide as their widest cell."""
    assert [percent(0.95), percent(0.99999), percent(0.0)] == ["95.000 %", "99.999 %", "0.000 %"]
    assert table(["a", "bb"], [["long", "1"], ["x", "100"]], left=1) == "a      bb\n----  ---\nlong    1\nx     100"
