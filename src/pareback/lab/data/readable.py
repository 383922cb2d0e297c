"""Which images of a tree can be read: looked at in parallel before a training begins, and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...errors import InvalidValue, UserError
from ..optional import optional

#: Images that one thread looks at before it reports.
_BLOCK = 32
#: Fewer are looked at again each time: that takes a second or two.
_WORTH_NOTING = 1000
#: Counts the changes of what can be read, so that what was noted by other rules is not believed.
_RULES = 2


def read_image(path: str) -> Any:
    """Return an image in colours, the way up that its camera says; raise whatever Pillow does where it cannot."""
    with optional("PIL.Image").open(path) as image:
        return _in_colours(_upright(image), image.format)


def _upright(image: Any) -> Any:
    try:
        return optional("PIL.ImageOps").exif_transpose(image)
    except Exception:  # notes of a camera that are damaged; the pixels, if they are too, say so themselves
        return image


def _in_colours(image: Any, form: str | None) -> Any:
    """Return an image of three bytes per pixel; ``form`` is that of its file."""
    if image.mode.startswith("I;16") or (image.mode == "I" and form == "PNG"):  # older Pillows call 16 bits of a PNG I
        # Pillow would cut off what is above 255, which is nearly everything, and leave a white image.
        return optional("PIL.Image").fromarray((np.asarray(image) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise InvalidValue("its pixels are numbers of 32 bits: save it with 8 or 16")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # else Pillow warns
    return image.convert("RGB")


def why_unreadable(path: str) -> str:
    """Say why an image cannot be read; nothing if it can."""
    try:
        with optional("PIL.Image").open(path) as image:
            # Every byte is read, but a JPEG is decoded at an eighth of its size, several times as fast.
            image.draft("RGB", (1, 1))
            _in_colours(image, image.format)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow raise nearly anything
        return reason(error, path)
    return ""


def reason(error: Exception, path: str) -> str:
    """Return what an error says, without the path, which the sentence around it names."""
    said = getattr(error, "strerror", None) or str(error)
    said = said.replace(f" {path!r}", "").replace(str(path), "it")
    return said or type(error).__name__


def unreadable(root: Path, paths: Sequence[str], threads: int) -> dict[str, str]:
    """Return why images cannot be read, by path, for those that cannot.

    A tree that was looked at before, and has the same files of the same sizes and times, is not looked at again.
    """
    note = _note(root, paths)
    if note is not None and (known := _noted(note)) is not None:
        return {str(root / name): why for name, why in known.items()}
    found = dict(_looked_at(paths, threads))
    if note is not None:
        with suppress(OSError, UserError):
            note.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(note, {Path(path).relative_to(root).as_posix(): why for path, why in found.items()})
    return found


def _looked_at(paths: Sequence[str], threads: int) -> Iterator[tuple[str, str]]:
    """Yield those that cannot be read and why, in their order, under a bar on a terminal."""
    blocks = [paths[start : start + _BLOCK] for start in range(0, len(paths), _BLOCK)]
    # Threads will do: Pillow decodes without holding the interpreter.
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        with _Bar(len(paths)) as advance:
            for block, reasons in zip(blocks, pool.map(_reasons, blocks), strict=True):
                yield from ((path, why) for path, why in zip(block, reasons, strict=True) if why)
                advance(len(block))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nobody waits for the rest


def _reasons(block: Sequence[str]) -> list[str]:
    return [why_unreadable(path) for path in block]


class _Bar:
    """A bar on the terminal that errors go to, if there is one, and gone in the end."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            bars = optional("rich.progress")
            console = optional("rich.console").Console(stderr=True)
            self._bar = bars.Progress(*bars.Progress.get_default_columns(), console=console, transient=True)
            self._task = self._bar.add_task("looking at images", total=total)

    def __enter__(self) -> Any:
        if self._bar is None:
            return lambda count: None
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _note(root: Path, paths: Sequence[str]) -> Path | None:
    """Return the file that says what was found in just these files, or None where it is not worth one."""
    state = state_of(root, paths) if len(paths) >= _WORTH_NOTING else None
    if state is None:
        return None
    given = os.environ.get("XDG_STATE_HOME")
    return files.expanded(given or "~/.local/state") / "pareback" / "images" / f"{state}-{_RULES}.json"


def state_of(root: Path, paths: Sequence[str]) -> str | None:
    """Return what tells these files, of these sizes and times, from others; None where one of them is not there."""
    state = hashlib.blake2b(str(root.resolve()).encode(errors="surrogateescape"), digest_size=16)
    for path in paths:
        try:
            about = os.stat(path)
        except OSError:  # a link that leads nowhere
            return None
        state.update(f"{path.removeprefix(str(root))}\0{about.st_size}\0{about.st_mtime_ns}\n".encode(errors="replace"))
    return state.hexdigest()


def _noted(note: Path) -> dict[str, str] | None:
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(content, dict) and all(isinstance(why, str) for why in content.values())
    return content if whole else None
