"""pb.freeze keeps the zeros of a pruned model through further training."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import backward, mlp, train, training, wide_batches
from optimizers import decaying
from torch import Tensor, nn

import pareback as pb
from pareback.pruning.options import frozen_here

Kind = Callable[[nn.Module], torch.optim.Optimizer]


DATA = wide_batches(50, 16, 32)
OPTIMIZERS = pytest.mark.parametrize(
    "kind",
    [
        decaying,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    ],
    ids=["sgd with decay", "nesterov", "adamw"],
)


def finished(kind: Kind = decaying, mount: Any = pb.Pruner) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model trained to 80 % sparsity and its optimizer, momenta and all."""
    model = mlp(32, 40, 32)
    optimizer = kind(model)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    train(model, optimizer, DATA[:20])
    pruner.finish()
    return model, optimizer


def masks(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() == 0 for name, p in model.named_parameters() if p.ndim > 1}


def kept(before: dict[str, Tensor], model: nn.Module) -> bool:
    """Whether every zero of before is still one, to the sign."""
    now = dict(model.named_parameters())
    return all(torch.equal(now[n][zeros], torch.zeros(int(zeros.sum()))) for n, zeros in before.items())


@OPTIMIZERS
@EITHER_MOUNT
def test_zeros_stay_zero_through_fine_tuning(mount: Any, kind: Kind) -> None:
    """Momentum gathered while pruning, and decay, push at every zero; none moves in 50 steps, and the others train."""
    model, optimizer = finished(kind, mount)
    zeros, before = masks(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    pb.freeze(model, optimizer)
    for _ in training(model, optimizer, DATA):
        assert kept(zeros, model)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert pb.inspect(model).pruned_nonzeros == 2 * 32 * 40 // 5


@OPTIMIZERS
def test_without_it_a_plain_step_fills_them(kind: Kind) -> None:
    """Why it is needed: after finish() the optimizer is an ordinary one."""
    model, optimizer = finished(kind)
    train(model, optimizer, DATA[:1])
    assert pb.inspect(model).sparsity < 0.5


def test_a_new_optimizer_keeps_them_too() -> None:
    """Fine-tuning usually starts with a fresh optimizer, or several; each is given to freeze."""
    model, _ = finished()
    zeros = masks(model)
    first, second = torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=0.1)
    pb.freeze(model, [first, second])
    for _ in training(model, [first, second], DATA[:10]):
        assert kept(zeros, model)


def test_fine_tuning_equals_training_the_remaining_weights_alone() -> None:
    """Frozen zeros take no part: the run is that of a plain loop that masks gradients and weights by hand."""
    model, plain = mlp(32, 40, 32), mlp(32, 40, 32)
    for one in (model, plain):
        pb.prune_(one, pb.Budget(sparsity=0.8))
    optimizer, reference, zeros = decaying(model), decaying(plain), masks(plain)
    pb.freeze(model, optimizer)
    for batch in DATA[:20]:
        train(model, optimizer, [batch])
        backward(plain, batch)
        for name, p in plain.named_parameters():
            if name in zeros:
                p.grad[zeros[name]] = 0.0
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_remove_ends_it() -> None:
    """After remove(), twice is harmless, zeros train again and the optimizer has no hooks left."""
    model, optimizer = finished()
    zeros = masks(model)
    frozen = pb.freeze(model, optimizer)
    train(model, optimizer, DATA[:1])
    assert kept(zeros, model)
    frozen.remove()
    frozen.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer, DATA[1:2])
    assert not kept(zeros, model)


def test_a_with_block_ends_it() -> None:
    """Zeros are kept inside the block and only there, also when it is left by an exception."""
    model, optimizer = finished()
    zeros = masks(model)

    def interrupted() -> None:
        with pb.freeze(model, optimizer) as frozen:
            assert frozen.names == ["0.weight", "2.weight"]
            train(model, optimizer, DATA[:1])
            assert kept(zeros, model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    train(model, optimizer, DATA[1:2])
    assert not kept(zeros, model)


@pytest.mark.parametrize("options", [{"exclude": "2.*"}, {"include": "0.weight"}, {"exclude": ["2.weight"]}], ids=str)
def test_include_and_exclude_choose_what_is_kept(options: dict[str, Any]) -> None:
    """A tensor left out fills up, the other keeps its zeros."""
    model, optimizer = finished()
    zeros = masks(model)
    frozen = pb.freeze(model, optimizer, **options)
    assert frozen.names == ["0.weight"]
    train(model, optimizer, DATA[:3])
    assert kept({"0.weight": zeros["0.weight"]}, model)
    assert not kept({"2.weight": zeros["2.weight"]}, model)


def test_a_layer_that_does_not_train_may_be_excluded() -> None:
    """exclude may name a layer with requires_grad=False; leaving it out is what it asks for."""
    model, optimizer = finished()
    model[2].requires_grad_(False)
    assert pb.freeze(model, optimizer, exclude="2.*").names == ["0.weight"]


def test_tensors_without_or_of_only_zeros_are_left_to_train() -> None:
    """A layer that starts at zero on purpose, and biases, train under freeze as they would without."""
    model, _ = finished()
    model.append(nn.Linear(32, 32))
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    optimizer = decaying(model)
    frozen = pb.freeze(model, optimizer)
    assert frozen.names == ["0.weight", "2.weight"]
    train(model, optimizer, DATA[:3])
    assert bool((model[3].weight != 0).any())
    assert bool((model[3].bias != 0).any())


def test_a_dense_model_is_refused() -> None:
    """With nothing to keep, the message says to prune first."""
    model = mlp(32, 40, 32)
    with pytest.raises(ValueError, match="no zeros to keep"):
        pb.freeze(model, decaying(model))


def test_an_optimizer_of_another_model_is_refused() -> None:
    """An optimizer that does not hold the tensors could not keep their zeros, so it is not accepted in silence."""
    model, _ = finished()
    with pytest.raises(ValueError, match="This optimizer belongs to another model"):
        pb.freeze(model, decaying(mlp(32, 40, 32)))


def test_a_model_pruned_once_is_fine_tuned_at_its_sparsity() -> None:
    """prune_, freeze, train: the classic recipe ends with the count it started from."""
    model = mlp(32, 40, 32)
    pb.prune_(model, pb.Fixed(sparsity=0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pb.freeze(model, optimizer):
        train(model, optimizer, DATA[:20])
    assert pb.inspect(model).pruned_nonzeros == 2 * 32 * 40 // 10


def test_it_works_with_a_closure_and_in_half_precision() -> None:
    """A step given a closure, and a model in bfloat16, keep their zeros as well."""
    model, _ = finished()
    model.to(torch.bfloat16)
    optimizer = decaying(model)
    zeros = masks(model)
    pb.freeze(model, optimizer)
    x = torch.randn(16, 32).to(torch.bfloat16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x.argmax(1))
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert all(not p[zeros[name]].any() for name, p in model.named_parameters() if name in zeros)


def test_a_step_that_is_interrupted_leaves_the_zeros() -> None:
    """Momentum has filled them by then. Whoever catches Ctrl-C and saves the model saves what was pruned."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1.0)
            raise KeyboardInterrupt

    model, _ = finished()
    optimizer = Interrupted(model.parameters(), lr=0.1)
    zeros = masks(model)
    with pb.freeze(model, optimizer):
        backward(model, DATA[0])
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert kept(zeros, model)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_stays_frozen(copied):
    """A copy of model, optimizer and freeze keeps its zeros by itself; one that was ended stays ended."""
    model = mlp(32, 40, 32)
    pb.prune_(model, pb.Budget(sparsity=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    frozen = pb.freeze(model, optimizer)
    twin, own, held = copied((model, optimizer, frozen))
    names = ["0.weight", "2.weight"]

    def kept(model):
        return [int(model.get_parameter(name).count_nonzero()) for name in names]

    before = kept(twin)
    train(twin, own, DATA[:5])
    assert kept(twin) == before
    held.remove()
    train(twin, own, DATA[:5])
    assert kept(twin) != before
    assert kept(model) == before


@pytest.mark.parametrize("alive", [True, False], ids=["the old one is there", "the old one is gone"])
def test_an_optimizer_that_is_made_later_keeps_the_zeros_too(alive: bool) -> None:
    """It filled them in its first step, without a word. It is told of once, and remove() ends it there as well."""
    model, old = finished()
    zeros = masks(model)
    frozen = pb.freeze(model, old)
    if not alive:
        del old
        gc.collect()
    new = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with pytest.warns(UserWarning, match="A new AdamW moves tensors whose zeros pb.freeze keeps"):
        train(model, new, DATA[:1])
    for _ in training(model, new, DATA[1:10]):
        assert kept(zeros, model)
    frozen.remove()
    assert not new._optimizer_step_pre_hooks
    train(model, new, DATA[10:11])
    assert not kept(zeros, model)


def test_one_that_several_were_told_of_or_a_pruner_is_no_news() -> None:
    """Frozen anew for the new optimizer, or pruned further with it: nothing is filled, and nothing is said."""
    model, old = finished()
    zeros = masks(model)
    first = pb.freeze(model, old)
    new = decaying(model)
    second = pb.freeze(model, new)
    train(model, new, DATA[:3])
    assert kept(zeros, model)
    second.remove()
    later = decaying(model)
    pruner = pb.Pruner(model, later, pb.Budget(sparsity=0.9), total_steps=5)
    train(model, later, DATA[:5])
    assert pruner.finish().pruned_nonzeros == 2 * 32 * 40 // 10
    assert not later._optimizer_step_pre_hooks
    first.remove()


def test_other_weights_that_were_given_since_are_left_alone() -> None:
    """A layer that was made dense has no zeros to keep for a new optimizer; the other layer has."""
    model, old = finished()
    zeros = masks(model)
    frozen = pb.freeze(model, old)
    with torch.no_grad():
        model[0].weight.normal_()
    new = decaying(model)
    with pytest.warns(UserWarning, match="A new SGD moves tensors"):
        train(model, new, DATA[:1])
    assert frozen.names == ["2.weight"]
    train(model, new, DATA[1:5])
    assert kept({"2.weight": zeros["2.weight"]}, model)
    assert bool((model[0].weight != 0).all())
    with torch.no_grad():
        model[2].weight.normal_()
    train(model, decaying(model), DATA[:1])  # nothing is left to keep, and nothing to say
    assert frozen.names == []
    train(model, decaying(model), DATA[1:2])
    train(model, old, DATA[2:3])


def test_an_optimizer_of_other_tensors_or_around_another_is_let_be() -> None:
    """A generator's and discriminator's loop, and a wrapper whose inner optimizer was given."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model, old = finished()
    other = mlp(32, 40, 32)
    zeros = masks(model)
    pb.freeze(model, old)
    train(other, decaying(other), DATA[:2])
    assert bool((other[0].weight != 0).all())
    train(model, Around(old), DATA[:2])
    assert kept(zeros, model)


def test_what_looks_at_new_optimizers_keeps_no_model_alive() -> None:
    """A block that ended is looked after no more, and a model that nobody needs goes with its masks."""
    model, optimizer = finished()
    frozen = pb.freeze(model, optimizer)
    with pb.freeze(model, optimizer):
        assert len(frozen_here[model]) == 2
    assert frozen_here[model] == [frozen]
    held = weakref.ref(model), weakref.ref(optimizer)
    del model
    gc.collect()
    assert held[0]() is None
    del optimizer
    gc.collect()
    assert held[1]() is None  # what freeze returned keeps no optimizer


@pytest.mark.filterwarnings("error")
def test_another_pruned_network_that_is_loaded_keeps_its_own_zeros() -> None:
    """It was cut to the zeros of the first as well, to half its weights, without a word."""
    model, optimizer = finished()
    pb.freeze(model, optimizer)
    train(model, optimizer, DATA[:3])
    other = mlp(32, 40, 32)
    nn.init.normal_(other[0].weight)
    pb.prune_(other, pb.Budget(sparsity=0.8))
    model.load_state_dict(other.state_dict())
    zeros = masks(model)
    for _ in training(model, optimizer, DATA[3:8]):
        assert kept(zeros, model)
    assert pb.inspect(model).pruned_nonzeros == pb.inspect(other).pruned_nonzeros


def test_dense_weights_that_are_loaded_are_cut_again_which_is_said() -> None:
    model, optimizer = finished()
    zeros = masks(model)
    pb.freeze(model, optimizer)
    model.load_state_dict(mlp(32, 40, 32).state_dict())
    with torch.no_grad():
        model[0].weight.add_(0.1)
        model[2].weight.add_(0.1)
    with pytest.warns(
        UserWarning, match="were given values, as load_state_dict or beginning .* and are cut to zero again"
    ):
        train(model, optimizer, DATA[:1])
    assert kept(zeros, model)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    train(model, optimizer, DATA[1:2])  # it is said once
    assert kept(zeros, model)


def test_rows_that_begin_anew_are_cut_to_the_zeros_again_which_is_said() -> None:
    """Half a layer was made dense, as one does with neurons that died. It stayed dense, without a word."""
    model, optimizer = finished()
    zeros = masks(model)
    pb.freeze(model, optimizer)
    with torch.no_grad():
        model[0].weight[:20].normal_()
    with pytest.warns(UserWarning, match="Weights of '0.weight' that pb.freeze keeps at zero were given values"):
        train(model, optimizer, DATA[:1])
    assert kept(zeros, model)


def test_what_was_cut_again_is_said_of_each_tensor() -> None:
    model, optimizer = finished()
    zeros = masks(model)
    pb.freeze(model, optimizer)
    for i, batch in ((0, DATA[0]), (2, DATA[1])):
        with torch.no_grad():
            model[i].weight[:20].normal_()
        with pytest.warns(UserWarning, match=f"Weights of '{i}.weight' that pb.freeze keeps at zero were given values"):
            train(model, optimizer, [batch])
    assert kept(zeros, model)


@pytest.mark.parametrize("between", ["an inner block", "a pruner"])
def test_an_optimizer_that_somebody_else_looked_after_is_looked_at_again(between: str) -> None:
    """It was no news while the inner block or the pruner was at work, and then forgotten: all zeros were filled."""
    model, optimizer = finished()
    pb.freeze(model, optimizer)
    later = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if between == "an inner block":
        with pb.freeze(model, later):
            train(model, later, DATA[:3])
    else:
        pruner = pb.Pruner(model, later, pb.Budget(sparsity=0.95), total_steps=3)
        train(model, later, DATA[:3])
        pruner.finish()
    zeros = masks(model)
    with pytest.warns(UserWarning, match="A new AdamW moves tensors whose zeros pb.freeze keeps"):
        train(model, later, DATA[3:4])
    train(model, later, DATA[4:8])
    assert kept(zeros, model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["pruned once", "loaded"])
def test_a_network_that_is_made_sparser_stays_so(how: str) -> None:
    """Of zeros that held all old ones nothing was noticed, and the network grew back to those."""
    model, optimizer = finished()
    pb.freeze(model, optimizer)
    train(model, optimizer, DATA[:3])
    sparser = model if how == "pruned once" else copy.deepcopy(model)
    pb.prune_(sparser, pb.Budget(sparsity=0.95))
    model.load_state_dict(sparser.state_dict())
    zeros = masks(model)
    train(model, optimizer, DATA[3:8])
    assert kept(zeros, model)
    assert sum(int(zero.sum()) for zero in zeros.values()) == 0.95 * 2 * 32 * 40


def test_a_copy_is_looked_after_by_its_own_later_optimizers() -> None:
    """As the original is: a later optimizer filled the zeros of a copy."""
    model, optimizer = finished()
    model, optimizer, frozen = copy.deepcopy((model, optimizer, pb.freeze(model, optimizer)))
    zeros, later = masks(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="A new AdamW moves tensors whose zeros pb.freeze keeps"):
        train(model, later, DATA[:1])
    assert kept(zeros, model)
    frozen.remove()
    train(model, later, DATA[1:2])
    assert not kept(zeros, model)


def test_a_wrapper_that_goes_takes_nothing_along() -> None:
    """What torch.compile or DataParallel returned for the call was what zeros were remembered by."""
    model, optimizer = finished()
    pb.freeze(torch.compile(nn.DataParallel(model)), optimizer)  # type: ignore[arg-type]
    gc.collect()
    zeros, later = masks(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="A new AdamW moves tensors whose zeros pb.freeze keeps"):
        train(model, later, DATA[:1])
    assert kept(zeros, model)


def test_tensors_that_are_replaced_are_mentioned() -> None:
    """load_state_dict(assign=True) puts other tensors into the model, of which freeze knows nothing."""
    model, optimizer = finished()
    pb.freeze(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    later = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(
        UserWarning, match=r"'0.weight', '2.weight' had zeros that pb.freeze keeps, and the model has an"
    ):
        train(model, later, DATA[:1])


@pytest.mark.filterwarnings("ignore:The optimizer's state was loaded")  # of the twin nobody knows why
@pytest.mark.parametrize("sparsity", [0.95, 0.5])
@EITHER_MOUNT
def test_it_rests_while_a_pruner_is_at_work_and_keeps_what_that_leaves(mount: Any, sparsity: float) -> None:
    """Two would decide about the same zeros in the same optimizer: a pruner's own growth was cut between its steps."""
    model, optimizer = finished()
    pb.freeze(model, optimizer)
    train(model, optimizer, DATA[:2])
    twin, its = copy.deepcopy((model, optimizer))
    for net, opt in ((model, optimizer), (twin, its)):
        pruner = mount(net, opt, pb.Budget(sparsity=sparsity), total_steps=10)
        train(net, opt, DATA[2:12])
        assert pruner.finish().pruned_nonzeros == round((1 - sparsity) * 2 * 32 * 40)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    zeros = masks(model)
    train(model, optimizer, DATA[12:16])
    assert kept(zeros, model)


@pytest.mark.filterwarnings("error")
def test_a_layer_that_is_set_to_zero_on_purpose_trains() -> None:
    """As with freeze itself: its weights that were kept train on from zero, and the others stay zero."""
    model, optimizer = finished()
    zeros = masks(model)
    pb.freeze(model, optimizer)
    with torch.no_grad():
        model[2].weight.zero_()
    train(model, optimizer, DATA[:8])
    assert kept(zeros, model)
    assert int(model[2].weight.count_nonzero()) > 0.9 * int((~zeros["2.weight"]).sum())
