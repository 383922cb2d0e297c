"""Whether a finished run's files are those that its result describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadFile
from ..files import digest

#: What a result describes, and names the hashes of.
DESCRIBED = ("model.safetensors", "model-ema.safetensors", "model-best.safetensors", "metrics.jsonl")


def hashes(run: Path) -> dict[str, str]:
    """Return the hash of every file in a run's folder that its result describes."""
    return {name: digest(run / name) for name in DESCRIBED if (run / name).is_file()}


def check_intact(run: Path, result: Mapping[str, Any] | None = None, names: Sequence[str] = DESCRIBED) -> None:
    """Raise unless those of a finished run's files that are named are the ones it wrote.

    A run that is not finished, or from before hashes were noted, is passed over, and so is a result that is no JSON:
    who needs that one says so.
    """
    noted = _noted(run) if result is None else result.get("files")
    for name, wanted in (noted if isinstance(noted, dict) else {}).items():
        if name not in names or name not in DESCRIBED:  # a foreign result may name any file
            continue
        file = run / name
        if not file.is_file():
            raise BadFile(f"{str(file)!r} is gone, which {str(run / 'result.json')!r} describes. {_BACK}")
        if digest(file) != wanted:
            raise BadFile(
                f"{str(file)!r} is not the file that {str(run / 'result.json')!r} describes: it is damaged, or of "
                f"another run. {_BACK}"
            )


#: What to do about it.
_BACK = "Put the right one back, or train the run anew with --force."


def check_own_file(path: Path) -> None:
    """Raise where a file is one of those that the result beside it describes, and is not what was written."""
    if path.name in DESCRIBED:
        check_intact(path.parent, names=(path.name,))


def _noted(run: Path) -> Any:
    try:
        content = json.loads((run / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("files") if isinstance(content, dict) else None
