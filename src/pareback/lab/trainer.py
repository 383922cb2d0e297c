"""Trains a recipe into a run folder, from the first step or from wherever it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..artifact.intact import check_intact
from ..errors import DiskFullError, FileSizeError, InvalidValue, LittleMemory, LostProcess, UserError
from ..files import expanded
from ..messages import lacks_memory
from ..runs import checkpoints
from ..runs.folder import RunFolder, Standing, result_of, resume_command
from ..runs.origins import changed_since, forget_images
from ..runs.trust import recall, remember
from .recipe.checks import check, check_machine
from .recipe.schema import OWN_TEACHERS, Recipe
from .train import settings
from .train.distributed import Team, lost_another, patience, team
from .train.loop import Training
from .train.progress import Clock


def train(
    recipe: Recipe,
    out: Path | str,
    *,
    resume: bool = False,
    quiet: bool = False,
    force: bool = False,
    began: float | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Train a recipe into the folder ``out`` and return what its result.json holds.

    A finished run of the same recipe is returned as it is. An unfinished one goes on with ``resume=True``, to the same
    weights as if it had never been interrupted, and with more epochs than it was begun with where the steps that are
    done are the same in the longer run; ``force=True`` throws away what is there. Under torchrun every process
    calls this, and the first one writes. ``began`` is the moment on ``time.monotonic()`` that seconds count from.
    ``trust`` lets code be imported that the teacher's run names and the recipe does not.
    """
    clock = Clock(began)
    check(recipe)
    with ExitStack() as stack:
        here = stack.enter_context(team(recipe.train.device))
        check_machine(recipe, here.device, here.world)
        folder = RunFolder(Path(out))
        standing = _opened(folder, recipe, resume, force, here, stack)
        if standing == "finished":
            return _finished(folder, recipe, quiet or not here.leads)
        stack.enter_context(settings.applied(recipe, here.device))
        stack.enter_context(_advice_on_want(folder))
        stack.enter_context(_advice_on_single_images())
        stack.enter_context(_advice_on_a_lost_process(folder, here))
        if standing in ("unfinished", "longer"):
            recall(folder.path, recipe.model.name)
        with folder.reserved(recipe) if here.leads else nullcontext():
            training = Training(recipe, here, folder, clock, trust)
        if force and here.leads:  # not before: a mistake in the new recipe must not cost the old run
            folder.clear()
        if here.leads:
            remember(folder.path, recipe.model.name)
        if standing in ("unfinished", "longer") and folder.checkpoint.exists():
            training.load(checkpoints.load(folder.checkpoint))
        if standing == "longer" and here.leads:
            folder.reopen()
        return training.run(quiet=quiet or not here.leads)


def _opened(folder: RunFolder, recipe: Recipe, resume: bool, force: bool, here: Team, stack: ExitStack) -> Standing:
    """Let the first process lock the folder and say how the run stands; all processes hear the same."""
    answer: Standing | Exception = "fresh"
    if here.leads:
        try:
            stack.enter_context(folder)
            _check_teacher(recipe, folder)
            answer = "fresh" if force else folder.standing(recipe, resume)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            answer = error
    answer = here.share(answer)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _check_teacher(recipe: Recipe, folder: RunFolder) -> None:
    run = recipe.teacher.run
    if run is not None and run not in OWN_TEACHERS and expanded(run).resolve() == folder.path.resolve():
        raise InvalidValue(f"teacher.run={run} is the folder of this run itself. Give another one with --out.")


def _finished(folder: RunFolder, recipe: Recipe, quiet: bool) -> dict[str, Any]:
    result = result_of(folder.path)
    forget_images()
    other = changed_since(result, recipe)
    if other:
        raise InvalidValue(
            f"{str(folder.path)!r} holds another run, finished: {other}. Give another folder with --out, or throw that "
            "run away with --force."
        )
    check_intact(folder.path, result)
    if not quiet:
        print(f"{str(folder.path)!r} holds this run already, finished; --force would train it again.")
    return result


@contextmanager
def _advice_on_want(folder: RunFolder) -> Iterator[None]:
    """Say how to go on where disk or memory were too small."""
    try:
        yield
    except FileSizeError as limit:
        raise FileSizeError(f"{limit} Raise the limit (ulimit -f), {_then(folder)}") from limit
    except DiskFullError as full:
        raise DiskFullError(f"{full} Make room, {_then(folder)}") from full
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, UserError) or not lacks_memory(error):
            raise
        raise LittleMemory(
            "There is not enough memory for this training. Train anew with a smaller data.batch_size; or free some, or "
            f"raise the limit on it (ulimit -v), {_then(folder)}"
        ) from error


@contextmanager
def _advice_on_single_images() -> Iterator[None]:
    """Say so where a batch norm is given one number per channel, which has no spread."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UserError) or "more than 1 value per channel" not in str(error):
            raise
        raise InvalidValue(
            "A batch norm of the network is given a single image at a time, and cannot learn from one. Write a larger "
            "data.batch_size, or a smaller train.accumulate."
        ) from error


@contextmanager
def _advice_on_a_lost_process(folder: RunFolder, here: Team) -> Iterator[None]:
    """Say so where another process of the same training is gone, and how to go on."""
    try:
        yield
    except RuntimeError as error:
        if here.world == 1 or not lost_another(error):
            raise
        raise LostProcess(
            f"Another of the {here.world} processes is gone, or has not answered for {patience():g} s, so that this "
            f"one stopped. Start them all again, to {_then(folder).removeprefix('then ')}"
        ) from error


def _then(folder: RunFolder) -> str:
    if not folder.recipe.exists():
        return "then begin again."
    kept = "the last good checkpoint" if folder.checkpoint.exists() else "the first step"
    return f"then go on from {kept} with: {resume_command(folder.path)}"
