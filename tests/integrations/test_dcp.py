"""Distributed checkpoints: torch's own steps are no training, and what 2 processes saved is loaded by 1, 2 and 4."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as plain_dcp
from networks import PRUNED, assert_same, batches, copied, in_processes, network, nonzeros, of, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pareback as pb
from pareback.integrations import dcp
from pareback.pruning.state import whole_state

#: Of the tests that call torch's own functions in a single process.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOTAL = 20
Run = tuple[nn.Module, Any, pb.Pruner]


def run(make: Any = torch.optim.AdamW, seed: int = 0, **options: Any) -> Run:
    model = network(seed)
    optimizer = make(model.parameters(), lr=3e-3)
    return model, optimizer, pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), TOTAL, **options)


def two_optimizers(seed: int = 0) -> Run:
    model = network(seed)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (model[:2], model[2:])]
    return model, optimizers, pb.Pruner(model, optimizers, pb.Budget(sparsity=0.8), TOTAL)


# -- torch's step at rate 0 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_looking_at_a_fresh_optimizer_is_no_step(make: Any) -> None:
    """``get_state_dict`` steps a fresh optimizer at rate 0 to make its state: nothing is counted and nothing pruned."""
    model, optimizer, pruner = run(make)
    before = copied(model)
    get_state_dict(model, optimizer)
    assert int(pruner.metrics()["step"]) == 0
    assert_same(copied(model), before)


def test_nor_is_it_one_in_the_midst_of_training() -> None:
    """An optimizer without a state of its own is stepped whenever its gradients are cleared."""
    model, optimizer, pruner = run(torch.optim.SGD)
    train(model, optimizer, batches(5))
    model.zero_grad(set_to_none=True)
    before = copied(model)
    get_state_dict(model, optimizer)
    assert int(pruner.metrics()["step"]) == 5
    assert_same(copied(model), before)


def test_weights_that_were_just_loaded_are_left_alone_by_it() -> None:
    model, optimizer, _ = run()
    other = copied(network(seed=9))
    model.load_state_dict(other)
    get_state_dict(model, optimizer)
    assert_same(copied(model), other)


def test_a_warm_up_from_zero_is_a_step() -> None:
    """A real gradient at rate 0 is training: schedules begin there."""
    model, optimizer, pruner = run()
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(1))
    assert int(pruner.metrics()["step"]) == 1


@pytest.mark.parametrize("order", ["model first", "pruner first"])
def test_the_order_of_loading_does_not_matter(order: str) -> None:
    model, optimizer, pruner = run()
    train(model, optimizer, batches(TOTAL)[:12])
    saved = copy.deepcopy((*get_state_dict(model, optimizer), pruner.state_dict()))
    train(model, optimizer, batches(TOTAL)[12:])
    other, other_optimizer, other_pruner = run(seed=5)
    if order == "pruner first":
        other_pruner.load_state_dict(saved[2])
    set_state_dict(other, other_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    if order == "model first":
        other_pruner.load_state_dict(saved[2])
    assert int(other_pruner.metrics()["step"]) == 12
    train(other, other_optimizer, batches(TOTAL)[12:])
    assert_same(copied(other), copied(model))


# -- what is pending -------------------------------------------------------------------------------------------------


def test_every_state_has_the_same_keys() -> None:
    """Torch loads the keys of the state that is there: those of a fresh one are those of one in training."""
    model, optimizers, pruner = two_optimizers()
    fresh = pruner.state_dict()
    train(model, optimizers[:1], batches(1))
    pending = pruner.state_dict()
    assert pending["pending"].keys() == fresh["pending"].keys() == run()[2].state_dict()["pending"].keys()
    assert bool(pending["pending"]["peak"].any())
    assert not bool(fresh["pending"]["peak"].any())


@ALONE
@pytest.mark.parametrize("how", ["ours", "torch's own"])
def test_what_is_pending_is_not_dropped(how: str, tmp_path: Path) -> None:
    """Saved between the steps of two optimizers: the second one's step goes on with what the first has measured."""
    data = batches(TOTAL)
    model, optimizers, pruner = two_optimizers()
    train(model, optimizers, data[:8])
    train(model, optimizers[:1], data[8:9])
    _save(how, tmp_path, model, optimizers, pruner)
    train(model, optimizers[1:], data[9:10])
    other, other_optimizers, other_pruner = two_optimizers(seed=3)
    _load(how, tmp_path, other, other_optimizers, other_pruner)
    train(other, other_optimizers[1:], data[9:10])
    assert torch.equal(other_pruner.r(), pruner.r())
    assert_same(copied(other), copied(model))


def _save(how: str, folder: Path, model: nn.Module, optimizers: Any, pruner: pb.Pruner) -> None:
    if how == "ours":
        dcp.save(folder, model, optimizers, pruner)
        return
    weights, moments = get_state_dict(model, optimizers)
    plain_dcp.save({"model": weights, "optimizer": moments, "pruner": pruner}, checkpoint_id=folder, no_dist=True)


def _load(how: str, folder: Path, model: nn.Module, optimizers: Any, pruner: pb.Pruner) -> None:
    if how == "ours":
        dcp.load(folder, model, optimizers, pruner)
        return
    weights, moments = get_state_dict(model, optimizers)
    state = {"model": weights, "optimizer": moments, "pruner": pruner}  # the pruner is loaded in place
    plain_dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)


@ALONE
def test_a_pruner_alone_is_loaded_in_place(tmp_path: Path) -> None:
    """Torch writes into the state that it is given; the model shows what was loaded, whatever it held before."""
    model, optimizer, pruner = run()
    train(model, optimizer, batches(TOTAL)[:12])
    plain_dcp.save({"pruner": pruner}, checkpoint_id=tmp_path, no_dist=True)
    for steps in (0, 3):  # into a fresh pruner, and into one that has been training
        other, other_optimizer, other_pruner = run(seed=5)
        train(other, other_optimizer, batches(steps, seed=8))
        plain_dcp.load({"pruner": other_pruner}, checkpoint_id=tmp_path, no_dist=True)
        for name in PRUNED:
            assert torch.equal(other.get_parameter(name), model.get_parameter(name))
        assert other_pruner.counts() == pruner.counts() == nonzeros(other)


# -- other numbers of processes --------------------------------------------------------------------------------------


def sharded(seed: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parts_of(model: nn.Module) -> Run:
    optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (model[:2], model[2:])]
    return model, optimizers, pb.Pruner(model, optimizers, pb.Budget(sparsity=0.8), TOTAL)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def seen(model: nn.Module, pruner: pb.Pruner) -> dict[str, Tensor]:
    found = {name: whole(p) for name, p in model.named_parameters()}
    found |= {f"latent {name}": whole(value) for name, value in pruner.latent_tensors().items()}
    found |= {f"pending {name}": value for name, value in pruner.state_dict()["pending"].items()}
    return {**found, "r": pruner.r(), "step": pruner.metrics()["step"], "counts": torch.tensor(pruner.counts())}


def saves(rank: int, folder: str) -> dict[str, Tensor]:
    """Two sharded processes, saved between the steps of two optimizers."""
    model, optimizers, pruner = parts_of(sharded(0))
    train(model, optimizers, batches(10))
    train(model, optimizers[:1], batches(1, seed=4))
    dcp.save(folder + "/saved", model, optimizers, pruner)
    return seen(model, pruner)


def loads_sharded(rank: int, folder: str) -> tuple[dict[str, Tensor], int]:
    model, optimizers, pruner = parts_of(sharded(7))
    dcp.load(folder + "/saved", model, optimizers, pruner)
    return seen(model, pruner), trained_on(model, optimizers, pruner)


def loads_whole(rank: int, folder: str) -> tuple[dict[str, Tensor], int]:
    model, optimizers, pruner = parts_of(network(7))
    dcp.load(folder + "/saved", model, optimizers, pruner)
    return seen(model, pruner), trained_on(model, optimizers, pruner)


def of_one_process(rank: int, folder: str) -> dict[str, Any]:
    """A state that one process of a sharded training has saved, and one that has all shards."""
    model, optimizers, pruner = parts_of(sharded(0))
    train(model, optimizers, batches(10))
    mine = pruner.state_dict()  # every process asks
    if rank == 0:
        torch.save(mine, folder + "/one.pt")
    dist.barrier()
    state = torch.load(folder + "/one.pt", weights_only=False)
    said = {}
    for name, make in (("sharded", sharded), ("whole", network)):
        try:
            parts_of(make(7))[2].load_state_dict(state)
        except pb.UserError as error:
            said[name] = str(error)
    _, _, other = parts_of(sharded(7))
    other.load_state_dict(whole_state(pruner.state_dict()))
    latents = ({n: whole(t) for n, t in one.latent_tensors().items()} for one in (other, pruner))
    return {"said": said, "latents": list(latents)}


def trained_on(model: nn.Module, optimizers: Any, pruner: pb.Pruner) -> int:
    train(model, optimizers[1:], batches(1, seed=4))
    train(model, optimizers, batches(TOTAL)[11:])
    return pruner.finish().pruned_nonzeros


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[Any]]]:
    folder = str(tmp_path_factory.mktemp("dcp"))
    return folder, in_processes(2, saves, of_one_process, folder=folder)


@pytest.fixture(scope="module")
def saved(two: tuple[str, dict[str, list[Any]]]) -> tuple[str, dict[str, Tensor]]:
    return two[0], of(two[1], saves)[0]


@pytest.mark.slow
def test_a_state_of_one_process_alone(two: tuple[str, dict[str, list[Any]]]) -> None:
    """Its shards are not those of the others: all refuse it, also the one whose they are. A whole one is split."""
    for found in of(two[1], of_one_process):
        for said in (found["said"].get("sharded", "nothing"), found["said"].get("whole", "nothing")):
            assert "shards of another process" in said
            assert "pareback.integrations.dcp" in said
        assert_same(*found["latents"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_two_processes_save_and_others_load(world: int, saved: tuple[str, dict[str, Tensor]]) -> None:
    """Sharded over 1, 2 and 4 processes, and unsharded: the same bits, and the budget is met from there."""
    folder, wanted = saved
    runs = in_processes(world, loads_sharded, loads_whole, folder=folder)
    for part in (loads_sharded, loads_whole):
        for found, kept in of(runs, part):
            assert_same(found, wanted)
            assert kept == 665


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(pb.UserError, match="There is no distributed checkpoint in"):
        dcp.load(tmp_path, *run())


@ALONE
def test_a_checkpoint_without_the_pruner(tmp_path: Path) -> None:
    model, optimizer, pruner = run()
    weights, moments = get_state_dict(model, optimizer)
    plain_dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(pb.UserError, match="has no 'pruner'"):
        dcp.load(tmp_path, model, optimizer, pruner)


def test_a_checkpoint_of_other_tensors(tmp_path: Path) -> None:
    dcp.save(tmp_path, *run())
    with pytest.raises(pb.UserError, match="prunes other tensors than this pruner: '2.weight'"):
        dcp.load(tmp_path, *run(exclude="2.weight"))


def test_a_pruner_that_has_finished(tmp_path: Path) -> None:
    model, optimizer, pruner = run()
    train(model, optimizer, batches(TOTAL))
    pruner.finish()
    with pytest.raises(pb.UserError, match="Save the model alone, with pb.save"):
        dcp.save(tmp_path, model, optimizer, pruner)


def test_other_things_are_saved_beside_it(tmp_path: Path) -> None:
    model, optimizer, pruner = run()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    train(model, optimizer, batches(3))
    schedule.step()
    dcp.save(tmp_path, model, optimizer, pruner, schedule=schedule)
    other, other_optimizer, other_pruner = run(seed=3)
    other_schedule = torch.optim.lr_scheduler.LinearLR(other_optimizer)
    dcp.load(tmp_path, other, other_optimizer, other_pruner, schedule=other_schedule)
    assert other_schedule.last_epoch == 1
    with pytest.raises(pb.UserError, match="Give things with state_dict"):
        dcp.save(tmp_path, model, optimizer, pruner, epoch=3)


@ALONE
def test_a_state_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """In which nothing was pending, and nothing was written."""
    model, optimizer, pruner = run()
    train(model, optimizer, batches(3))
    weights, moments = get_state_dict(model, optimizer)
    state = {**pruner.state_dict(), "version": 2, "pending": {}}
    plain_dcp.save({"model": weights, "optimizer": moments, "pruner": state}, checkpoint_id=tmp_path, no_dist=True)
    other, other_optimizer, other_pruner = run(seed=3)
    dcp.load(tmp_path, other, other_optimizer, other_pruner)
    assert_same(copied(other), copied(model))
