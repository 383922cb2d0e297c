"""A step never waits for the device: nothing is read back, so the whole of it fits into a CUDA graph."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import backward, batches, network, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pareback as pb
from pareback.thresholds.controller import Controller

GOALS = {
    "exact": (pb.Budget(sparsity=0.8), {"total_steps": 40}),
    "exact-two-limits": (pb.Budget(sparsity=0.7, bytes=0.5), {"total_steps": 40}),
    "extremes": (pb.Budget(sparsity=0.6, extremes=(0.4, 0.7)), {"total_steps": 40}),
    "extremes-squared": (pb.Budget(sparsity=0.6, enforce="squared", extremes=(0.4, 0.7)), {}),
    "extremes-hinge": (pb.Budget(sparsity=0.6, enforce="hinge", extremes=(0.4, 0.7)), {}),
    "squared": (pb.Budget(sparsity=0.8, enforce="squared"), {}),
    "hinge": (pb.Budget(sparsity=0.8, enforce="hinge"), {}),
    "unconstrained": (pb.Unconstrained(), {}),
    "gaussian": (pb.Fixed(sparsity=0.8, bound="gaussian"), {}),
    "no-straight-through": (pb.Budget(sparsity=0.8), {"total_steps": 40, "straight_through": False}),
    "feather": (pb.methods.Feather(sparsity=0.8), {"total_steps": 40}),
    "st3": (pb.methods.ST3(sparsity=0.8), {"total_steps": 40}),
}
#: Masks that change within the steps that are watched; no graph could hold these.
MASKS = {
    "acdc": (pb.methods.ACDC(sparsity=0.8), {"total_steps": 40}),
    "gmp": (pb.methods.GMP(sparsity=0.8, begin=0.0, every=1), {"total_steps": 40}),
    "oneshot": (pb.methods.OneShot(sparsity=0.8, when=0.1), {"total_steps": 40}),
    "rigl": (pb.methods.RigL(sparsity=0.8, every=1), {"total_steps": 40}),
}
#: On the CPU the search may look at its counts, as that costs nothing there; on a GPU it may not.
CUDA_GOALS = {**GOALS, "search": (pb.Fixed(sparsity=0.8), {})}

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# -- anywhere: no operator that hands a number to Python, or whose result has a size that depends on data ------------


class ReadBackError(Exception):
    """A step asked for the value of a tensor."""


class Watch(TorchDispatchMode):
    """Raises where a GPU would have to be waited for."""

    names = (
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique",
        "unique_consecutive",
        "_unique2",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").split(".")[0]
        masks = [a for a in (args[1] if name in ("index", "index_put_") else ()) if a is not None]
        if name in self.names or any(mask.dtype == torch.bool for mask in masks):
            raise ReadBackError(function.name())
        return function(*args, **(kwargs or {}))


def refuse(*_, **__):
    raise ReadBackError("tolist or numpy")


@EITHER_MOUNT
@pytest.mark.parametrize("goal", [*GOALS, *MASKS])
def test_a_step_reads_nothing_back(goal, mount, monkeypatch):
    """Every operator of a step is one that a GPU can be asked for without waiting (float64: torch's own operators)."""
    monkeypatch.setattr(Controller, "may_look", lambda self: False)  # as it is on a GPU
    wanted, options = {**GOALS, **MASKS}[goal]
    model = network(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = mount(model, optimizer, wanted, **options)
    data = batches(6, dtype=torch.float64)
    train(model, optimizer, data[:3])
    for batch in data[3:]:
        backward(model, batch)
        with Watch(), monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "tolist", refuse)
            patched.setattr(torch.Tensor, "numpy", refuse)
            optimizer.step()
            pruner.metrics()
            pruner.loss()
    assert int(pruner.metrics()["step"]) == 6


def test_the_watch_sees_what_it_should():
    """The check above would notice: it stops each of the usual ways to read a tensor."""
    x = torch.tensor([1.0, 0.0])
    offences = [
        lambda: x[0].item(),
        lambda: float(x[0]),
        lambda: bool(x[0] > 0),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
        lambda: torch.where(x > 0),
    ]
    for offence in offences:
        with pytest.raises(ReadBackError), Watch():
            offence()


def test_two_optimizers_and_a_scaled_step_read_nothing_back(monkeypatch):
    """The same for several optimizers and for GradScaler's fused steps, whose overflow flag stays on the device."""
    monkeypatch.setattr(Controller, "may_look", lambda self: False)  # as it is on a GPU
    model = network(dtype=torch.float64)
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1, fused=True)
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1, fused=True)
    pruner = pb.Pruner(model, [first, second], pb.Budget(sparsity=0.8), total_steps=20)
    for batch in batches(6, dtype=torch.float64):
        backward(model, batch)
        for optimizer in (first, second):
            # As GradScaler sets them.
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
            with Watch(), monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "tolist", refuse)
                optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
    assert int(pruner.metrics()["step"]) == 6


# -- on a GPU -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_sync():
    """Let torch raise wherever it would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def on_gpu(dtype=torch.float32):
    """Return a network of tensors of several sizes, with a convolution."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 64, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16 * 16, 60)]
    return nn.Sequential(*body, nn.Linear(60, 50), nn.Linear(50, 4)).to("cuda", dtype)


def gpu_batch(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 1, 20, 20, generator=generator)
    return x.to("cuda", dtype), x[:, 0, 0, :4].argmax(1).cuda()


CUDA_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "sgd-tensor-lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.02, device="cuda"), momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3, device="cuda"), capturable=True),
}


@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    ("goal", "optimizer", "mount"),
    [
        *((goal, "sgd", pb.Pruner) for goal in CUDA_GOALS),
        *(("exact", optimizer, pb.Pruner) for optimizer in CUDA_OPTIMIZERS if optimizer != "sgd"),
        *((goal, "sgd", pb.ParametrizedPruner) for goal in ("exact", "search", "unconstrained")),
    ],
)
def test_a_whole_step_on_the_gpu_never_waits(goal, optimizer, mount):
    """Forward, backward, step and metrics under ``set_sync_debug_mode("error")``, gradients freshly allocated."""
    wanted, options = CUDA_GOALS[goal]
    model = on_gpu()
    made = CUDA_OPTIMIZERS[optimizer](model.parameters())
    pruner = mount(model, made, wanted, **options)
    data = [gpu_batch(seed) for seed in range(6)]
    train(model, made, data[:3])
    with no_sync():
        for x, y in data[3:]:
            made.zero_grad()
            F.cross_entropy(model(x), y).backward()
            made.step()
            metrics = pruner.metrics()
            pruner.loss()
    assert int(metrics["step"]) == 6


@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_never_wait(dtype):
    """Tensors that the fused kernels do not take, or take in half precision, do not wait either."""
    model = on_gpu(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=12)
    train(model, optimizer, [gpu_batch(seed, dtype) for seed in range(3)])
    data = [gpu_batch(seed, dtype) for seed in range(3, 12)]
    with no_sync():
        train(model, optimizer, data)
    assert sum(pruner.counts()) == pytest.approx(0.2 * sum(p.numel() for p in pruner.parameters), rel=0.02)


@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("goal", ["exact", "search", "unconstrained"])
def test_a_scaled_fused_step_never_waits(goal):
    """GradScaler with a fused optimizer is free of waiting, and stays so; a skipped step is skipped on the device."""
    model = on_gpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pruner = pb.Pruner(model, optimizer, CUDA_GOALS[goal][0], total_steps=20)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    data = [gpu_batch(seed) for seed in range(8)]

    def step(x, y, overflow=False):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    for x, y in data[:3]:
        step(x, y)
    with no_sync():
        for x, y in data[3:7]:
            step(x, y)
        before, r = [p.detach().clone() for p in model.parameters()], pruner.r()
        step(*data[7], overflow=True)
    assert torch.equal(pruner.r(), r)
    assert int(pruner.metrics()["step"]) == 7
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class Graphed:
    """A training step captured in a CUDA graph."""

    def __init__(self, model, optimizer, warmup=3):
        self.x, self.y = gpu_batch(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for seed in range(warmup):
                self.load(seed)
                self.step(model, optimizer)
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad(set_to_none=False)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(model, optimizer)

    def step(self, model, optimizer):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(self.x), self.y).backward()
        optimizer.step()

    def load(self, seed):
        x, y = gpu_batch(seed)
        self.x.copy_(x)
        self.y.copy_(y)

    def replay(self, seed):
        self.load(seed)
        self.graph.replay()


def capturable(name, model):
    rate = torch.tensor(0.02 if name == "sgd" else 1e-3, device="cuda")
    if name == "sgd":  # fused: torch's other variants read lr back
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True), rate
    return torch.optim.AdamW(model.parameters(), lr=rate, capturable=True), rate


@cuda
@pytest.mark.parametrize(("goal", "optimizer"), [*((goal, "sgd") for goal in CUDA_GOALS), ("exact", "adamw")])
def test_a_step_replayed_from_a_cuda_graph_equals_an_eager_one(goal, optimizer):
    """Captured once and replayed, the ramp goes on, thresholds and weights move as without a graph, and it lands."""
    wanted, options = CUDA_GOALS[goal]

    def run(graphed):
        model = on_gpu()
        made, _ = capturable(optimizer, model)
        pruner = pb.Pruner(model, made, wanted, **options)
        step = Graphed(model, made) if graphed else None
        shares = []
        if not graphed:
            train(model, made, [gpu_batch(seed) for seed in range(3)])
        for seed in range(3, 40):
            step.replay(seed) if graphed else train(model, made, [gpu_batch(seed)])
            shares.append(float(pruner.metrics()["share"]))
        return model, pruner, shares

    model, pruner, shares = run(graphed=True)
    _, eager, eager_shares = run(graphed=False)
    assert int(pruner.metrics()["step"]) == 40
    assert shares == eager_shares
    torch.testing.assert_close(pruner.r(), eager.r(), rtol=0.02, atol=0.02)
    counts = pruner.counts()
    assert counts == [int(p.count_nonzero()) for p in pruner.parameters]
    if goal == "exact":
        assert shares[0] < shares[5] < shares[-1] == 1.0
        assert pruner.finish().pruned_nonzeros == sum(p.numel() for p in pruner.parameters) // 5
    assert all(torch.isfinite(p).all() for p in model.parameters())


@cuda
def test_a_learning_rate_changed_between_replays_is_followed():
    """lr is a tensor on the device: set to zero, thresholds stand still; raised again, they move on."""
    model = on_gpu()
    optimizer, rate = capturable("sgd", model)
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=1.0))
    step = Graphed(model, optimizer)
    for seed in range(3):
        step.replay(seed)
    rate.zero_()
    before = pruner.r()
    for seed in range(3):
        step.replay(seed)
    assert torch.equal(pruner.r(), before)
    rate.fill_(0.02)
    step.replay(0)
    assert (pruner.r() != before).all()


@cuda
def test_an_edit_between_replays_is_not_lost():
    """Weights written between two replays are taken over by the next, which no version counter would notice."""
    model = on_gpu()
    optimizer, rate = capturable("sgd", model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), ramp=0)
    step = Graphed(model, optimizer)
    rate.zero_()
    with pruner.latents():
        before = model[3].weight.detach().clone()
    model[3].weight.data[:4] = 1.0
    step.replay(0)
    with pruner.latents():
        assert (model[3].weight[:4] == 1.0).all()
        assert torch.equal(model[3].weight[4:], before[4:])


@cuda
def test_eager_steps_after_replays():
    """Leaving the graph (a last, smaller batch) goes on where the replays ended, and finishes on the budget."""
    model = on_gpu()
    optimizer, _ = capturable("adamw", model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    step = Graphed(model, optimizer)
    for seed in range(12):
        step.replay(seed)
    train(model, optimizer, [(x[:5], y[:5]) for x, y in map(gpu_batch, range(5))])
    assert int(pruner.metrics()["step"]) == 20
    assert pruner.finish().pruned_nonzeros == sum(p.numel() for p in pruner.parameters) // 5


@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_moving_the_model_to_the_gpu_keeps_the_latent_weights():
    """A model pruned on the CPU and moved with ``.cuda()`` keeps every latent weight, and its steps never wait."""
    model = on_gpu().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), ramp=0)
    with pruner.latents():
        before = [p.detach().clone() for p in model.parameters()]
    model.cuda()
    train(model, optimizer, [gpu_batch(seed) for seed in range(3)])
    data = [gpu_batch(seed) for seed in range(3)]
    with no_sync():
        train(model, optimizer, data)
    with pruner.latents():
        assert all(torch.equal(p.cpu(), old) for p, old in zip(model.parameters(), before, strict=True))


@cuda
@pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="no NCCL")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_sharded_step_never_waits(tmp_path):
    """Under FSDP2 the exchange between ranks is queued on the device like everything else."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        model = fully_shard(on_gpu())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
        for seed in range(20):
            backward(model, gpu_batch(seed))
            with no_sync() if seed > 2 else contextlib.nullcontext():
                optimizer.step()
        assert pruner.finish().pruned_nonzeros == sum(p.numel() for p in pruner.parameters) // 5
    finally:
        dist.destroy_process_group()
