"""The run store: keys, what a scan finds and reports, records, and many writers at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_runs import RECIPE, finish, result

from pareback.lab.recipe.reading import override, to_dict, to_yaml
from pareback.lab.recipe.schema import Recipe
from pareback.lab.trainer import train
from pareback.runs import store
from pareback.runs.record import read_record
from pareback.runs.store import StoredRun, decisive, folder, keep, key, look, record_of, scan, within


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root of a store with one run that was trained."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("trained")
    train(RECIPE, folder(root, RECIPE), quiet=True)
    yield root
    torch.set_num_threads(before)


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def only(root: Path) -> StoredRun:
    (run,) = scan(root)
    return run


# -- keys ------------------------------------------------------------------------------------------------------------


def test_the_key_is_the_hash_of_what_decides_the_outcome() -> None:
    """SHA-256 of the recipe as canonical JSON, without the fields that say where and how."""
    content = to_dict(Recipe())
    for section, name in [("data", "path"), ("data", "workers"), ("data", "download")]:
        del content[section][name]
    for name in ("device", "checkpoint_every", "tensorboard"):
        del content["train"][name]
    del content["teacher"]  # there is none
    # What came later, and is at its default:
    later = "data.val_share data.randaugment data.corrupt data.memory data.mean data.std optimizer.strength"
    later += (
        " train.mixup train.cutmix train.accumulate train.decay_norms train.freeze train.head_rate train.recalibrate"
        " train.mutual"
    )
    for section, name in (field.split(".") for field in later.split()):
        del content[section][name]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert key(Recipe()) == hashlib.sha256(text.encode()).hexdigest()[:10]


def test_where_and_how_do_not_change_the_key_and_everything_else_does() -> None:
    """Another path or device goes on with the same run; another name, seed or field is another run."""
    same = {"data.path": "elsewhere", "data.workers": 9, "train.device": "cuda:1", "train.checkpoint_every": 5}
    assert key(override(Recipe(), same)) == key(Recipe())
    others = [{"name": "b"}, {"seed": 1}, {"goal.kind": "budget"}, {"train.epochs": 29}, {"goal.include": "a,b"}]
    keys = {key(override(Recipe(), change)) for change in others}
    assert len(keys | {key(Recipe())}) == 6


def test_a_field_that_came_later_counts_only_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from before there was a field, and those that leave it alone, have the keys that they always had."""
    fields = [("train", "ema", 0.9), ("goal", "bound", "gaussian"), ("data", "val_share", 0.1)]
    for section, name, other in [*fields, ("optimizer", "nesterov", True), ("optimizer", "strength", 5.0)]:
        before = to_dict(Recipe())
        del before[section][name]
        with monkeypatch.context() as later:
            known = store._COUNTED_ALWAYS
            later.setitem(known, section, " ".join(word for word in known[section].split() if word != name))
            assert decisive(before) == decisive(to_dict(Recipe()))
            assert key(override(Recipe(), {f"{section}.{name}": other})) != key(Recipe())
    # What the first version gave, which folders of runs are named by.
    assert [key(Recipe()), key(Recipe(seed=1))] == ["e362c0cfbe", "bf5de6781f"]


def test_another_teacher_is_another_run_and_another_folder_of_it_is_not() -> None:
    """Weights and temperatures count where there is a teacher."""
    none, here, there = (key(override(Recipe(), {"teacher.run": run})) for run in (None, "runs/a", "/x/a"))
    assert here == there != none == key(Recipe())
    others = [{"teacher.run": "runs/b"}, {"teacher.run": "runs/a", "teacher.weight": 0.5}]
    assert len({key(override(Recipe(), change)) for change in others} | {here}) == 3


@pytest.mark.parametrize(
    ("name", "safe"),
    [("wrn-exact-0.05", "wrn-exact-0.05"), ("../../x y/λ", "x-y"), ("???", "run"), ("a" * 300, "a" * 60)],
)
def test_folders_are_safe_on_any_file_system(name: str, safe: str) -> None:
    """Name, seed and key; what a file system may not take becomes a dash, and nothing leaves the root."""
    recipe = Recipe(name=name, seed=3)
    assert folder(Path("runs"), recipe) == Path("runs") / f"{safe}-3-{key(recipe)}"


# -- what a scan finds -----------------------------------------------------------------------------------------------


def test_a_finished_run_is_found_with_its_recipe_and_result(root: Path) -> None:
    run = only(root)
    assert (run.path, run.state, run.problem, run.recipe) == (folder(root, RECIPE), "finished", "", RECIPE)
    assert run.result is not None
    written = json.loads((run.path / "result.json").read_text())
    assert run.result["accuracy"] == written["accuracy"]
    assert "tensors" not in run.result


def test_a_run_that_was_cut_off_is_unfinished(root: Path) -> None:
    run = only(root)
    (run.path / "result.json").unlink()
    assert only(root) == StoredRun(run.path, "unfinished")
    assert only(root).recipe == RECIPE


def test_a_run_that_was_killed_before_its_recipe_was_written_is_unfinished(tmp_path: Path) -> None:
    """It has no recipe yet; the trainer begins it again."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / ".lock").write_text("1")
    run = only(tmp_path)
    assert (run.state, run.recipe) == ("unfinished", None)


def test_folders_of_plain_training_are_runs_too(root: Path) -> None:
    """``pareback train`` names its folders without a key."""
    only(root).path.rename(root / "digits-0")
    assert only(root).state == "finished"


def test_one_run_and_one_record_can_be_given_themselves(root: Path) -> None:
    run = only(root)
    record_of(run)
    assert only(run.path).state == "finished"
    shutil.copy(run.path / "record.json", root / "digits.json")
    assert only(root / "digits.json").state == "finished"


def test_records_without_folders_are_runs(root: Path, tmp_path: Path) -> None:
    """As results/paper/rows has them: finished, with recipe and result, and whole from the file alone."""
    record = record_of(only(root))
    rows = tmp_path / "rows"
    rows.mkdir()
    shutil.copy(only(root).path / "record.json", rows / "exact-0.json")
    run = only(rows)
    assert (run.state, run.recipe) == ("finished", RECIPE)
    assert record_of(run).histograms == record.histograms


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _without(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads((path / "result.json").read_text())
        del content[name]
        (path / "result.json").write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: _half(path / "result.json"), "/result.json is not whole: it is no JSON."),
        (lambda path: (path / "result.json").write_bytes(b"\xff\xfe"), "/result.json is not whole: it is no JSON."),
        (lambda path: (path / "result.json").write_text("[" * 100_000), "/result.json is not whole: it is no JSON."),
        (lambda path: (path / "result.json").write_text("[1]"), "/result.json is not the result of a run."),
        (_without("accuracy"), "/result.json is not whole: it lacks accuracy."),
        (_without("seconds"), "/result.json is not whole: it lacks seconds."),
        (_without("tensors"), "/result.json is not whole: it lacks tensors."),
        (_without("complete"), "/result.json is not whole: it lacks its end."),
    ],
)
def test_a_damaged_result_is_reported(root: Path, damage: Callable[[Path], object], problem: str) -> None:
    """As broken, in a sentence that names the file; a record of it is refused."""
    path = only(root).path
    damage(path)
    run = only(root)
    assert (run.state, run.problem, run.recipe) == ("broken", f"{path.name}{problem}", None)
    with pytest.raises(ValueError, match="holds no finished run"):
        record_of(run)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a: [", "is not YAML"), ("gaol: {}", "A recipe has no section 'gaol'"), ("seed: x", "wrong type")],
)
def test_a_damaged_recipe_is_reported(root: Path, text: str, problem: str) -> None:
    path = only(root).path
    (path / "result.json").unlink()
    (path / "recipe.yaml").write_text(text)
    run = only(root)
    assert run.state == "broken"
    assert run.problem.startswith(f"The recipe of {path.name} cannot be read: ")
    assert problem in run.problem


def test_what_is_not_a_run_is_foreign_and_the_rest_is_listed(root: Path) -> None:
    """A folder of pictures, an empty one, JSON of something else; files of other kinds are passed over."""
    (root / "pictures").mkdir()
    (root / "pictures" / "cat.png").write_bytes(b"")
    (root / "empty").mkdir()
    (root / "other.json").write_text("{}")
    (root / "half.json").write_text("{")
    (root / "bare.json").write_text(json.dumps(result(RECIPE)))
    for passed_over in ("report.html", ".hidden.json", "notes.txt"):
        (root / passed_over).write_text("")
    found = {run.path.name: (run.state, run.problem) for run in scan(root)}
    assert found.pop(folder(root, RECIPE).name) == ("finished", "")
    assert found == {
        "pictures": ("foreign", "pictures is not a run: it holds no recipe.yaml."),
        "empty": ("foreign", "empty is not a run: it holds no recipe.yaml."),
        "other.json": ("foreign", "other.json is not the result of a run."),
        "half.json": ("broken", "half.json is not whole: it is no JSON."),
        "bare.json": ("foreign", "bare.json is not the record of a run."),
    }


def test_folders_of_runs_are_looked_through(root: Path) -> None:
    """As the demo leaves them, deeper, and beside pictures; a run's own folder is not looked into, nor a link."""
    demo, deep = finish(root / "demo", RECIPE), finish(root / "a" / "b", replace(RECIPE, name="deep"))
    (root / "demo" / "plots").mkdir()
    finish(demo / "inside", RECIPE)
    (root / "link").symlink_to(root, target_is_directory=True)
    found = {within(run.path, root): run.state for run in scan(root)}
    assert found == {
        folder(root, RECIPE).name: "finished",
        f"a/b/{deep.name}": "finished",
        f"demo/{demo.name}": "finished",
        "demo/plots": "foreign",
        "link": "foreign",
    }


def test_a_folder_without_runs_is_told_of_once(root: Path) -> None:
    (root / "data" / "deep").mkdir(parents=True)
    for name in ("labels.json", "deep/more.json"):
        (root / "data" / name).write_text("{}")
    (root / "data" / "cut.json").write_text("{")
    assert [run.path.name for run in scan(root) if run.state != "finished"] == ["data"]


def test_what_cannot_be_read_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a folder of somebody else's."""

    def refused(path: Path) -> StoredRun:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "_folder", refused)
    assert only(root).problem == f"{folder(root, RECIPE).name} cannot be read: Permission denied."


def test_a_link_that_leads_nowhere_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone.json").symlink_to(tmp_path / "nothing")
    assert only(tmp_path).state == "broken"


def test_a_recipe_of_another_version_still_has_a_result(root: Path) -> None:
    """The run is listed and drawn; it can only not be run again."""
    path = only(root).path
    content = json.loads((path / "result.json").read_text())
    content["recipe"]["goal"]["new_field"] = 1
    (path / "result.json").write_text(json.dumps(content))
    run = only(root)
    assert (run.state, run.recipe) == ("finished", None)
    assert run.asked["goal"]["new_field"] == 1


def test_a_store_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no folder .* Give the one that holds the runs."):
        scan(tmp_path / "nowhere")


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_record_is_kept_and_read_without_weights(root: Path) -> None:
    """The first call writes record.json; afterwards the weights may go."""
    run = only(root)
    first = record_of(run)
    assert len(first.histograms) == len(first.pruned_tensors) == 3
    (run.path / "model.safetensors").unlink()
    again = record_of(only(root))
    assert again.histograms == first.histograms
    assert again.result["accuracy"] == run.result["accuracy"]  # type: ignore[index]
    assert sorted(path.name for path in run.path.iterdir()) == sorted(
        [".lock", "checkpoint.pt", "environment.json", "metrics.jsonl", "recipe.yaml", "record.json", "result.json"]
    )


def test_the_record_of_a_run_that_was_there_before_is_made_anew(root: Path) -> None:
    """--force trains into the same folder and leaves record.json: the numbers tell."""
    run = only(root)
    record_of(run)
    content = json.loads((run.path / "result.json").read_text())
    (run.path / "result.json").write_text(json.dumps({**content, "accuracy": 12.5}))
    assert record_of(only(root)).result["accuracy"] == 12.5
    assert read_record(run.path / "record.json").result["accuracy"] == 12.5


def test_a_damaged_record_is_made_anew(root: Path) -> None:
    run = only(root)
    record_of(run)
    _half(run.path / "record.json")
    assert record_of(only(root)).result["accuracy"] == run.result["accuracy"]  # type: ignore[index]
    json.loads((run.path / "record.json").read_text())


def test_a_record_does_not_need_a_writable_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_record", full)
    assert record_of(only(root)).is_pruned
    assert not (only(root).path / "record.json").exists()


def test_a_record_that_cannot_be_made_is_one_error(root: Path) -> None:
    """Without metrics and without record.json."""
    (only(root).path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="The record of .* cannot be made"):
        record_of(only(root))


# -- many at once ----------------------------------------------------------------------------------------------------


def test_records_may_be_written_by_many_at_once(root: Path) -> None:
    """Whoever reads meanwhile sees a whole file, and nothing else is left in the folder."""
    path = only(root).path
    keep(path)
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(keep, path) for _ in range(40)]
        reading = [pool.submit(read_record, path / "record.json") for _ in range(40)]
        accuracies = {job.result().result["accuracy"] for job in writing + reading}
    assert len(accuracies) == 1
    assert not [name for name in path.iterdir() if name.name.startswith(".record")]


@pytest.mark.slow
def test_two_processes_with_one_recipe_do_not_corrupt_the_run(tmp_path: Path, trained: Path) -> None:
    """One trains; the other is refused or, later, finds it finished. The weights are those of a run alone."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(RECIPE), encoding="utf-8")
    out = folder(tmp_path / "runs", RECIPE)
    command = [sys.executable, "-m", "pareback", "train", str(recipe), "--out", str(out), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1], [0, 2])
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0 or "is training in" in text or "holds an unfinished run" in text
    assert look(out).state == "finished"
    alone = folder(trained, RECIPE)
    assert (out / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


def test_a_thousand_runs_are_scanned_quickly(tmp_path: Path) -> None:
    """About a second of reading on a slow machine; the bound leaves room for a busy one."""
    content = to_yaml(RECIPE)
    for seed in range(1000):
        recipe = replace(RECIPE, seed=seed)
        path = folder(tmp_path, recipe)
        path.mkdir()
        (path / "recipe.yaml").write_text(content)
        (path / "result.json").write_text(json.dumps(result(recipe)))
    began = time.monotonic()
    runs = scan(tmp_path)
    assert time.monotonic() - began < 10
    assert [run.state for run in runs] == ["finished"] * 1000


def test_finished_folders_of_the_tests_are_runs(tmp_path: Path) -> None:
    """What other tests of curves take for finished runs is one."""
    path = finish(tmp_path, RECIPE)
    run = look(path)
    assert (run.state, run.recipe) == ("finished", RECIPE)
    assert record_of(run).result["accuracy"] == 90.0
