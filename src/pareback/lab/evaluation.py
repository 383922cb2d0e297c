"""What a run's network makes of images: how many of each class are right, and what the others are taken for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidValue, MissingFile
from ..files import expanded
from ..messages import counted, listed
from ..runs import checkpoints
from ..runs.folder import RunFolder, made_for, recipe_of, result_of, resume_command
from ..runs.results import names_of
from ..runs.trust import admit
from .data.folder import Corrupt, EvaluationFolder, normalised
from .data.normalised import as_in_training
from .data.sources import Source, holds_the_tests_place, open_source, same_images, skipped, takes_a_path
from .data.tree import tested_folder
from .models.build import rebuilt
from .models.pretrained import load_weights_, read_weights
from .models.zoo import expected
from .recipe.schema import DataRecipe, Recipe
from .train import settings
from .train.distributed import Team, team
from .train.evaluate import Judge, Part
from .train.progress import Clock
from .train.step import Forward

#: Which of a run's networks: the last epoch's, the best one's on images that were held out, or the average.
Which = Literal["last", "best", "ema"]
_FILES: dict[str, str] = {"last": "model", "best": "best", "ema": "average"}


@dataclass(frozen=True)
class ClassResult:
    """One class: how many images it has, how many of them are right, and how often it was answered."""

    name: str
    images: int
    correct: int
    answered: int

    @property
    def recall(self) -> float | None:
        """Images of the class that are right, in percent; None where there are none."""
        return 100.0 * self.correct / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """Answers of the class that are right, in percent; None where it was never answered."""
        return 100.0 * self.correct / self.answered if self.answered else None


@dataclass(frozen=True)
class Evaluation:
    """Answers to images, counted: ``confusion`` has a row per class, and in it how often each class was answered."""

    run: Path
    which: Which
    images: str
    part: Part
    same_images: bool | None
    """Whether the run was measured on the same images; None where that is not known."""
    unfinished: str
    """A sentence about a run that is not finished."""
    loss: float
    names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    skipped: tuple[str, ...] = ()
    """The names of images that were left out because they cannot be read."""

    @property
    def count(self) -> int:
        """How many images there are."""
        return sum(map(sum, self.confusion))

    @property
    def correct(self) -> int:
        """How many of them are right."""
        return sum(row[label] for label, row in enumerate(self.confusion))

    @property
    def accuracy(self) -> float:
        """Top-1, in percent."""
        return 100.0 * self.correct / self.count

    @property
    def standard_error(self) -> float:
        """By how much the accuracy may be off because these are so few images, in percent."""
        share = self.correct / self.count
        return 100.0 * float((share * (1.0 - share) / self.count) ** 0.5)

    def classes(self) -> list[ClassResult]:
        """Return each class's results, in the order of labels."""
        answered = [sum(column) for column in zip(*self.confusion, strict=True)]
        return [
            ClassResult(name, sum(row), row[label], answered[label])
            for label, (name, row) in enumerate(zip(self.names, self.confusion, strict=True))
        ]

    def mistakes(self, most: int = 5) -> list[tuple[str, str, int]]:
        """Return the most frequent ones: what it is, what it was taken for, and how often."""
        found = [
            (self.names[label], self.names[answer], count)
            for label, row in enumerate(self.confusion)
            for answer, count in enumerate(row)
            if answer != label and count
        ]
        return sorted(found, key=lambda mistake: -mistake[2])[:most]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, as JSON has it."""
        return {
            "run": str(self.run),
            "model": self.which,
            "finished": not self.unfinished,
            "images": self.images,
            "part": self.part,
            "same_images": self.same_images,
            "count": self.count,
            **({"skipped_images": list(self.skipped)} if self.skipped else {}),
            "accuracy": self.accuracy,
            "standard_error": self.standard_error,
            "loss": self.loss,
            "classes": [
                {
                    "name": one.name,
                    "images": one.images,
                    "correct": one.correct,
                    "answered": one.answered,
                    "recall": one.recall,
                    "precision": one.precision,
                }
                for one in self.classes()
            ],
            "confusion": [list(row) for row in self.confusion],
        }


def evaluate_run(
    run: Path,
    *,
    path: str | None = None,
    which: Which = "last",
    workers: int | None = None,
    device: str | None = None,
    corrupt: Corrupt | None = None,
    trust: bool = False,
) -> Evaluation:
    """Let a run's network answer to the images it was measured on, or to those at ``path``, of the same classes.

    A run that is not finished answers with the weights of its last checkpoint. Code that it names is imported under
    the conditions of :func:`pareback.runs.trust.admit`.
    """
    recipe, result, unfinished, state = _known(run, which)
    recipe = replace(
        recipe,
        data=replace(
            recipe.data,
            workers=recipe.data.workers if workers is None else workers,
            corrupt=corrupt or recipe.data.corrupt,
        ),
        train=replace(recipe.train, device=device or recipe.train.device),
    )
    admit(run, recipe.model.name, trust)
    with _alone(recipe) as here, settings.applied(recipe, here.device):
        source = _images(recipe, result, path, here.device)
        names = tuple(result.get("class_names") or source.classes)
        forward = Forward.of(recipe, here.device)
        model = _network(run, recipe, result, source, len(names))
        _fill_(model, RunFolder(run), which, state, len(names))
        net = forward.placed(model)
        judge = Judge(source, forward, here, recipe.data.batch_size, Clock())
        own = as_in_training(net, source, result)
        confusion, loss = _counted(judge.answers(own, judge.measures_on), len(names))
    noted = (result.get("origins") or {}).get("data")
    found = source.fingerprint or None
    return Evaluation(
        run=run,
        which=which,
        images=_place(recipe, path),
        part="val" if path is None and holds_the_tests_place(recipe.data) else judge.measures_on,
        same_images=None if noted is None or found is None else same_images(noted, found),
        unfinished=unfinished,
        loss=loss,
        names=names,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        skipped=skipped(source),
    )


def _place(recipe: Recipe, path: str | None) -> str:
    """Say where the images lie; of another tree, which of its folders was taken."""
    if path is None or recipe.data.kind != "folder":
        return path or recipe.data.path or recipe.data.kind
    return str(tested_folder(expanded(path)) or path)


def _known(run: Path, which: Which) -> tuple[Recipe, dict[str, Any], str, dict[str, Any] | None]:
    """Return a run's recipe and its result.

    Of one that is not finished, return what is known of the latter, a sentence that says so, and its checkpoint.
    """
    folder = RunFolder(run)
    if folder.result.exists():
        result = result_of(run)
        made_for(run)
        _check_names(run, result)
        if which != "last" and not getattr(folder, _FILES[which]).exists():
            need = {"best": "data.val_share=0.1 on a folder of images", "ema": "train.ema=0.999"}[which]
            raise InvalidValue(f"The run {str(run)!r} kept no {which} model. Train it with {need}, or drop --model.")
        return recipe_of(run), result, "", None
    if not folder.recipe.exists():
        raise MissingFile(f"{str(run)!r} holds no run. Give the folder of one.")
    if not folder.checkpoint.exists():
        raise MissingFile(
            f"The run in {str(run)!r} was interrupted before its first checkpoint, so that nothing can be evaluated "
            f"yet. Go on with: {resume_command(run)}"
        )
    if which != "last":
        raise InvalidValue(f"The run in {str(run)!r} is not finished. Drop --model, or go on: {resume_command(run)}")
    said = (
        f"The run in {str(run)!r} is not finished: these are the weights of its last checkpoint, which may not be down "
        f"to the budget yet. Go on with: {resume_command(run)}"
    )
    state = checkpoints.load(folder.checkpoint)
    known: dict[str, Any] = {name: state[name] for name in ("origins", "class_names") if name in state}
    return recipe_of(run), known, said, state


def _check_names(run: Path, result: dict[str, Any]) -> None:
    """Raise unless what a result says of classes and pixels can be used; releases before this one said nothing."""
    names, pixels = result.get("class_names"), result.get("normalisation")
    channels = result["shape"][0]
    values = [pixels.get(name) for name in ("mean", "std")] if isinstance(pixels, dict) else [None]
    whole = all(isinstance(each, list) and len(each) == channels and all(map(_is_positive, each)) for each in values)
    if (names is not None and not names_of(result)) or (pixels is not None and not whole):
        raise InvalidValue(
            f"{str(run / 'result.json')!r} is damaged: its classes or its normalisation cannot be read. Put the right "
            "one back, or train anew with --force."
        )


def _is_positive(value: Any) -> bool:
    """Whether a mean or a deviation of pixels, which are never below nought, is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < 1e6


@contextmanager
def _alone(recipe: Recipe) -> Iterator[Team]:
    with team(recipe.train.device) as here:
        if here.world > 1:
            raise InvalidValue("pareback evaluate is for one process. Start it without torchrun.")
        yield here


def _images(recipe: Recipe, result: dict[str, Any], path: str | None, device: torch.device) -> Source:
    """Open the run's own images, or those at ``path``."""
    names, expects = result.get("class_names"), expected(recipe.model)
    if path is not None and recipe.data.kind == "folder" and names:
        options = recipe.data.image_size, recipe.data.workers, recipe.data.corrupt
        found = EvaluationFolder(path, tuple(names), device, *options, **normalised(recipe.data, expects))
        return found.decoded() if recipe.data.memory else found  # which scales images in another way
    source = open_source(recipe.data if path is None else _elsewhere(recipe.data, path), device, expects)
    if names and tuple(names) != tuple(source.classes):
        odd = sorted(set(names) ^ set(source.classes))
        differ = f"only one of them has {listed(odd)}" if odd else "they are in another order"
        raise InvalidValue(f"The images and the run are not of the same classes: {differ}. Give images of the run's.")
    noted = (result.get("origins") or {}).get("data")
    if (
        path is not None
        and recipe.data.kind != "folder"
        and "normalisation" not in result
        and not (noted and same_images(noted, source.fingerprint))
    ):
        raise InvalidValue(
            "The run does not say what its images were normalised with, as those of other releases and unfinished ones "
            "do not. Evaluate it on its own images, without --data.path."
        )
    return source


def _elsewhere(data: DataRecipe, path: str) -> DataRecipe:
    """Return how to open other images of a run's kind: of a set in memory its test images, held out whatever was."""
    if not takes_a_path(data.kind):
        raise InvalidValue(
            f"--data.path has no effect with data.kind={data.kind}, whose images come with a package. Drop it."
        )
    return replace(data, path=path, val_share=data.val_share if data.kind == "folder" else 0.0)


def _network(run: Path, recipe: Recipe, result: dict[str, Any], source: Source, classes: int) -> nn.Module:
    """Return the network of a run, without its weights, if it is for images like these."""
    shape = tuple(result.get("shape") or source.shape)
    if shape != tuple(source.shape) or result.get("classes", classes) != classes:
        theirs = "×".join(map(str, shape))
        raise InvalidValue(
            f"The run {str(run)!r} is for {result.get('classes', classes)} classes and images of {theirs}, and these "
            f"are of {classes} and {'×'.join(map(str, source.shape))}. Give images like those it was trained on."
        )
    return rebuilt(recipe.model, classes, source.shape)


def _fill_(model: nn.Module, folder: RunFolder, which: Which, state: dict[str, Any] | None, classes: int) -> None:
    """Load the weights of a run that is finished, or those of its checkpoint."""
    file: Path = getattr(folder, _FILES[which]) if state is None else folder.checkpoint
    load_weights_(model, read_weights(file) if state is None else checkpoints.weights_of(state), classes, str(file))


def _counted(answers: Iterator[tuple[Tensor, Tensor]], classes: int) -> tuple[Tensor, float]:
    """Return a row per class with how often each was answered, and the mean loss."""
    counts = torch.zeros(classes * classes, dtype=torch.int64)
    loss = torch.zeros((), dtype=torch.float64)
    for logits, labels in answers:
        places = labels * classes + logits.argmax(1)
        counts += torch.bincount(places, minlength=len(counts)).cpu()
        loss += F.cross_entropy(logits, labels, reduction="sum").double().cpu()
    total = int(counts.sum())
    if not total:
        raise InvalidValue("There are no images to evaluate on. Give some with --data.path.")
    return counts.view(classes, classes), float(loss) / total


def shown(evaluation: Evaluation, most: int = 40) -> str:
    """Return the results of each class as text, of many classes those that do worst."""
    from ..report import table

    classes = sorted(evaluation.classes(), key=lambda one: (one.recall is None, one.recall or 0.0))
    rows = [[one.name, f"{one.images:,}", _percent(one.recall), _percent(one.precision)] for one in classes[:most]]
    left = [f"{len(classes) - most:,} classes that do better are left out; --json has all."] * (len(classes) > most)
    return "\n".join([table(["class", "images", "right %", "answers right %"], rows, left=1), *left])


def said(evaluation: Evaluation) -> Sequence[str]:
    """Return sentences about the whole."""
    part = {"test": "test images", "val": "held-out images"}[evaluation.part]
    part = "images" if evaluation.same_images is None else part  # others, which may be those it was trained on
    others = " They are not those that the run was measured on." if evaluation.same_images is False else ""
    lines = [
        f"{evaluation.accuracy:.2f} % of {evaluation.count:,} {part} of {evaluation.images} are right (standard error "
        f"{evaluation.standard_error:.2f}), loss {evaluation.loss:.4f}.{others}"
    ]
    if evaluation.skipped:
        lines.append(f"{counted(len(evaluation.skipped), 'image')} left out that cannot be read; --json names them.")
    mistakes = [
        f"{one} for {other} ({'once' if count == 1 else f'{count:,} times'})"
        for one, other, count in evaluation.mistakes()
    ]
    if mistakes:
        lines.append(f"Most often mistaken: {', '.join(mistakes)}.")
    return [*([evaluation.unfinished] if evaluation.unfinished else []), *lines]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
