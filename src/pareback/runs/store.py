"""The run store: one folder per run under a root, named after what the run is and a hash of its recipe."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidValue, MissingFile, UserError
from ..lab.recipe.reading import from_dict, read, to_dict
from ..lab.recipe.schema import Recipe
from .folder import INCIDENTAL, by_name
from .record import Record, read_record, write_record
from .results import NUMBERS, lacking

State = Literal["finished", "unfinished", "broken", "foreign"]

#: Hexadecimal digits of a recipe's key: of 10,000 recipes two meet in one of 20,000 stores, and the trainer, which
#: compares the recipes themselves, then refuses the second.
_DIGITS = 10
#: The fields that keys have counted from the start. One that came later counts only away from its default: runs that
#: were stored before there was one keep their keys.
_COUNTED_ALWAYS = {
    "data": "kind path batch_size augment image_size workers download",
    "model": "name depth width thin pretrained",
    "goal": "kind sparsity params flops bytes enforce average bound weight cost shrink ramp straight_through include "
    "exclude min_size threshold_lr",
    "optimizer": "kind lr momentum nesterov weight_decay clip",
    "schedule": "kind every factor warmup",
    "train": "epochs label_smoothing ema precision channels_last compile cuda_graph device deterministic "
    "evaluate_every checkpoint_every tensorboard",
    "teacher": "run weight temperature",
}
#: How deep a store is looked through: more would read every file of a folder that was given by mistake.
_LEVELS = 4
#: What a run may leave behind that was killed before its recipe was written.
_BEGINNINGS = {".lock", "environment.json", "metrics.jsonl", "recipe.yaml.tmp", "environment.json.tmp", "code.json"}


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it, in a folder or in the small file that is kept of one."""

    path: Path
    state: State
    problem: str = ""
    """One sentence, where the run is broken or foreign."""
    asked: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The recipe as nested mappings; empty where it is not known."""
    result: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """What came of a finished run: its result.json, less the entry of each tensor."""

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe, or None where it is not known or of another version of this package."""
        if not self.asked:
            return None
        try:
            return from_dict(self.asked)
        except (ValueError, TypeError):
            return None


def key(recipe: Recipe) -> str:
    """Return the hash of what decides a run's outcome; where and how it runs does not.

    >>> from dataclasses import replace
    >>> from pareback.lab.recipe import TrainRecipe
    >>> key(Recipe()), key(Recipe(seed=1))
    ('e362c0cfbe', 'bf5de6781f')
    >>> key(replace(Recipe(), train=TrainRecipe(device="cpu"))) == key(Recipe())
    True
    """
    canonical = json.dumps(decisive(to_dict(recipe)), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGITS]


def decisive(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the outcome of a recipe that is given as nested mappings.

    >>> decisive({"seed": 1, "teacher": {"run": "runs/dense-0", "weight": 0.9}})
    {'seed': 1, 'teacher': {'run': 'dense-0', 'weight': 0.9}}
    """
    kept = {
        section: _counting(section, value) if isinstance(value, Mapping) else value
        for section, value in by_name(asked).items()
    }
    kept = {section: value for section, value in kept.items() if value != {}}
    if kept.get("teacher", {}).get("run") is None:  # then it is what it was before there were any
        kept.pop("teacher", None)
    return kept


def _counting(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a section that a key counts."""
    always, usual = _COUNTED_ALWAYS.get(section, "").split(), _usual().get(section, {})
    return {
        name: value
        for name, value in values.items()
        if f"{section}.{name}" not in INCIDENTAL and (name in always or value != usual.get(name))
    }


@functools.cache
def _usual() -> dict[str, Any]:
    return to_dict(Recipe())


def folder(root: Path, recipe: Recipe) -> Path:
    """Return where a run of the recipe lives.

    >>> folder(Path("runs"), Recipe(name="wide/exact 5 %")).name
    'wide-exact-5-0-37d1264d4b'
    """
    name = re.sub(r"[^A-Za-z0-9.=_+-]+", "-", recipe.name).strip("-.")[:60]
    return root / f"{name or 'run'}-{recipe.seed}-{key(recipe)}"


def scan(root: Path) -> list[StoredRun]:
    """Return what a folder holds: runs, the small files that are kept of runs, and what is neither, with the reason.

    ``root`` may also be one run or one such file itself. A folder of runs in it, as the demo's is, is looked through
    too; a run's own folder is not. Hidden entries, and files that are no JSON, are passed over.
    """
    if root.is_file() and root.suffix != ".json":
        raise InvalidValue(
            f"{str(root)!r} is a file, and no record of a run (.json). Give the folder that holds the runs; "
            "pareback inspect counts the non-zeros of a file of weights."
        )
    if root.is_file() or _holds_a_run(root):
        return [look(root)]
    if not root.is_dir():
        raise MissingFile(f"There is no folder {str(root)!r}. Give the one that holds the runs, or train some first.")
    return _entries(root, _LEVELS)


def within(path: Path, root: Path) -> str:
    """Return what an entry is called in a store: the way to it from there.

    >>> within(Path("runs/demo/dense"), Path("runs")), within(Path("runs/dense"), Path("runs/dense"))
    ('demo/dense', 'dense')
    """
    return path.relative_to(root).as_posix() if path != root and path.is_relative_to(root) else path.name


def _entries(root: Path, levels: int) -> list[StoredRun]:
    with os.scandir(root) as found:
        names = sorted(
            entry.name
            for entry in found
            if not entry.name.startswith(".") and (entry.name.endswith(".json") or entry.is_dir())
        )
    return [run for name in names for run in _looked_through(root / name, levels)]


def _looked_through(path: Path, levels: int) -> list[StoredRun]:
    """Return an entry, or what is in it if that is runs; of anything else the folder alone is told of."""
    run = look(path)
    # Links may lead in circles.
    if run.state != "foreign" or levels < 2 or not path.is_dir() or path.is_symlink():
        return [run]
    inside = _entries(path, levels - 1)
    return inside if any(_is_of_a_run(entry) for entry in inside) else [run]


def _is_of_a_run(entry: StoredRun) -> bool:
    return entry.state in ("finished", "unfinished") or (entry.state == "broken" and entry.path.is_dir())


def look(path: Path) -> StoredRun:
    """Return one entry of a store; whatever is wrong with it is said, not raised."""
    try:
        return _folder(path) if path.is_dir() else _file(path)
    except OSError as error:
        return StoredRun(path, "broken", f"{path.name} cannot be read: {error.strerror or error}.")


def record_of(run: StoredRun) -> Record:
    """Return a finished run's record: from its record.json, or from its folder, where it is then kept if it can be."""
    if run.state != "finished":
        raise InvalidValue(f"{str(run.path)!r} holds no finished run. {run.problem}".rstrip())
    try:
        if not run.path.is_dir():
            return read_record(run.path)
        return _kept(run) or keep(run.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(f"The record of {str(run.path)!r} cannot be made: {error}") from error


def keep(path: Path) -> Record:
    """Write the record.json of a finished run's folder, unless that is read-only, and return the record."""
    record = read_record(path)
    with suppress(OSError, UserError):
        write_record(record, path / "record.json")
    return record


def _kept(run: StoredRun) -> Record | None:
    """Return what record.json says, if it is of the run that is there: --force trains another into the same folder."""
    path = run.path / "record.json"
    if not path.is_file() or run.result is None:
        return None
    try:
        record = read_record(path)
    except ValueError:
        return None
    same = all(record.result.get(name) == run.result.get(name) for name in ("name", *NUMBERS, "seconds"))
    return record if same else None


def _holds_a_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file() or (path / "result.json").is_file()


def _folder(path: Path) -> StoredRun:
    if (path / "result.json").is_file():
        return _finished(path, path / "result.json")
    if not (path / "recipe.yaml").is_file():
        names = {name.name for name in path.iterdir()}
        if names and names <= _BEGINNINGS:  # cut off at its very start
            return StoredRun(path, "unfinished")
        return StoredRun(path, "foreign", f"{path.name} is not a run: it holds no recipe.yaml.")
    try:
        return StoredRun(path, "unfinished", asked=to_dict(read(path / "recipe.yaml")))
    except (ValueError, TypeError) as error:
        return StoredRun(path, "broken", f"The recipe of {path.name} cannot be read: {error}")


def _file(path: Path) -> StoredRun:
    if not path.exists():
        raise MissingFile(f"There is no {str(path)!r}. Give a folder of runs, a run or the record of one.")
    run = _finished(path, path)
    if run.state == "finished" and not {"metrics", "histograms"} <= run.result.keys():  # type: ignore[union-attr]
        return StoredRun(path, "foreign", f"{path.name} is not the record of a run.")
    return run


def _finished(path: Path, file: Path) -> StoredRun:
    """Read a result, from its own file or from a record; a file that is no result at all is foreign."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return StoredRun(path, "broken", f"{_shown(path, file)} is not whole: it is no JSON.")
    if not isinstance(content, dict) or "recipe" not in content:
        state: State = "broken" if file.name == "result.json" else "foreign"
        return StoredRun(path, state, f"{_shown(path, file)} is not the result of a run.")
    missing = lacking(content)
    if missing:
        return StoredRun(path, "broken", f"{_shown(path, file)} is not whole: it lacks {missing}.")
    content.pop("tensors", None)
    return StoredRun(path, "finished", asked=content["recipe"], result=content)


def _shown(path: Path, file: Path) -> str:
    return path.name if path == file else f"{path.name}/{file.name}"
