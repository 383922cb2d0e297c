"""pb.save and pb.load: every bit of every tensor comes back, into a state dict or a model that fits."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import convnet, prune, same_bits, same_state, sparse
from safetensors.torch import load_file
from torch import Tensor, nn

from pareback.artifact import describe, load, save
from pareback.artifact.elements import FORMS, nonzero

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pare"


def stored(path: Path) -> dict[str, str]:
    return {row.name: row.stored for row in describe(path).rows}


def random_bits(dtype: torch.dtype, count: int, density: float) -> Tensor:
    """Elements of any bits at all, many of them zero."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    raw[torch.rand(count, generator=generator) >= density] = 0
    return raw.view(-1).view(dtype)


# ---------------------------------------------------------------- every bit


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("dtype", FORMS, ids=str)
def test_every_type_comes_back(dtype: torch.dtype, density: float, path: Path) -> None:
    """Random bits, hence NaN payloads, subnormals and infinities; only the sign of a zero may be lost."""
    flat = random_bits(dtype, 2400, density)
    tensors = {"flat": flat, "cube": flat[:600].view(20, 3, 10), "one": flat[0], "none": flat[:0].view(3, 0)}
    save(tensors, path)
    back = load(path)
    assert {name: (t.dtype, t.shape) for name, t in back.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    form = FORMS[dtype]
    for name, tensor in tensors.items():
        one, other = (t.contiguous().view(-1).view(torch.uint8).view(-1, dtype.itemsize) for t in (tensor, back[name]))
        kept = nonzero(one.view(form.bits) if form.lanes > 1 else one.view(form.bits).view(-1), form)
        assert torch.equal(one[kept], other[kept])
        assert int((other[~kept] != 0).sum()) == 0 or describe(path).rows[0].stored == "dense"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_numbers(dtype: torch.dtype, path: Path) -> None:
    """Among many zeros −0.0 becomes 0.0, and nothing else changes; where there are few it stays."""
    special = torch.tensor([float("nan"), float("-inf"), -0.0, torch.finfo(dtype).tiny / 4, -1.0], dtype=dtype)
    few = torch.cat([special, torch.ones(995, dtype=dtype)])
    many = torch.cat([special, torch.zeros(995, dtype=dtype)])
    save({"few": few, "many": many}, path)
    back = load(path)
    assert stored(path) == {"few": "dense", "many": "sparse"}
    assert same_bits(back["few"], few)
    assert same_bits(back["many"], torch.where(many == 0, torch.zeros((), dtype=dtype), many))
    assert not torch.signbit(back["many"][2])


def test_subnormal_numbers_survive_a_processor_that_flushes_them(path: Path) -> None:
    """Zero is a matter of bits, not of a comparison."""
    weight = torch.zeros(1000)
    weight[::50] = 1e-40
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        save({"weight": weight}, path)
        back = load(path)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(back["weight"], weight)


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_memory_formats_come_back(dtype: torch.dtype, density: float, path: Path) -> None:
    """Channels last stays so; a slice of a larger tensor brings only itself."""
    image = sparse(8, 6, 5, 5, density=density).to(dtype)
    tensors = {
        "last": image.to(memory_format=torch.channels_last),
        "turned": image.permute(3, 1, 0, 2),
        "slice": sparse(100, 40, density=density, seed=1).to(dtype)[10:60, ::2],
        "expanded": image[:1, :1, :1, :1].expand(20, 30, 1, 1),
    }
    save(tensors, path)
    back = load(path)
    assert same_state(back, tensors)
    assert back["last"].is_contiguous(memory_format=torch.channels_last)
    assert back["turned"].stride() == tensors["turned"].stride()
    assert back["slice"].is_contiguous()
    assert back["expanded"].is_contiguous()


def test_conjugates_are_resolved(path: Path) -> None:
    """What is only marked as conjugated or negated comes back as it reads."""
    wave = torch.complex(sparse(500, density=0.1), sparse(500, density=0.1))
    save({"conjugated": wave.conj(), "negated": wave.conj().imag}, path)
    back = load(path)
    assert torch.equal(back["conjugated"], wave.conj())
    assert torch.equal(back["negated"], wave.conj().imag)


def test_the_order_of_names_and_odd_names(path: Path) -> None:
    """Names that look like parts, quotes, other alphabets and no name at all."""
    names = ["b:values", "b", 'quoted"', "β.weight", "", "b::positions", "a", "a:storage", "x\n"]
    tensors = {name: sparse(40, 40, density=0.1, seed=seed) for seed, name in enumerate(names)}
    save(tensors, path)
    assert same_state(load(path), tensors)


def test_an_empty_state_dict(path: Path) -> None:
    """Nothing in, nothing out."""
    save({}, path)
    assert load(path) == {}


def test_any_reader_sees_values_and_dense_tensors(path: Path) -> None:
    """The safetensors package reads every part; biases and values are there as they are."""
    model = convnet()
    save(model, path)
    there = load_file(path)
    assert torch.equal(there["0.bias"], model[0].bias)
    weight = model[3].weight.detach()
    assert torch.equal(there["3.weight:values"], weight[weight != 0])
    assert there["3.weight:positions"].dtype is torch.uint8


def test_saving_changes_nothing(path: Path) -> None:
    """Neither the model nor its modes, and the same model gives the same bytes."""
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    save(model, path)
    first = path.read_bytes()
    save(model, path)
    assert path.read_bytes() == first
    assert model.training
    assert same_state(model.state_dict(), before)


@pytest.mark.slow
def test_neither_numpy_nor_safetensors_is_needed(path: Path) -> None:
    """Saving and loading work where torch alone is installed."""
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['safetensors'] = None\n"
        "import torch; from pareback.artifact import load, save\n"
        f"save({{'a': torch.eye(100), 'b': torch.ones(9)}}, {str(path)!r}); state = load({str(path)!r})\n"
        "print(float(state['a'].sum()), float(state['b'].sum()))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "100.0 9.0\n", done.stderr


# ---------------------------------------------------------------- half precision on request


@pytest.mark.parametrize(("values", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_values_in_half_precision(values: Any, dtype: torch.dtype, path: Path) -> None:
    """Non-zeros of pruned tensors are rounded to the nearest; types stay, and so does everything dense."""
    tensors = {
        "single": sparse(100, 100, density=0.1),
        "double": sparse(100, 100, density=0.1).double(),
        "half": sparse(100, 100, density=0.1).half(),
        "whole": (10 * sparse(100, 100, density=0.1)).long(),
        "dense": torch.randn(100, 100),
        "wave": sparse(100, 100, density=0.1).to(torch.complex64),
    }
    save(tensors, path, values=values)
    back = load(path)
    for name in ("single", "double"):
        assert stored(path)[name] == f"sparse, {values}"
        assert same_bits(back[name], tensors[name].to(dtype).to(tensors[name].dtype))
    for name in ("half", "whole", "dense", "wave"):
        assert same_bits(back[name], tensors[name])


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_kept_weights_stay_non_zero(values: Any, path: Path) -> None:
    """What would round to zero becomes the smallest number, with its sign; so the counts stay exact."""
    tiny = 1e-12 if values == "float16" else 1e-44
    weight = torch.zeros(1000)
    weight[:4] = torch.tensor([tiny, -tiny, 1.0, float("nan")])
    save({"weight": weight}, path, values=values)
    back = load(path)["weight"]
    smallest = torch.tensor([1], dtype=torch.int16).view(getattr(torch, values)).float()
    assert torch.equal(back[:3], torch.tensor([float(smallest), -float(smallest), 1.0]))
    assert bool(back[3].isnan())
    assert int(torch.count_nonzero(back)) == 4


def test_infinity_stays_and_overflow_is_refused(path: Path) -> None:
    """An infinity was there before; a new one would be a silent loss."""
    weight = torch.zeros(1000)
    weight[0] = float("inf")
    save({"weight": weight}, path, values="float16")
    assert load(path)["weight"][0] == float("inf")
    weight[1] = -70000.0
    with pytest.raises(ValueError, match=r"'weight' holds 7e\+04, which float16 cannot. Write values='bfloat16' or"):
        save({"weight": weight}, path, values="float16")
    save({"weight": weight}, path, values="bfloat16")
    weight[1] = 3.4e38
    with pytest.raises(ValueError, match="which bfloat16 cannot. Write values=None to keep every bit."):
        save({"weight": weight}, path, values="bfloat16")


def test_weights_too_small_for_a_type_are_mentioned(path: Path) -> None:
    """Around 1e-7 float16 has one digit left: the error is a fifth of the tensor, not a few thousandths."""
    weight = 1e-7 * sparse(100, 100, density=0.1)
    with pytest.warns(UserWarning, match=r"float16 changes 'weight' by 0\.\d+ of its length.*values='bfloat16' or"):
        save({"weight": weight}, path, values="float16")
    error = (load(path)["weight"] - weight).norm() / weight.norm()
    assert 0.05 < error < 0.5
    save({"weight": weight}, path, values="bfloat16")
    assert (load(path)["weight"] - weight).norm() < 0.003 * weight.norm()


# ---------------------------------------------------------------- into a model


def test_a_model_is_filled_in_place(path: Path) -> None:
    """Its own tensors, whatever they were, on whatever memory format; it is returned."""
    model, other = convnet(), convnet(seed=1).to(memory_format=torch.channels_last)
    pointers = [tensor.data_ptr() for tensor in other.state_dict().values()]
    save(model, path)
    assert load(path, other) is other
    assert same_state(other.state_dict(), model.state_dict())
    assert [tensor.data_ptr() for tensor in other.state_dict().values()] == pointers
    assert other[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in other.parameters())


def test_autograd_notices_that_weights_were_replaced(path: Path) -> None:
    """A backward pass through weights that are no longer there is an error, as after load_state_dict."""
    model = convnet()
    save(model, path)
    loss = model(torch.randn(2, 3, 8, 8)).sum()
    load(path, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_wrapped_models(path: Path) -> None:
    """Names are those of the unwrapped model: files go from one to the other."""
    model, other = convnet(), convnet(seed=1)
    save(nn.DataParallel(torch.compile(model)), path)
    assert list(load(path)) == list(model.state_dict())
    other[6] = torch.compile(other[6])  # type: ignore[assignment]
    load(path, other)
    assert torch.equal(other[6].weight, model[6].weight.cpu())  # DataParallel moves it to a GPU


def test_parts_of_models(path: Path) -> None:
    """Slices of larger memory are filled without touching what is beside them."""
    model = nn.Linear(4, 4)
    memory = torch.full((8, 10), 9.0)
    model.weight.data = memory[2:6, 3:7]
    other = nn.Linear(4, 4)
    prune(other, 0.3)
    save(other, path)
    load(path, model)
    assert torch.equal(memory[2:6, 3:7], other.weight)
    assert int((memory == 9.0).sum()) == 80 - 16


def test_conjugated_buffers_are_filled(path: Path) -> None:
    """They read as what was saved."""
    model, other = nn.Module(), nn.Module()
    model.register_buffer("wave", torch.randn(50, dtype=torch.complex64))
    other.register_buffer("wave", torch.zeros(50, dtype=torch.complex64).conj())
    save(model, path)
    load(path, other)
    assert torch.equal(other.wave, model.wave)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_models_on_a_gpu(path: Path) -> None:
    """Saved from there and filled there."""
    model, other = convnet().cuda(), convnet(seed=1).cuda().to(memory_format=torch.channels_last)
    save(model, path)
    load(path, other)
    assert same_state(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(4, 3, bias=False), "holds 'bias' besides"),
        (nn.Sequential(nn.Linear(4, 3)), "lacks '0.weight', '0.bias' and holds 'weight', 'bias' besides"),
        (nn.Linear(4, 2), "'weight' is 3×4 in the file and 2×4 in the model"),
        (nn.Linear(4, 3).double(), "'weight' is float32 in the file and float64 in the model. Convert the model first"),
        (nn.Linear(4, 3, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(3), "'weight' has no shape yet"),
    ],
)
def test_models_that_do_not_fit(other: nn.Module, message: str, path: Path) -> None:
    """One sentence, and the model is as it was."""
    save(nn.Linear(4, 3), path)
    before = None if isinstance(other, nn.LazyLinear) else copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        load(path, other)
    if before is not None and "meta" not in message:
        assert same_state(other.state_dict(), before)


def test_scalars_that_do_not_fit(path: Path) -> None:
    """A shape without dimensions is named in words."""
    one, other = nn.Module(), nn.Module()
    one.register_buffer("x", torch.tensor(1.0))
    other.register_buffer("x", torch.ones(1))
    save(one, path)
    with pytest.raises(ValueError, match="'x' is a single number in the file and 1 in the model"):
        load(path, other)


def test_tensors_that_cannot_be_filled(path: Path) -> None:
    """Expanded buffers, and state that is no tensor of the model."""

    class Stateful(nn.Module):
        def get_extra_state(self) -> Tensor:
            return torch.ones(2)

    expanded = nn.Module()
    expanded.register_buffer("x", torch.ones(1).expand(5))
    save({"x": torch.ones(5)}, path)
    with pytest.raises(ValueError, match="'x' of the model is an expanded tensor"):
        load(path, expanded)
    save(Stateful(), path)
    with pytest.raises(ValueError, match="'_extra_state' of the model's state dict is no parameter or buffer"):
        load(path, Stateful())
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not dict"):
        load(path, {})  # type: ignore[call-overload]


# ---------------------------------------------------------------- what cannot be saved


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ([], TypeError, "A list cannot be saved"),
        ({"epoch": 3}, TypeError, "'epoch' is a int, and a file holds only tensors"),
        ({3: torch.ones(1)}, TypeError, "Name tensors with text"),
        ({"__metadata__": torch.ones(1)}, ValueError, "Rename it"),
        ({"x": torch.ones(1, device="meta")}, ValueError, "has no values"),
        ({"x": torch.ones(1).view([1] * 65)}, ValueError, "has 65 dimensions"),
        ({"x": torch.empty(2, dtype=torch.bits8)}, TypeError, "has the type bits8"),
    ],
)
def test_what_cannot_be_saved(tensors: Any, kind: type[Exception], message: str, path: Path) -> None:
    """One sentence each, and no file."""
    with pytest.raises(kind, match=message):
        save(tensors, path)
    assert not path.exists()


def test_layouts_and_wrappers_that_cannot_be_saved(path: Path) -> None:
    """Sparse layouts, quantised and sharded tensors have to be converted by those who know how."""

    class Wrapped(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

    with torch.sparse.check_sparse_tensor_invariants():
        layout = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="Convert it with to_dense"):
        save({"x": layout}, path)
    with pytest.raises(TypeError, match="'x' is a Wrapped. Gather or convert it"):
        save({"x": torch.ones(2).as_subclass(Wrapped)}, path)


def test_options_are_checked(path: Path) -> None:
    """A wrong word is answered with the right one."""
    with pytest.raises(ValueError, match="values='fp16' is not known. Write one of 'float16', 'bfloat16'"):
        save(convnet(), path, values="fp16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="save has no option 'value'. Did you mean 'values'?"):
        save(convnet(), path, value="float16")  # type: ignore[call-arg]
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load(path)
