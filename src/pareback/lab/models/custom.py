"""Networks of a user's own, by the name of the function that builds them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import InvalidType, InvalidUse, InvalidValue


def is_builder(name: str) -> bool:
    """Whether a model's name is that of a function.

    >>> is_builder("my.nets:build"), is_builder("wrn")
    (True, False)
    """
    return ":" in name


def built(name: str, classes: int, shape: tuple[int, int, int], share: float = 1.0) -> nn.Module:
    """Call ``package.module:function`` with the classes and the image's shape, and with ``share`` if it is below 1.

    The module is looked for in the current folder first, as ``python -m`` does.
    """
    function = _function(name)
    options: dict[str, Any] = {} if share == 1.0 else {"share": share}
    _check_takes(function, name, (classes, shape), options)
    try:
        model = function(classes, shape, **options)
    except Exception as error:  # whatever a stranger's function raises
        raise InvalidValue(f"{name} failed{_where(error, function)}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidType(f"{name} returned {type(model).__name__}, not a torch.nn.Module.")
    return model


def home_of(name: str) -> Path | None:
    """Return the folder in which a builder's module was found, or None where it is installed or not a file.

    Of one that is not imported yet, return the current folder if that is where it will be found.

    >>> home_of("json.decoder:JSONDecoder") is None
    True
    """
    module_name = name.partition(":")[0]
    if module_name not in sys.modules:
        return Path.cwd() if _holds(Path.cwd(), module_name) else None
    file = getattr(sys.modules[module_name], "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    levels = module_name.count(".") + (path.name == "__init__.py")
    folder = path.parents[levels]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if folder in installed else folder


def import_from(name: str, folder: Path) -> bool:
    """Import a builder's module from the folder where it was found before; whether it is still there."""
    module_name = name.partition(":")[0]
    if not _holds(folder, module_name):
        return False
    if module_name not in sys.modules:
        if sys.path[:1] != [str(folder)]:
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        _module(module_name, name, here=False)
    home = home_of(name)
    if home != folder.resolve():
        raise InvalidUse(
            f"model.name={name!r}: the module in {str(folder)!r} is meant, and the one in {str(home)!r} is imported "
            "already. Give one of them another name."
        )
    return True


def _holds(folder: Path, module_name: str) -> bool:
    path = folder.joinpath(*module_name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _where(error: Exception, function: Callable[..., Any]) -> str:
    """Return the last line of the function's own file that an error came through, or else where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one called the function
    own = [frame for frame in frames if frame.filename == getattr(inspect.getmodule(function), "__file__", None)]
    return "".join(f" at line {frame.lineno} of {frame.filename}" for frame in (own or frames)[-1:])


def _function(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    words = [*module_name.split("."), function_name]
    if not all(word.isidentifier() for word in words):
        raise InvalidValue(f"model.name={name!r} names no function. Write package.module:function.")
    function = getattr(_module(module_name, name), function_name, None)
    if not callable(function):
        raise InvalidValue(f"model.name={name!r}: module {module_name!r} has no function {function_name!r}.")
    return function  # type: ignore[no-any-return]


def _module(module_name: str, name: str, here: bool = True) -> Any:
    if here and module_name not in sys.modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise InvalidValue(f"model.name={name!r}: {module_name} needs the package {missing!r}.") from error
        raise InvalidValue(
            f"model.name={name!r}: there is no module {missing!r}, neither in the current folder nor installed."
        ) from error
    except Exception as error:  # whatever a stranger's module raises
        raise InvalidValue(
            f"model.name={name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _check_takes(function: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions written in C do not tell
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        why = "it takes no share, so that it cannot be thinned" if options else str(error)
        raise InvalidValue(f"{name} cannot be called: {why}. Write build(classes, shape, share=1.0).") from error
