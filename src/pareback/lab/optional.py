"""Packages that only some experiments need, imported when they do."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import InvalidUse


def optional(name: str) -> Any:
    """Return a module of the extra ``lab``, or say how to install it.

    >>> optional("json").dumps([1])
    '[1]'
    >>> optional("not_there.inside")
    Traceback (most recent call last):
        ...
    pareback.errors.InvalidUse: This needs the package 'not_there': pip install 'pareback[lab]'.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).split(".")[0]
        raise InvalidUse(f"This needs the package {missing!r}: pip install 'pareback[lab]'.") from error
