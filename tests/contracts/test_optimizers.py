"""Any optimizer that steps once: torch's own, third-party subclasses, several at once, closures, errors and hooks."""

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import PRUNED, assert_same, backward, batches, copied, network, nonzeros, train
from optimizers import Fails, Sam
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pareback as pb


class ThirdParty(torch.optim.Optimizer):
    """A sign-of-momentum optimizer as one finds them on the web: its own loop, `.data`, no foreach."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p.data))
                average.mul_(group["beta"]).add_(p.grad.data, alpha=1 - group["beta"])
                p.data = p.data - group["lr"] * average.sign()
        return loss


class CallsSuper(torch.optim.SGD):
    """A subclass that hands over to torch's step, whose hooks then fire a second time inside the first."""

    def step(self, closure=None):
        return super().step(closure)


class DecaysAfterwards(torch.optim.SGD):
    """A subclass that goes on changing the weights after torch's step."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.1 * group["lr"])
        return loss


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD for-loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=3e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=3e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "third party": ThirdParty,
    "calls super": lambda p: CallsSuper(p, lr=0.1, momentum=0.9),
    "decays afterwards": lambda p: DecaysAfterwards(p, lr=0.1, momentum=0.9),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=1e-2)


@pytest.fixture(autouse=True)
def _torch_step_is_hooked():
    """Torch puts hooks around a class's step when its first instance is made; super().step has them only then."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_to_the_budget(name, mount):
    """Whatever the optimizer: sparse after each step, on target after the ramp, exact at the end, and it learns."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.75), total_steps=60)
    data = batches(60, size=32)
    start = backward(model, data[-1])
    for number, batch in enumerate(data):
        train(model, optimizer, [batch])
        assert int(pruner.metrics()["step"]) == number + 1  # hooks that fire twice count once
        if number > 40:
            assert pruner.metrics()["sparsity"].item() == pytest.approx(0.75, abs=0.02)
            assert sum(int(_seen(model, name).count_nonzero()) for name in PRUNED) == sum(pruner.counts())
    pruner.finish()
    assert sum(nonzeros(model)) == 832
    assert backward(model, data[-1]) < start


def _seen(model, name):
    """Return a weight as the forward pass sees it, also where it is parametrized."""
    return model.get_submodule(name.split(".")[0]).weight.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adadelta(p, lr=1.0),
        lambda p: torch.optim.ASGD(p, lr=0.1),
        lambda p: ThirdParty(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=1.0),
    ],
    ids=["Adadelta", "ASGD", "third party", "SGD"],
)
def test_thresholds_are_calm_where_learning_rates_are_large(make):
    """lr = 1 is Adadelta's (and Prodigy's) usual one; read as a step in σ it would throw thresholds about."""
    model = network()
    optimizer = make(model.parameters())
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=0.1))
    trace = [pruner.r()]
    for batch in batches(15):
        train(model, optimizer, [batch])
        trace.append(pruner.r())
    assert torch.stack(trace).diff(dim=0).abs().max() <= 0.05


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_beside_adamw():
    """Muon takes matrices only, so it comes in a pair with another optimizer for the rest."""
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    pruner = pb.Pruner(model, optimizers, pb.Budget(sparsity=0.75), total_steps=30)
    train(model, optimizers, batches(30))
    assert pruner.finish().pruned_nonzeros == 832


# -- subclasses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.8), pb.Fixed(sparsity=0.8), pb.Unconstrained(weight=1.0)])
def test_a_subclass_that_calls_super_equals_its_base(goal):
    """Hooks that fire twice for one step do no more than hooks that fire once."""

    def run(kind):
        model = network()
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        pruner = pb.Pruner(model, optimizer, goal, total_steps=20)
        train(model, optimizer, batches(20))
        return {**copied(model), "r": pruner.r(), "step": pruner.metrics()["step"]}

    assert_same(run(CallsSuper), run(torch.optim.SGD))


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_what_a_subclass_does_after_super_step_reaches_the_weights_once(shrink):
    """Decay after ``super().step()`` decays the survivors by its factor and no more, whatever the shrink operator."""
    model = network()
    optimizer = DecaysAfterwards(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), ramp=0, shrink=shrink)
    before = [value.clone() for value in pruner.state_dict()["latents"].values()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(10):
        optimizer.step()
    for old, new in zip(before, pruner.state_dict()["latents"].values(), strict=True):
        large = old.abs() > 1.5 * old.std()
        # The decay was 1 % a step, of the pruned weight or of the latent one; ten steps cannot take a third.
        assert ((new / old)[large] > 0.85).all()
        assert ((new / old)[large] < 0.95).all()
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_an_optimizer_that_ignores_its_closure_keeps_latent_weights(shrink):
    """A step that never calls its closure moves the pruned weights; what was pruned away is still not lost."""

    class Ignores(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])

    model = network()
    optimizer = Ignores(model.parameters(), lr=1e-3)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), ramp=0, shrink=shrink)
    before = [value.clone() for value in pruner.state_dict()["latents"].values()]
    for batch in batches(3):
        backward(model, batch)
        optimizer.step(lambda: None)
        assert sum(nonzeros(model)) == pytest.approx(665, abs=20)
    for old, new in zip(before, pruner.state_dict()["latents"].values(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-3)


# -- several optimizers -------------------------------------------------------------------------------------------


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.8), pb.Fixed(sparsity=0.8), pb.Unconstrained(weight=1.0)])
def test_two_optimizers_in_either_order(goal, swapped, mount):
    """Each owns a part of the model; stepped in the given order or the other, each round counts as one step."""
    model = network()
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[2:].parameters(), lr=3e-3)
    pruner = mount(model, (first, second), goal, total_steps=60)
    train(model, [second, first] if swapped else [first, second], batches(60))
    assert int(pruner.metrics()["step"]) == 60
    counts = [int(_seen(model, name).count_nonzero()) for name in PRUNED]
    assert counts == pruner.counts()
    report = pruner.finish()
    if isinstance(goal, pb.Fixed):
        assert nonzeros(model) == [256, 409]
    if isinstance(goal, pb.Budget):
        assert report.pruned_nonzeros == 665


@pytest.mark.parametrize("goal", [pb.Fixed(sparsity=0.8, bound="gaussian"), pb.Unconstrained(weight=1.0)])
def test_two_optimizers_equal_two_groups(goal):
    """Two optimizers of a kind, stepped in the order given, do what one with two groups does, bit for bit.

    Goals that steer by counts see those of the first optimizer a little earlier, and may differ.
    """

    def run(split):
        model = network()
        parts = [list(model[:2].parameters()), list(model[2:].parameters())]
        groups = parts if split else [[*parts[0], *parts[1]]]
        optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        pruner = pb.Pruner(model, optimizers, goal, total_steps=30)
        train(model, optimizers, batches(30))
        return {**copied(model), "r": pruner.r()}

    assert_same(run(True), run(False))


def test_a_second_optimizer_without_pruned_tensors():
    """An optimizer for the head alone changes nothing, and neither does leaving it out of the pruner."""

    def run(given):
        model = network()
        body = torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
        optimizers = [body, head]
        pruner = pb.Pruner(
            model, {"both": optimizers, "body": body, "reversed": [head, body]}[given], pb.Budget(sparsity=0.8), 20
        )
        train(model, optimizers, batches(20))
        return {**copied(model), "r": pruner.r(), "step": pruner.metrics()["step"]}

    both = run("both")
    assert_same(run("body"), both)
    assert_same(run("reversed"), both)


@pytest.mark.parametrize("lazy", [0, 1])
def test_an_optimizer_that_steps_less_often(lazy):
    """As in a GAN, one part may train every third batch; both stay pruned and the budget is met."""
    model = network()
    optimizers = [torch.optim.Adam(part.parameters(), lr=3e-3) for part in (model[:2], model[2:])]
    pruner = pb.Pruner(model, optimizers, pb.Budget(sparsity=0.8), ramp=0)

    def train_unequally():
        for number, batch in enumerate(batches(60)):
            backward(model, batch)
            optimizers[1 - lazy].step()
            if number % 3 == 0:
                optimizers[lazy].step()
            assert nonzeros(model) == pruner.counts()
            assert sum(nonzeros(model)) == pytest.approx(665, abs=80)

    with pytest.warns(UserWarning, match="rounds"):
        train_unequally()
    assert pruner.finish().pruned_nonzeros == 665


def test_an_optimizer_per_parameter_stepped_in_the_backward_pass():
    """The memory-saving recipe: every parameter has its optimizer, stepped as soon as its gradient is there."""
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    pruner = pb.Pruner(model, list(optimizers.values()), pb.Budget(sparsity=0.8), total_steps=40)

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in batches(40):
        F.cross_entropy(model(x), y).backward()
    assert int(pruner.metrics()["step"]) == 40
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.8, abs=0.02)
    assert pruner.finish().pruned_nonzeros == 665


def test_two_pruners_on_one_optimizer():
    """Different goals for different tensors of one optimizer: each pruner keeps to its own."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    one = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.5), include="0.weight")
    two = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20, include="2.weight")
    for batch in batches(20):
        train(model, optimizer, [batch])
        assert nonzeros(model) == [*one.counts(), *two.counts()]
    one.finish()
    train(model, optimizer, batches(1))
    two.finish()
    assert nonzeros(model, ["2.weight"]) == [204]


# -- closures -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "third party", "calls super", "decays afterwards"])
def test_a_step_given_a_closure(name, how, mount):
    """A closure sees pruned weights, its loss is handed back, and the run equals the one without it."""

    def run(closures):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
        for batch in batches(20):
            if not closures:
                train(model, optimizer, [batch])
                continue
            seen = []

            def closure(batch=batch, seen=seen):
                seen.append([int(_seen(model, n).count_nonzero()) for n in PRUNED])
                return backward(model, batch)

            counts = pruner.counts()
            loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
            assert seen == [counts]
            assert isinstance(loss, torch.Tensor)
            assert loss.item() > 0
        return {**copied(model), "r": pruner.r()}

    assert_same(run(True), run(False))


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_no_closure_given_explicitly(how):
    """``step(None)`` and ``step(closure=None)`` are plain steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    backward(model, batches(1)[0])
    optimizer.step(None) if how == "positional" else optimizer.step(closure=None)
    assert nonzeros(model) == pruner.counts()
    assert int(pruner.metrics()["step"]) == 1


@EITHER_MOUNT
def test_a_closure_that_raises_changes_nothing(mount):
    """An error in the closure (a NaN check, Ctrl-C) leaves weights and thresholds as they were; training goes on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=40)
    train(model, optimizer, batches(30))
    before, r = copied(model), pruner.r()

    def closure():
        backward(model, batches(1)[0])
        raise FloatingPointError("the loss is NaN")

    with pytest.raises(FloatingPointError):
        optimizer.step(closure)
    assert_same(copied(model), before)
    assert torch.equal(pruner.r(), r)
    train(model, optimizer, batches(10))
    assert int(pruner.metrics()["step"]) == 40
    assert pruner.finish().pruned_nonzeros == 665


def test_an_optimizer_that_calls_its_closure_again_is_stopped():
    """A second call would run on unpruned weights; the message names the mount that can do it."""

    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                closure()
                closure()

    model = network()
    optimizer = Twice(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    with pytest.raises(RuntimeError, match=r"Twice.*ParametrizedPruner"):
        optimizer.step(lambda: backward(model, batches(1)[0]))
    pruner.metrics()
    assert nonzeros(model) == [256, 409]


def test_lbfgs_needs_the_other_mount():
    """LBFGS is refused beside the optimizer and works inside the model."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    before = copied(model)
    with pytest.raises(ValueError, match="ParametrizedPruner"):
        pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    assert_same(copied(model), before)
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.8))
    batch = batches(1, size=64)[0]
    start = backward(model, batch)
    for _ in range(5):
        optimizer.step(lambda: backward(model, batch))
    assert backward(model, batch) < start
    pruner.finish()
    assert nonzeros(model) == [256, 409]


# -- errors within a step -----------------------------------------------------------------------------------------


@EITHER_MOUNT
@pytest.mark.parametrize("ask", ["metrics", "state_dict", "counts", "inspect"])
def test_asking_after_a_failed_step_finds_the_model_pruned(ask, mount):
    """An exception inside ``step`` leaves the latent weights behind; the next question to the pruner prunes again."""
    model = network()
    optimizer = Fails(model.parameters(), lr=0.1)
    pruner = mount(model, optimizer, pb.Fixed(sparsity=0.8))
    train(model, optimizer, batches(5))
    optimizer.error = RuntimeError("the disk is full")
    with pytest.raises(RuntimeError, match="disk"):
        train(model, optimizer, batches(1))
    {
        "metrics": pruner.metrics,
        "state_dict": pruner.state_dict,
        "counts": pruner.counts,
        "inspect": lambda: pb.inspect(model, pruner),
    }[ask]()
    counts = [int(_seen(model, name).count_nonzero()) for name in PRUNED]
    assert counts == pruner.counts()
    assert counts == pytest.approx([256, 409], abs=60)  # half a step has moved the weights, not the thresholds
    assert pruner.metrics()["tensor_sparsity"].tolist() == pytest.approx([1 - counts[0] / 1280, 1 - counts[1] / 2048])


@EITHER_MOUNT
@pytest.mark.parametrize("with_closure", [False, True])
def test_training_goes_on_after_a_failed_step(with_closure, mount):
    """Whoever catches the exception and goes on has a pruned model after the next step, and meets the budget."""
    model = network()
    optimizer = Fails(model.parameters(), lr=0.1)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=40)
    train(model, optimizer, batches(25))
    optimizer.error = RuntimeError("the disk is full")
    for _ in range(2):
        closure = (lambda: backward(model, batches(1)[0])) if with_closure else None
        if closure is None:
            backward(model, batches(1)[0])
        with pytest.raises(RuntimeError, match="disk"):
            optimizer.step(closure)
    optimizer.error = None
    for batch in batches(15):
        train(model, optimizer, [batch])
        counts = [int(_seen(model, name).count_nonzero()) for name in PRUNED]
        assert counts == pruner.counts()
        assert sum(counts) == pytest.approx(665, abs=40)
    assert int(pruner.metrics()["step"]) == 40
    assert pruner.finish().pruned_nonzeros == 665


def test_finish_after_a_failed_step():
    """``finish()`` right after an exception lands on the budget."""
    model = network()
    optimizer = Fails(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), ramp=0)
    optimizer.error = RuntimeError("the disk is full")
    with pytest.raises(RuntimeError, match="disk"):
        train(model, optimizer, batches(1))
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(model)) == 665


# -- other hooks --------------------------------------------------------------------------------------------------


def test_other_hooks_see_pruned_weights():
    """Hooks of others, registered before the pruner or after it, see what the model computes with."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}

    def watch(name):
        def hook(*_):
            seen.setdefault(name, []).append(nonzeros(model))

        return hook

    optimizer.register_step_pre_hook(watch("pre, before us"))
    optimizer.register_step_post_hook(watch("post, before us"))
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    optimizer.register_step_pre_hook(watch("pre, after us"))
    optimizer.register_step_post_hook(watch("post, after us"))
    anywhere = [
        register_optimizer_step_pre_hook(watch("global pre")),
        register_optimizer_step_post_hook(watch("global post")),
    ]
    try:
        counts = [pruner.counts()]
        for batch in batches(6):
            train(model, optimizer, [batch])
            counts.append(pruner.counts())
        # Registered in mid-training, they too are overtaken.
        optimizer.register_step_pre_hook(watch("pre, late"))
        optimizer.register_step_post_hook(watch("post, late"))
        for batch in batches(3):
            train(model, optimizer, [batch])
            counts.append(pruner.counts())
    finally:
        for handle in anywhere:
            handle.remove()
    assert len(seen) == 8
    for name, found in seen.items():
        wanted = counts[:-1] if "pre" in name else counts[1:]
        assert found[1:] == wanted[-len(found) :][1:], name  # a newly registered pre-hook is overtaken after one step
        if "post" in name:
            assert found[0] == wanted[-len(found)], name


def test_a_hook_that_clips_gradients():
    """A pre-hook that changes gradients is heard: thresholds use what the weights use, from the second step on."""

    def run(in_hook):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=0.1), threshold_lr=1.0)
        limit = 100.0  # the first step shows a hook of others the same gradients either way

        def clip(*_):
            nn.utils.clip_grad_norm_(model.parameters(), limit)

        if in_hook:
            optimizer.register_step_pre_hook(clip)
        for batch in batches(6):
            backward(model, batch)
            if not in_hook:
                clip()
            optimizer.step()
            limit = 0.01
        return pruner.r()

    assert torch.equal(run(True), run(False))


def test_the_hooks_are_gone_after_finish():
    """After ``finish()`` the optimizer is as it was: no hooks, and a step that trains every weight."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    train(model, optimizer, batches(2))
    pruner.finish()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer, batches(2))
    assert nonzeros(model)[0] > 1000


# -- wrappers -----------------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """The usual wrapper that averages weights every k steps."""

    def __init__(self, optimizer, k=5):
        self.optimizer = optimizer
        self.k = k
        self.param_groups = optimizer.param_groups
        self.state = {}

    def step(self, closure=None):
        raise NotImplementedError


class ScheduleFree(torch.optim.SGD):
    """Marks its groups as the schedulefree package does."""

    def __init__(self, params, **rest):
        super().__init__(params, **rest)
        for group in self.param_groups:
            group["train_mode"] = False


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m: Sam(m.parameters(), torch.optim.SGD, lr=0.1), ValueError, "Sam wraps.*base_optimizer"),
        (lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1)), ValueError, "Lookahead wraps.*averages"),
        (lambda m: ScheduleFree(m.parameters(), lr=0.1), ValueError, "ScheduleFree.*schedule"),
        (lambda m: torch.optim.LBFGS(m.parameters()), ValueError, "LBFGS.*ParametrizedPruner"),
        (lambda m: object(), TypeError, "torch.optim.Optimizer"),
        (lambda m: [], TypeError, "torch.optim.Optimizer"),
        (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), "adam"], TypeError, "str is not a torch.optim.Optimizer"),
    ],
    ids=["sam", "lookahead", "schedule-free", "lbfgs", "object", "empty", "name"],
)
def test_what_cannot_be_attached_to_is_refused_with_a_sentence(make, error, words):
    """Wrappers and optimizers that keep several versions of the weights are refused, and the model is untouched."""
    model = network()
    before = copied(model)
    optimizer = make(model)
    with pytest.raises(error, match=words):
        pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    assert_same(copied(model), before)


def test_sam_works_through_its_base_optimizer():
    """As the refusal says: the pruner on SAM's inner optimizer trains to the budget."""
    model = network()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1)
    pruner = pb.Pruner(model, sam.base_optimizer, pb.Budget(sparsity=0.8), total_steps=40)
    for batch in batches(40):
        backward(model, batch)
        sam.first_step()
        backward(model, batch)
        sam.second_step()
        assert nonzeros(model) == pruner.counts()
    with pruner.latents():
        assert nonzeros(model) == [1280, 2048]  # perturbing and restoring p did not cost the latent weights
    assert pruner.finish().pruned_nonzeros == 665


# -- sparse gradients ---------------------------------------------------------------------------------------------


def test_sparse_embeddings_are_refused_at_once():
    """An embedding with sparse=True is refused at construction, with both ways out."""
    model = nn.Sequential(nn.Embedding(100, 20, sparse=True), nn.Linear(20, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copied(model)
    with pytest.raises(ValueError, match=r"sparse=False.*exclude"):
        pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    assert_same(copied(model), before)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8), exclude=["0.weight"])
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert pruner.names == ["1.weight"]


def test_sparse_gradients_of_other_origin_are_refused():
    """A sparse gradient that no module announces is refused when it comes, before anything is changed."""
    weight = nn.Parameter(torch.randn(100, 20, generator=torch.Generator().manual_seed(0)))
    model = nn.Module()
    model.table = weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    before = copied(model)
    F.embedding(torch.arange(8), weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"'table' is sparse.*exclude"):
        optimizer.step()
    assert_same(copied(model), before)
    assert pruner.counts() == [400]


def test_parameters_without_gradient_stay_pruned():
    """A tensor that a batch did not reach (grad is None) keeps its weights and its sparsity."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    before = model[0].weight.detach().clone()
    for batch in batches(3):
        backward(model, batch)
        model[0].weight.grad = None
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert nonzeros(model) == pruner.counts() == [256, 409]
    optimizer.zero_grad()
    optimizer.step()  # no gradient at all
    assert nonzeros(model) == [256, 409]
