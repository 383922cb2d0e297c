"""Every kind of bad input: refused at construction, by a sentence that says what to write, with nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT
from optimizers import sgd
from torch import nn
from torch.optim import SGD, Optimizer

import pareback as pb


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 50))


class Odd(nn.Module):
    """A model with an integer and a complex parameter beside a usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(50, 40)
        self.whole = nn.Parameter(torch.ones(40, 40, dtype=torch.int32), requires_grad=False)
        self.wave = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))


def with_value(value: float) -> nn.Sequential:
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 2] = value
    return model


def first_layer(model: nn.Module) -> Optimizer:
    return SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]


class Wrapper:
    """What a library's optimizer wrapper looks like: not a torch optimizer itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class Lookahead(Optimizer):
    """A torch optimizer that holds another."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner


def schedule_free(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.param_groups[0]["train_mode"] = True
    return optimizer


def sparse_embedding() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 20, sparse=True), nn.Linear(20, 100))


GOAL = pb.Budget(sparsity=0.9)


@dataclass
class Case:
    """One mistake: how to make it and what has to be answered."""

    error: type[Exception] | tuple[type[Exception], ...]
    says: str
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Any] = sgd
    goal: Any = GOAL
    options: dict[str, Any] = field(default_factory=dict)


BAD: dict[str, Case] = {
    # a budget below the floor, or outside its range on this model
    "sparsity below the floor": Case(
        ValueError,
        r"allows 3 non-zero pruned weights, but 4 is the least.*Allow more, or prune more",
        goal=pb.Budget(sparsity=0.9991),
    ),
    "params below the rest": Case(
        ValueError,
        r"allows 100 parameters, but 174 is the least: 170 in what is not pruned.*Allow more",
        goal=pb.Budget(params=100),
    ),
    "bytes below the rest": Case(
        ValueError, r"allows 1,000 bytes, but .* is the least.*Allow more", goal=pb.Budget(bytes="1KB")
    ),
    "flops below the floor": Case(
        ValueError,
        r"allows 5 FLOPs, but 8 is the least.*Allow more",
        goal=pb.Budget(flops=5),
        options={"example_inputs": torch.zeros(2, 50)},
    ),
    "layer density above the budget": Case(
        ValueError, r"layer_density.*Allow more", goal=pb.Budget(sparsity=0.9, layer_density=(0.2, 1.0))
    ),
    # unknown options
    "misspelt keyword": Case(
        TypeError, r"Pruner has no option 'total_step'. Did you mean 'total_steps'\?", options={"total_step": 5}
    ),
    "another misspelt keyword": Case(
        TypeError, r"has no option 'minsize'. Did you mean 'min_size'\?", options={"minsize": 5}
    ),
    "unheard-of keyword": Case(
        TypeError, r"has no option 'qqqq'. It takes 'model', 'optimizer', 'goal'", options={"qqqq": 1}
    ),
    "unknown shrink": Case(
        ValueError,
        r"shrink='powr' is not known. Write one of 'hard', 'power', 'soft'. Did you mean 'power'\?",
        options={"shrink": "powr"},
    ),
    "goal is a number": Case(TypeError, r"goal=0.9 is not a goal. Write pb.Budget\(sparsity=0.95\)", goal=0.9),
    "goal is a class": Case(TypeError, r"is not a goal. Write pb.Budget\(sparsity=0.95\)", goal=pb.Budget),
    # patterns
    "include matches nothing": Case(
        ValueError, r"include='0.wait' matches no parameter. Did you mean '0.weight'\?", options={"include": "0.wait"}
    ),
    "exclude matches nothing": Case(ValueError, r"exclude='9.*' matches no parameter", options={"exclude": ["9.*"]}),
    "nothing large enough": Case(
        ValueError, r"No parameter is left to prune.*lower min_size, or name tensors", options={"min_size": 10**9}
    ),
    # optimizers
    "parameter missing from the optimizer": Case(
        ValueError,
        r"'2.weight' would be pruned but is in no optimizer.*Add it to the optimizer, or .*exclude=\['2.weight'\]",
        optimizer=first_layer,
    ),
    "optimizer of another model": Case(
        ValueError,
        r"This optimizer belongs to another model: no parameter of this one is in it. Make it with",
        optimizer=lambda m: torch.optim.SGD(copy.deepcopy(m).parameters(), lr=0.1),
    ),
    "LBFGS": Case(
        ValueError,
        r"LBFGS evaluates the model several times.*Use pb.ParametrizedPruner",
        optimizer=lambda m: torch.optim.LBFGS(m.parameters()),
    ),
    "optimizer is not one": Case(
        TypeError, r"optimizer must be a torch.optim.Optimizer or a sequence of them, not", optimizer=lambda m: None
    ),
    "no optimizers": Case(
        TypeError, r"optimizer must be a torch.optim.Optimizer or a sequence", optimizer=lambda m: []
    ),
    "wrapped optimizer": Case(
        TypeError,
        r"Wrapper is not a torch.optim.Optimizer.*Give the torch optimizer inside",
        optimizer=lambda m: [Wrapper(sgd(m))],
    ),
    "optimizer within an optimizer": Case(
        ValueError, r"Lookahead wraps another optimizer. Give its .inner", optimizer=lambda m: Lookahead(sgd(m))
    ),
    "schedule-free optimizer": Case(
        ValueError, r"schedule-free.*Use the ordinary optimizer with a schedule", optimizer=schedule_free
    ),
    # FLOPs
    "flops without inputs": Case(
        ValueError, r"needs example_inputs=: a tensor, a tuple or a dict", goal=pb.Budget(flops=0.5)
    ),
    "unconstrained flops without inputs": Case(
        ValueError, r"needs example_inputs=", goal=pb.Unconstrained(cost="flops")
    ),
    "inputs that do not fit": Case(
        ValueError,
        r"example_inputs did not fit Sequential.forward: pass",
        goal=pb.Budget(flops=0.5),
        options={"example_inputs": torch.zeros(2, 7)},
    ),
    # weights
    "NaN": Case(
        ValueError,
        r"'2.weight' contains NaN or infinity. Initialise or load finite weights",
        model=lambda: with_value(float("nan")),
    ),
    "infinity": Case(
        ValueError, r"'2.weight' contains NaN or infinity. Initialise or load", model=lambda: with_value(float("inf"))
    ),
    "integers selected": Case(
        TypeError,
        r"'whole' has dtype torch.int32.*exclude=\['whole'\]",
        model=Odd,
        options={"include": ["usual.weight", "whole"]},
    ),
    "complex selected": Case(
        TypeError, r"'wave' has dtype torch.complex64.*exclude=\['wave'\]", model=Odd, options={"include": "wave"}
    ),
    "sparse embedding": Case(
        ValueError,
        r"embedding '0' has sparse=True.*Build it with sparse=False, or leave it out with exclude=\['0.weight'\]",
        model=sparse_embedding,
    ),
    # steps and rates
    "total_steps missing": Case(
        ValueError, r"total_steps=epochs \* len\(loader\).*Write ramp=0", options={"total_steps": None}
    ),
    "total_steps missing with a ramp": Case(
        ValueError,
        r"total_steps=epochs \* len\(loader\)",
        goal=pb.Fixed(0.9),
        options={"total_steps": None, "ramp": 0.2},
    ),
    "total_steps is a float": Case(
        TypeError, r"total_steps=10.0 must be a whole number: epochs \* len", options={"total_steps": 10.0}
    ),
    "total_steps is a bool": Case(TypeError, r"total_steps=True must be a whole number", options={"total_steps": True}),
    "total_steps is zero": Case(
        ValueError, r"total_steps=0 must be at least 1: epochs \* len", options={"total_steps": 0}
    ),
    "ramp above one": Case(
        ValueError, r"ramp=50 must be the share of total_steps .* in \[0, 1\]", options={"ramp": 50}
    ),
    "ramp is a string": Case((TypeError, ValueError), r"ramp='half' must be the share", options={"ramp": "half"}),
    "threshold_lr negative": Case(
        ValueError, r"threshold_lr=-1 must be a multiple of .* such as 0.01", options={"threshold_lr": -1}
    ),
    "threshold_lr infinite": Case(
        ValueError, r"threshold_lr=inf must be a multiple", options={"threshold_lr": float("inf")}
    ),
    "threshold_lr not a number": Case(
        (TypeError, ValueError), r"threshold_lr='fast' must be a multiple", options={"threshold_lr": "fast"}
    ),
    "min_size is a string": Case((TypeError, ValueError), r"min_size='big'.*", options={"min_size": "big"}),
    "model is a state dict": Case(
        TypeError, r"model must be a torch.nn.Module", model=lambda: mlp().state_dict(), optimizer=lambda m: sgd(mlp())
    ),  # type: ignore[arg-type,return-value]
}


def bits(model: nn.Module) -> dict[str, Any]:
    """Everything a model stores, and where: values bit for bit, identity, flags."""
    parameters = {n: (id(p), p.requires_grad, p.grad, p._version) for n, p in model.named_parameters()}
    values = {n: v.clone().view(torch.uint8) if v.ndim else v.clone() for n, v in model.state_dict().items()}
    modules = {
        n: (m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks), type(m))
        for n, m in model.named_modules()
    }
    return {"parameters": parameters, "modules": modules, "values": values}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    values = zip(a["values"].items(), b["values"].items(), strict=True)
    return (
        a["parameters"] == b["parameters"]
        and a["modules"] == b["modules"]
        and all(na == nb and torch.equal(va, vb) for (na, va), (nb, vb) in values)
    )


def groups(optimizer: Optimizer) -> Any:
    plain = [{k: v if k != "params" else [id(p) for p in v] for k, v in g.items()} for g in optimizer.param_groups]
    hooks = [dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)]
    return copy.deepcopy(plain), [list(h) for h in hooks], dict(optimizer.state)


@EITHER_MOUNT
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_nothing_changes(name: str, mount: Any) -> None:
    """The right exception with a sentence to act on; model and optimizer stay bit for bit."""
    case = BAD[name]
    if mount is pb.ParametrizedPruner and name == "LBFGS":
        pytest.skip("the one optimizer that this mount is for")
    model = case.model()
    optimizer = case.optimizer(model)
    optimizers = [o for o in (optimizer if isinstance(optimizer, list) else [optimizer]) if isinstance(o, Optimizer)]
    is_module = isinstance(model, nn.Module)
    before = bits(model) if is_module else None, [groups(o) for o in optimizers]
    says = case.says.replace("Pruner has no", f"{mount.__name__} has no")
    with pytest.raises(case.error, match=says) as caught:
        mount(model, optimizer, case.goal, **{"total_steps": 10, **case.options})
    assert len(str(caught.value)) > 20
    if is_module:
        assert same(before[0], bits(model))  # type: ignore[arg-type]
    assert before[1] == [groups(o) for o in optimizers]


def test_two_pruners_on_one_parameter() -> None:
    """The second is refused and says to finish the first or to exclude; the first goes on undisturbed."""
    model = mlp()
    optimizer = sgd(model)
    first = pb.Pruner(model, optimizer, pb.Fixed(0.9), include="0.weight")
    before, hooks = bits(model), groups(optimizer)
    with pytest.raises(
        ValueError, match=r"'0.weight' is being pruned by another pruner.*finish\(\) first, or .*exclude=\['0.weight'\]"
    ):
        pb.Pruner(model, optimizer, pb.Fixed(0.5))
    assert same(before, bits(model))
    assert groups(optimizer) == hooks
    pb.Pruner(model, optimizer, pb.Fixed(0.5), exclude="0.weight")
    first.finish()
    pb.Pruner(model, optimizer, pb.Fixed(0.5), include="0.weight")


def test_two_pruners_on_tied_parameters() -> None:
    """A tensor is the same under either of its names."""
    model = nn.Sequential(nn.Embedding(60, 20), nn.Linear(20, 60))
    model[1].weight = model[0].weight
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, pb.Fixed(0.9))
    with pytest.raises(ValueError, match="being pruned by another pruner"):
        pb.Pruner(model[1], optimizer, pb.Fixed(0.9))


def test_a_failed_construction_claims_nothing() -> None:
    """After any refusal the same parameters can be pruned, so no owner is left behind."""
    model = mlp()
    optimizer = sgd(model)
    for goal, options in ((GOAL, {}), (pb.Budget(flops=0.5), {}), (pb.Fixed(0.5), {"threshold_lr": -1})):
        with pytest.raises(ValueError, match=r"total_steps|example_inputs|threshold_lr"):
            pb.Pruner(model, optimizer, goal, **options)  # type: ignore[arg-type]
    pb.Pruner(model, optimizer, pb.Fixed(0.5)).finish()


@pytest.mark.parametrize("function", [pb.plan, pb.prune_], ids=["plan", "prune_"])
def test_functions_answer_misspelt_options_too(function: Callable[..., Any]) -> None:
    """pb.plan and pb.prune_ suggest as the pruner does, and change nothing."""
    model = mlp()
    before = bits(model)
    with pytest.raises(TypeError, match=rf"{function.__name__} has no option 'includ'. Did you mean 'include'\?"):
        function(model, GOAL, includ="*")
    with pytest.raises(ValueError, match=r"shrink='hrd' is not known.*Did you mean 'hard'"):
        function(model, GOAL, shrink="hrd")
    with pytest.raises((TypeError, ValueError), match=r"is not a goal. Write pb.Budget|needs a goal .*: pb.Budget"):
        function(model, 0.9)
    with pytest.raises(ValueError, match="needs example_inputs="):
        function(model, pb.Budget(flops=0.5))
    assert same(before, bits(model))


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda model: pb.inspect(model, example_input=1), "example_inputs"),  # type: ignore[call-arg]
        (lambda model: pb.freeze(model, sgd(model), includes="*"), "include"),  # type: ignore[call-arg]
    ],
    ids=["inspect", "freeze"],
)
def test_every_public_function_answers_a_misspelt_option(call: Callable[[nn.Module], Any], right: str) -> None:
    """inspect and freeze name the keyword that was meant."""
    with pytest.raises(TypeError, match=f"Did you mean '{right}'"):
        call(mlp())
