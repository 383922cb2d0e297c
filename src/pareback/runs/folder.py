"""A run's folder: who may write to it, what is in it, and whether a run can begin, go on or be made longer there."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from .. import files
from ..artifact.weights import classes_in
from ..errors import InvalidValue, MissingFile
from ..goals import MaskGoal
from ..lab.recipe.goals import goal_of
from ..lab.recipe.reading import entries, from_dict, read, to_dict, to_yaml
from ..lab.recipe.schema import OWN_TEACHERS, SELF, Recipe
from ..pruning.options import ramp_steps
from ..pruning.pruner import Pruner
from .checkpoints import previous_of
from .locking import FolderLock
from .results import fits_images, lacking, names_of
from .trust import remember

#: The fields in which a longer run may differ: its length, and the ramp, whose share of it becomes smaller.
FIELDS = ("train.epochs", "goal.ramp")


def check_schedule(path: Path, there: Recipe, here: Recipe) -> None:
    """Raise where the steps that are done would have had another learning rate, mask or loss in the longer run."""
    if here.schedule.kind == "cosine":
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={here.train.epochs}: its schedule, cosine, goes "
            f"down to the end of {there.train.epochs} epochs, so that a longer run differs from the first step on. "
            "Train that one anew with another --out. Runs with schedule.kind=constant, step or restarts can go on."
        )
    if here.train.mutual:
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={here.train.epochs}: with train.mutual the passes "
            f"teach each other after a third of {there.train.epochs} epochs, and in a longer run later. Train that one "
            "anew with another --out."
        )
    if here.teacher.run == SELF:
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={here.train.epochs}: with teacher.run=self the "
            f"weight of the teacher's answers grows to the end of {there.train.epochs} epochs, and in a longer run "
            "more slowly. Train that one anew with another --out."
        )
    goal = goal_of(here.goal)
    if isinstance(goal, MaskGoal):
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={here.train.epochs}: {type(goal).__name__} changes "
            f"its masks at shares of {there.train.epochs} epochs, and in a longer run at other steps. Train that one "
            "anew with another --out."
        )


def check_ramp(path: Path, before: Mapping[str, Any], recipe: Recipe, per_epoch: int) -> None:
    """Raise where the target of the steps that are done would have been another one; ``before`` is the run's recipe."""
    there = from_dict(before)
    old, new = (_ramp(each, per_epoch) for each in (there, recipe))
    if old != new:
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={recipe.train.epochs}: its budget was reached over "
            f"{old} steps, and a ramp of the longer run takes {new}. Write --goal.ramp "
            f"{_share(old, recipe.train.epochs * per_epoch)} too, which keeps it as it was."
        )


def check_rates(path: Path, before: Mapping[str, Any], recipe: Recipe, per_epoch: int, pruner: Pruner | None) -> None:
    """Raise where an exact budget's thresholds would have learned faster or slower in the steps that are done."""
    steps = from_dict(before).train.epochs * per_epoch
    if recipe.goal.kind == "budget" and pruner is not None and not pruner.learns_alike(steps):
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={recipe.train.epochs}: the rate at which its "
            f"thresholds learned follows from {steps:,} steps, and that of a longer run is another. Train that one "
            "anew with another --out. Runs that are begun with goal.threshold_lr can go on."
        )


def _ramp(recipe: Recipe, per_epoch: int) -> int:
    goal = goal_of(recipe.goal)
    if goal is None:
        return 0
    ramp = goal.usual_ramp if recipe.goal.ramp is None else recipe.goal.ramp
    return ramp_steps(ramp, recipe.train.epochs * per_epoch)


def _share(steps: int, total: int) -> str:
    """Return a share that makes a ramp of so many steps, with few digits.

    >>> _share(75, 2500), _share(1, 3), _share(0, 10)
    ('0.03', '0.3', '0')
    """
    near = (f"{steps / total:.{digits}g}" for digits in range(1, 12))
    fits = (text for text in near if ramp_steps(float(text), total) == steps)
    return next(fits, f"{(steps - 0.5) / total:.12g}")


#: Fields that may differ between the parts of one run: they say where and how, not what.
INCIDENTAL = {
    "data.path",
    "data.workers",
    "data.download",
    "train.device",
    "train.checkpoint_every",
    "train.tensorboard",
}

#: What to do about a result that cannot be used.
_ANEW = "Put the right one back, or train anew with --force."

Standing = Literal["fresh", "unfinished", "longer", "finished"]


class RunFolder:
    """The folder of one run, locked while it is open: ``with RunFolder(path) as folder``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.model = path / "model.safetensors"
        self.average = path / "model-ema.safetensors"
        self.best = path / "model-best.safetensors"
        self.result = path / "result.json"
        self.code = path / "code.json"
        self.tensorboard = path / "tensorboard"
        self._lock = FolderLock(path)
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]

    def __enter__(self) -> RunFolder:
        file = next((each for each in (self.path, *self.path.parents) if each.exists() and not each.is_dir()), None)
        if file is not None:
            raise InvalidValue(f"{str(file)!r} is a file. Give a folder with --out.")
        try:
            with files.noticing_full_disk(self._lock.file):
                self._lock.take()
        except OSError as error:
            if error.errno is None:  # it is a sentence already
                raise
            raise OSError(
                f"The folder {str(self.path)!r} cannot be made or written to: {error.strerror}. Give another one with "
                "--out."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.path in self._made and list(self.path.iterdir()) == [self._lock.file]:  # nothing came of it
            self._lock.file.unlink()
            for folder in self._made:
                with suppress(OSError):  # somebody else has put something there
                    folder.rmdir()
        self._lock.release()

    def hold(self) -> None:
        """Raise where another process has taken the folder, as one can whose lock was deleted."""
        self._lock.hold()

    @property
    def files(self) -> list[Path]:
        """What a run writes, the result first: without it the rest counts as unfinished."""
        written = [self.recipe, self.environment, self.metrics, self.checkpoint, self.model, self.average, self.best]
        return [self.result, *written, self.code, previous_of(self.checkpoint)]

    def standing(self, recipe: Recipe, resume: bool) -> Standing:
        """Return how a run of ``recipe`` stands here, or raise where it may not go on."""
        if not self.recipe.exists():
            if resume and self.checkpoint.exists():
                raise InvalidValue(f"{str(self.recipe)!r} is missing. Put it back, or begin anew with --force.")
            return "fresh"
        there = read(self.recipe)
        other = difference(there, recipe)
        if other and resume and recipe.train.epochs > there.train.epochs and not difference(there, recipe, FIELDS):
            return self._longer(there, recipe)
        if other:
            raise InvalidValue(
                f"{str(self.path)!r} holds a run of another recipe ({other}). Give another folder with --out, or throw "
                "that run away with --force."
            )
        if self.result.exists():
            return "finished"
        if not resume:
            raise InvalidValue(
                f"{str(self.path)!r} holds an unfinished run. Go on with it: {resume_command(self.path)}; or throw it "
                "away with --force."
            )
        return "unfinished"

    def _longer(self, there: Recipe, here: Recipe) -> Standing:
        check_schedule(self.path, there, here)
        if not self.checkpoint.exists():
            raise InvalidValue(
                f"{str(self.checkpoint)!r} is gone, from which the run would go on. Put it back, or train anew with "
                "another --out."
            )
        return "longer"

    def reopen(self) -> None:
        """Make a finished run an unfinished one, which its checkpoint goes on from."""
        for path in (
            self.result,
            self.model,
            self.average,
            self.best,
        ):  # the result first: without it the rest is unfinished
            path.unlink(missing_ok=True)
        self._drop_pictures()

    def _drop_pictures(self) -> None:
        """Remove what ``pareback evaluate`` drew of a network that is no longer the run's."""
        for name in ("confusion", "confusion-best", "confusion-ema"):
            (self.path / f"{name}.png").unlink(missing_ok=True)

    def clear(self) -> None:
        """Throw away a run's files, and nothing else that may be in the folder."""
        for path in self.files:
            path.unlink(missing_ok=True)
            path.with_name(path.name + ".tmp").unlink(missing_ok=True)
        self._drop_pictures()
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    @contextmanager
    def reserved(self, recipe: Recipe) -> Iterator[None]:
        """Note the recipe of a run that is about to begin, so that one killed before its first step can be resumed.

        A mistake that is found meanwhile leaves nothing behind.
        """
        if self.recipe.exists():
            yield
            return
        remember(self.path, recipe.model.name)  # before: a recipe of one's own without it would look like a stranger's
        files.write_text(self.recipe, to_yaml(recipe), alone=True)
        try:
            yield
        except Exception:
            self.recipe.unlink(missing_ok=True)
            self.code.unlink(missing_ok=True)
            raise

    def begin(self, recipe: Recipe, environment: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Write what is known before the first step: ``rows`` are the metrics of epochs that are done."""
        files.write_json(self.environment, environment, alone=True)
        lines = [json.dumps(files.plain(row)) + "\n" for row in rows]
        files.write_text(self.metrics, "".join(lines), alone=True)
        files.write_text(self.recipe, to_yaml(recipe), alone=True)

    def append(self, row: dict[str, Any]) -> None:
        """Write an epoch's metrics."""
        with files.noticing_full_disk(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(files.plain(row)) + "\n")


def is_own_file(path: Path) -> bool:
    """Whether a file is part of a run, or would be taken for one: it has such a name and lies beside a recipe."""
    folder = RunFolder(path.parent)
    return path in folder.files and folder.recipe.is_file()


def started(path: Path) -> dict[str, Any]:
    """Return the environment of the run's first start, if there is one."""
    try:
        found = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def result_of(path: Path) -> dict[str, Any]:
    """Return a finished run's result.json, which is whole."""
    file = path / "result.json"
    if not file.exists():
        raise MissingFile(f"{str(path)!r} holds no finished run. Train one with: pareback train --out {path}")
    content = _content(file)
    missing = lacking(content)
    if missing:
        raise InvalidValue(f"{str(file)!r} is not whole: it lacks {missing}. {_ANEW}")
    return content


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{str(file)!r} is damaged: it is no JSON. {_ANEW}") from error
    if not isinstance(content, dict):
        raise InvalidValue(f"{str(file)!r} is not the result of a run. {_ANEW}")
    return content


def made_for(path: Path) -> tuple[int, tuple[int, int, int]]:
    """Return how many classes, and images of which shape, the network of a finished run is for."""
    result = result_of(path)
    if not fits_images(result):
        raise InvalidValue(f"{str(path / 'result.json')!r} does not say what images the network is for. {_ANEW}")
    channels, height, width = result["shape"]
    return result["classes"], (channels, height, width)


def class_names(place: Path) -> tuple[str, ...]:
    """Return the names of the classes that a finished run or a file is for; none where it does not say."""
    result = (place if place.is_dir() else place.parent) / "result.json"
    if (place.is_dir() or is_own_file(place)) and result.exists():
        return names_of(result_beside(place))
    return classes_in(place / "model.safetensors" if place.is_dir() else place)


def result_beside(place: Path) -> dict[str, Any]:
    """Return what the result of a run's folder, or of one of its files, holds; nothing where there is none."""
    folder = place if place.is_dir() else place.parent
    if (not place.is_dir() and not is_own_file(place)) or not (folder / "result.json").exists():
        return {}
    return _content(folder / "result.json")


def recipe_of(path: Path) -> Recipe:
    """Return the recipe of the run in a folder."""
    if not (path / "recipe.yaml").is_file():
        raise MissingFile(
            f"There is no run in {str(path)!r} to go on with. Give the folder of one, or begin it without --resume."
        )
    return read(path / "recipe.yaml")


#: Fields that name a file or folder of weights.
_MOVABLE = ("teacher.run", "model.pretrained")


def difference(there: Recipe, here: Recipe, apart_from: Sequence[str] = ()) -> str:
    """Say in which fields that decide the outcome two recipes differ; nothing if in none.

    >>> difference(Recipe(seed=1), Recipe())
    'seed is 1 there and 0 here'
    """
    one, two = (to_dict(recipe) for recipe in (there, here))
    for field in entries():
        if field.key not in INCIDENTAL and field.key not in apart_from:
            first, second = (_at(recipe, field.key) for recipe in (one, two))
            # Whose weights it starts or learns from may have moved; whether they are the same, their hash says.
            moved = field.key in _MOVABLE and not {first, second} & {None, "hub", *OWN_TEACHERS}
            if first != second and not moved:
                return f"{field.key} is {first} there and {second} here"
    return ""


def by_name(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's nested mappings with the name of its teacher's run alone: another folder may hold the same run.

    >>> by_name({"seed": 1, "teacher": {"run": "runs/dense-0", "weight": 0.9}})
    {'seed': 1, 'teacher': {'run': 'dense-0', 'weight': 0.9}}
    """
    teacher = asked.get("teacher", {})
    run = teacher.get("run")
    return dict(asked) if run is None else {**asked, "teacher": {**teacher, "run": Path(run).name}}


def resume_command(path: Path) -> str:
    """Return what to type to go on with a run.

    >>> resume_command(Path("runs/digits-0"))
    'pareback train --resume runs/digits-0'
    """
    return f"pareback train --resume {shlex.quote(str(path))}"


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content[part]
    return content
