"""Whose code a run names. A run is data; the module of its network is imported if this user trained it, or says so.

A run whose network is ``package.module:function`` notes in its code.json in which folder the module was, under a seal
that only this user can make. Whoever forges a run, or changes the name in one, has no seal for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InvalidValue
from ..lab.models.custom import home_of, import_from, is_builder

#: The file of a run that says where its module was.
NAME = "code.json"


class UntrustedCode(InvalidValue):
    """A run that names code of which nobody has said that it may be imported."""


def remember(run: Path, model: str) -> None:
    """Note where the module of a run's network was found, or will be."""
    if not is_builder(model):
        return
    home = home_of(model)
    noted = {"model": model, "folder": None if home is None else str(home)}
    files.write_json(run / NAME, {**noted, "seal": _seal(noted, make=True)}, alone=True)


def admit(run: Path, model: str, trust: bool = False, known: str = "") -> None:
    """Import the module of a run's network from where it was, or say that it is not known whose it is.

    ``trust`` is the user's explicit word. ``known`` is a network that the user's own recipe names, and trusts thereby.
    """
    if not is_builder(model):
        return
    noted = _noted(run)
    own = noted.get("model") == model and _is_sealed(noted)
    if own and (noted["folder"] is None or import_from(model, Path(noted["folder"]))):
        return
    if own and not trust and model != known:  # a module of that name elsewhere may be anybody's
        raise UntrustedCode(
            f"The module of {model} is no longer in {noted['folder']!r}, where the run {str(run)!r} had it. Put it "
            "back, or go to the folder that holds it and write --trust."
        )
    if not trust and model != known:
        raise UntrustedCode(
            f"The run {str(run)!r} names code, {model}, and is not known to be yours. If you have read that code and "
            "trust it, go to the folder that holds it and write --trust."
        )


def recall(run: Path, model: str) -> None:
    """Import the module of a network that the user's own recipe names: from where the run had it, if that is known."""
    admit(run, model, known=model)


def _noted(run: Path) -> dict[str, Any]:
    try:
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_sealed(noted: dict[str, Any]) -> bool:
    seal, folder = _seal(noted), noted.get("folder")
    whole = isinstance(noted.get("seal"), str) and (folder is None or isinstance(folder, str))
    return seal is not None and whole and hmac.compare_digest(seal.encode(), str(noted["seal"]).encode())


def _seal(noted: dict[str, Any], make: bool = False) -> str | None:
    key = _key(make)
    said = json.dumps([noted.get("model"), noted.get("folder")]).encode()
    return None if key is None else hmac.new(key, said, hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    """Return this user's key, made at the first use; None where there is none and none can be kept."""
    given = os.environ.get("XDG_STATE_HOME")
    file = files.expanded(given or "~/.local/state") / "pareback" / "key"
    if make and not file.exists():
        with suppress(OSError):
            _make_key(file)
    try:
        key = file.read_bytes()
    except OSError:
        return None
    return key if len(key) == 64 else None


def _make_key(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = file.with_name(f".key-{secrets.token_hex(8)}")
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as written:
            written.write(secrets.token_hex(32))
        os.link(mine, file)  # whole or not at all; another process's, if it was first, stays
    finally:
        mine.unlink()
