"""Which tensors are pruned, under which names, and what is said when a choice cannot be made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import pareback as pb
from pareback.costs.selection import check_finite, check_zeros_stay, plain_names, select


def names(model: nn.Module, **options: object) -> list[str]:
    return [s.name for s in select(model, **options)]  # type: ignore[arg-type]


class Mixed(nn.Module):
    """One parameter of each kind the selection has to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 20)
        self.conv = nn.Conv2d(4, 28, 3)
        self.norm = nn.LayerNorm(2000)
        self.small = nn.Linear(27, 37)
        self.big = nn.Linear(40, 25)
        self.frozen = nn.Linear(40, 50)
        self.frozen.weight.requires_grad_(False)
        self.whole = nn.Parameter(torch.zeros(40, 40, dtype=torch.int64), requires_grad=False)
        self.wave = nn.Parameter(torch.zeros(40, 40, dtype=torch.complex64))


# ---------------------------------------------------------------- what is chosen


def test_default_takes_large_trainable_floating_matrices_in_model_order() -> None:
    """Embeddings and convolutions count; vectors, small, frozen, integer and complex tensors do not."""
    assert names(Mixed()) == ["embed.weight", "conv.weight", "big.weight"]


def test_min_size_is_inclusive() -> None:
    """1000 elements are enough, 999 are not."""
    model = nn.ModuleList([nn.Linear(40, 25), nn.Linear(37, 27)])
    assert [p.numel() for p in model.parameters()][::2] == [1000, 999]
    assert names(model) == ["0.weight"]
    assert names(model, min_size=999) == ["0.weight", "1.weight"]


def test_include_overrides_size_and_shape() -> None:
    """A pattern chooses whatever it names, a bias included, and nothing else."""
    model = nn.Sequential(nn.Linear(40, 25), nn.Linear(25, 2))
    assert names(model, include="1.*") == ["1.weight", "1.bias"]
    assert names(model, include=["1.weight", "0.b*"]) == ["0.bias", "1.weight"]
    assert names(model, include=(pattern for pattern in ["*.weight"])) == ["0.weight", "1.weight"]


def test_exclude_has_the_last_word() -> None:
    """What exclude names is out, by default selection and by include alike."""
    model = nn.Sequential(nn.Linear(40, 25), nn.Linear(25, 40))
    assert names(model, exclude="0.weight") == ["1.weight"]
    assert names(model, include="*", exclude=["*.bias", "1.*"]) == ["0.weight"]


def test_excluding_an_unprunable_tensor_makes_a_wide_pattern_usable() -> None:
    """The message for integers says exclude; doing so works."""
    assert "whole" not in names(Mixed(), include="*", exclude=["whole", "wave", "frozen.weight"])


def test_patterns_are_case_sensitive() -> None:
    """A name is matched as written on every platform."""
    with pytest.raises(ValueError, match="matches no parameter"):
        select(nn.Sequential(nn.Linear(40, 25)), include="0.WEIGHT")


def test_tied_weights_are_chosen_once() -> None:
    """An embedding tied to the output layer is one tensor, under its first name."""
    model = nn.Sequential(nn.Embedding(50, 20), nn.Linear(20, 50, bias=False))
    model[1].weight = model[0].weight
    chosen = select(model)
    assert [s.name for s in chosen] == ["0.weight"]
    assert chosen[0].parameter is model[0].weight


# ---------------------------------------------------------------- names


@pytest.mark.slow
def test_names_ignore_torch_compile() -> None:
    """A compiled model, whole or in part, has the names of the plain one."""
    model = nn.Sequential(nn.Linear(40, 25), nn.Linear(25, 40))
    plain = list(plain_names(model))
    assert list(plain_names(torch.compile(model))) == plain  # type: ignore[arg-type]
    model[1] = torch.compile(model[1])  # type: ignore[assignment]
    assert list(plain_names(model)) == plain


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_names_ignore_ddp_but_not_a_submodule_called_module() -> None:
    """DDP's "module." prefix is dropped once; a model's own submodule of that name keeps it."""
    model = nn.Module()
    model.module = nn.Linear(40, 25)
    assert list(plain_names(model)) == ["module.weight", "module.bias"]
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert list(plain_names(wrapped)) == ["module.weight", "module.bias"]
    assert list(plain_names(torch.compile(wrapped))) == ["module.weight", "module.bias"]  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is refused


def test_a_model_must_be_a_module() -> None:
    """A state dict, the likely mistake, is refused by type."""
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not (Ordered)?[Dd]ict"):
        select(nn.Linear(40, 25).state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_answered_with_the_nearest_name(option: str) -> None:
    """A typo is met with the right name, in include and exclude."""
    model = nn.Sequential(nn.Linear(40, 25))
    with pytest.raises(ValueError, match=rf"{option}='0.wieght' matches no parameter. Did you mean '0.weight'\?"):
        select(model, **{option: ["0.wieght"]})  # type: ignore[arg-type]


def test_a_pattern_unlike_any_name_is_answered_with_the_names() -> None:
    """Where nothing is near, the model's parameters are listed."""
    with pytest.raises(ValueError, match=r"The model's parameters are '0.weight', '0.bias'"):
        select(nn.Sequential(nn.Linear(40, 25)), include="zzzzzzzzzzz")


def test_one_bad_pattern_among_good_ones_is_named() -> None:
    """Every pattern has to match something."""
    with pytest.raises(ValueError, match=r"'9.weight' matches no parameter"):
        select(nn.Sequential(nn.Linear(40, 25)), include=["0.weight", "9.weight"])


def test_nothing_left_says_how_to_choose() -> None:
    """A model of small tensors names min_size and include."""
    with pytest.raises(ValueError, match=r"No parameter is left to prune.*min_size=1000.*include=\['\*.weight'\]"):
        select(nn.Linear(10, 10))
    with pytest.raises(ValueError, match="No parameter is left to prune"):
        select(nn.Linear(40, 25), exclude="weight")


@pytest.mark.parametrize(("name", "dtype"), [("whole", "int64"), ("wave", "complex64")])
def test_integer_and_complex_tensors_are_refused_by_name(name: str, dtype: str) -> None:
    """They cannot be pruned; the message says how to leave them out."""
    with pytest.raises(TypeError, match=rf"'{name}' has dtype torch.{dtype}.*exclude=\['{name}'\]"):
        select(Mixed(), include=["big.weight", name])


def test_a_frozen_tensor_is_refused_if_asked_for() -> None:
    """Asked for by name, a frozen tensor is an error and not silently skipped."""
    with pytest.raises(ValueError, match=r"'frozen.weight' is frozen.*Unfreeze it.*exclude=\['frozen.weight'\]"):
        select(Mixed(), include="frozen.weight")


def test_an_empty_tensor_is_refused() -> None:
    """A tensor without elements has no sparsity."""
    model = nn.Module()
    model.none = nn.Parameter(torch.zeros(0, 5))
    with pytest.raises(ValueError, match=r"'none' has no elements.*exclude=\['none'\]"):
        select(model, include="none")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_named(value: float) -> None:
    """The first tensor with NaN or infinity is named; finite ones pass."""
    model = nn.Sequential(nn.Linear(40, 25), nn.Linear(25, 40))
    check_finite(select(model))
    with torch.no_grad():
        model[1].weight[3, 4] = value
    with pytest.raises(ValueError, match=r"'1.weight' contains NaN or infinity. Initialise or load finite weights"):
        check_finite(select(model))


def test_lazy_parameters_have_to_be_given_a_shape_first() -> None:
    """A lazy module says what to do instead of failing on a missing shape."""
    with pytest.raises(ValueError, match=r"'0.weight', '0.bias' has no shape yet. Run the model once on a batch"):
        select(nn.Sequential(nn.LazyLinear(40)))


@pytest.mark.parametrize("min_size", ["1000", 10.5, True, None])
def test_min_size_is_a_whole_number(min_size: object) -> None:
    """Anything else is answered with an example."""
    with pytest.raises(TypeError, match=r"min_size=.* must be a whole number of elements, such as 1000"):
        select(nn.Linear(40, 25), min_size=min_size)  # type: ignore[arg-type]


def test_a_tied_tensor_answers_to_all_its_names() -> None:
    """A pattern on the second name of a tie finds the tensor, which keeps its first name."""
    model = nn.Sequential(nn.Embedding(50, 20), nn.Linear(20, 50), nn.Linear(50, 20))
    model[1].weight = model[0].weight
    assert names(model, include="1.weight") == ["0.weight"]
    assert names(model, exclude="1.weight") == ["2.weight"]


class Symmetric(nn.Module):
    """Fills the lower half with the upper one: a zero below the diagonal does not stay."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Banded(nn.Module):
    """Keeps three diagonals."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu(-1).tril(1)


class Adapted(nn.Module):
    """Adds a product that begins at zero, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(4, 40)), nn.Parameter(torch.zeros(40, 4))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


class Inverted(nn.Module):
    """Has no value where half of the weights are zero, as by chance two rows may be."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(weight)


def adapted(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Adapted())


def inverted(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(torch.eye(40))  # type: ignore[operator]
    return parametrize.register_parametrization(layer, "weight", Inverted())


def symmetric_of_odd_size(layer: nn.Module) -> nn.Module:
    odd = nn.Linear(41, 41)  # here every second weight is a pattern that is symmetric itself
    return nn.Sequential(symmetric(odd), nn.Linear(41, 40))


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def banded(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Banded())


@pytest.mark.parametrize("wrapped", [adapted, inverted, symmetric_of_odd_size])
def test_other_parametrizations_that_fill_zeros_are_refused(wrapped: Callable[..., nn.Module]) -> None:
    """An adapter that begins at zero fills them as soon as it is trained: 90 % were reported, and none was zero."""
    model = nn.Sequential(wrapped(nn.Linear(40, 40)), nn.Linear(40, 40))
    with pytest.raises(ValueError, match=r"is behind a parametrization \(.*\) that does not keep its zeros"):
        pb.prune_(model, pb.Fixed(sparsity=0.5))


@pytest.mark.parametrize("wrapped", [parametrizations.orthogonal, symmetric])
@pytest.mark.parametrize("act", ["prune_", "plan", "Pruner"])
def test_a_parametrization_that_fills_zeros_is_refused(wrapped: Callable[..., nn.Module], act: str) -> None:
    """The parameter would be sparse and the layer's weight dense; leaving it out works."""
    model = nn.Sequential(wrapped(nn.Linear(40, 40)), nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    goal, name = pb.Fixed(sparsity=0.5), "0.parametrizations.weight.original"
    acts: dict[str, Callable[..., Any]] = {
        "prune_": lambda **options: pb.prune_(model, goal, **options),
        "plan": lambda **options: pb.plan(model, goal, **options),
        "Pruner": lambda **options: pb.Pruner(model, optimizer, goal, **options),
    }
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"'{name}' is behind a parametrization .*exclude=\['{name}'\]"):
        acts[act]()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    acts[act](exclude=name)  # and this is accepted


@pytest.mark.parametrize("wrapped", [parametrizations.weight_norm, parametrizations.spectral_norm, banded])
def test_a_parametrization_that_keeps_zeros_is_pruned_behind(wrapped: Callable[..., nn.Module]) -> None:
    """Where the parameter is zero the layer's weight is; nothing that a trial has changed stays changed."""
    channels_last = nn.Conv2d(32, 1200, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layer = wrapped(nn.Linear(40, 40) if wrapped is banded else channels_last)
    before = copy.deepcopy(layer.state_dict())
    chosen = select(layer)
    check_zeros_stay(layer, chosen)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert len(chosen) == 1  # and not the 1,200 lengths that weight_norm has beside it
    pb.prune_(layer, pb.Fixed(sparsity=0.5))
    assert bool((layer.weight[chosen[0].parameter == 0] == 0).all())
