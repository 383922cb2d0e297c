"""`pareback export`: a run's model as a compressed file, as safetensors and as ONNX, with the same weights in all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pareback as pb
from pareback.cli import main
from pareback.lab.models.build import build
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, ModelRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runs.export import network_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned run of one epoch."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = Recipe(
        data=DataRecipe(batch_size=64),
        model=ModelRecipe(name="conv"),
        goal=GoalRecipe(kind="budget", sparsity=0.9),
        train=TrainRecipe(epochs=1, device="cpu"),
    )
    train(recipe, folder, quiet=True)
    return folder


def test_a_pare_file_is_smaller_and_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says where it wrote and how much; the weights come back bit for bit; inspect reads the file."""
    assert main(["export", str(run)]) == 0
    written = run / "model.pare"
    assert f"wrote {written}, {written.stat().st_size:,} bytes" in capsys.readouterr().out
    assert written.stat().st_size < 0.3 * (run / "model.safetensors").stat().st_size
    plain, packed = load_file(run / "model.safetensors"), pb.load(written)
    assert plain.keys() == packed.keys()
    assert all(torch.equal(plain[name], packed[name]) for name in plain)
    assert main(["inspect", str(written)]) == 0
    assert "sparse" in capsys.readouterr().out


def test_and_back_to_safetensors(run: Path, tmp_path: Path) -> None:
    """A .pare file becomes a plain one again, for programs that know nothing of it."""
    main(["export", str(run), "--out", str(tmp_path / "a.pare")])
    assert (
        main(["export", str(tmp_path / "a.pare"), "--format", "safetensors", "--out", str(tmp_path / "b.safetensors")])
        == 0
    )
    plain, again = load_file(run / "model.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_runs_own_files_are_never_written_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default name is another one; so it is for a .pare file that lies in the run's folder."""
    own = run / "model.safetensors"
    before, made = own.read_bytes(), own.stat().st_mtime_ns
    assert main(["export", str(run)]) == 0
    for source in (run, run / "model.pare"):
        assert main(["export", str(source), "--format", "safetensors"]) == 0
        assert f"wrote {run / 'exported.safetensors'}" in capsys.readouterr().out
    assert main(["export", str(run), "--format", "safetensors", "--out", str(own)]) == 2
    assert "belongs to the run in that folder" in capsys.readouterr().err
    assert (own.read_bytes(), own.stat().st_mtime_ns) == (before, made)
    plain, again = load_file(own), load_file(run / "exported.safetensors")
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_half_the_bytes_per_value(run: Path, tmp_path: Path) -> None:
    """--values float16 rounds what is kept and nothing else."""
    main(["export", str(run), "--out", str(tmp_path / "full.pare")])
    assert main(["export", str(run), "--out", str(tmp_path / "half.pare"), "--values", "float16"]) == 0
    assert (tmp_path / "half.pare").stat().st_size < (tmp_path / "full.pare").stat().st_size
    for name, value in pb.load(tmp_path / "half.pare").items():
        torch.testing.assert_close(value, load_file(run / "model.safetensors")[name], rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_onnx_computes_the_same(run: Path, tmp_path: Path) -> None:
    """onnxruntime gives the model's own outputs, for a batch of another size."""
    import onnxruntime

    assert main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "m.onnx")]) == 0
    model = build(ModelRecipe(name="conv"), 10, (1, 8, 8)).eval()
    model.load_state_dict(load_file(run / "model.safetensors"))
    x = torch.randn(5, 1, 8, 8)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--format", "onx"], "There is no format 'onx'. Write one of: pare, safetensors, onnx."),
        (["--values", "int8"], "Values cannot be kept as 'int8'. Write float16 or bfloat16."),
        (["--format", "safetensors", "--out", "{run}/model.safetensors"], "would be written over itself."),
        (["--out", "{run}/checkpoint.pt"], "checkpoint.pt' belongs to the run in that folder. Give another file"),
    ],
)
def test_wrong_options(run: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake is one sentence and exit code 2."""
    source = run / "model.safetensors"
    code = main(["export", str(source), *(word.format(run=run) for word in argv)])
    error = capsys.readouterr().err
    assert code == 2
    assert said in error


def test_onnx_needs_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of weights does not say what network it belongs to."""
    assert main(["export", str(run / "model.safetensors"), "--format", "onnx"]) == 2
    assert "Give a run's folder." in capsys.readouterr().err


def test_a_run_that_began_with_weights_needs_them_no_more(run: Path, tmp_path: Path) -> None:
    """From a run's folder; removed afterwards, export and a teacher go by what the run ended with."""
    began = tmp_path / "began"
    began.mkdir()
    (began / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    recipe = Recipe(
        data=DataRecipe(batch_size=64),
        model=ModelRecipe(name="conv", pretrained=str(began)),
        train=TrainRecipe(epochs=1, device="cpu"),
    )
    train(recipe, tmp_path / "second", quiet=True)
    (began / "model.safetensors").unlink()
    model, weights = network_of(tmp_path / "second"), load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert main(["export", str(tmp_path / "second"), "--format", "onnx", "--out", str(tmp_path / "m.onnx")]) == 0
