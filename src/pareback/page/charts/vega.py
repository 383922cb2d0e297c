"""Vega-Lite through ``vl-convert-python``: its bundle for the page, pictures of a chart, and whose work it is."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from ...errors import InvalidUse

_PACKAGE = "vl-convert-python"


def _library() -> Any:
    try:
        return importlib.import_module("vl_convert")
    except ModuleNotFoundError as error:
        raise InvalidUse(f"The page needs the package {_PACKAGE!r}: pip install 'pareback[page]'.") from error


def bundle() -> str:
    """Return one script that puts ``vegaEmbed`` into the window. It makes no requests."""
    made: str = _library().javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return made


def png(chart: dict[str, Any], scale: float = 2.0) -> bytes:
    """Return the chart as a PNG picture."""
    made: bytes = _library().vegalite_to_png(json.dumps(chart), scale=scale)
    return made


def svg(chart: dict[str, Any]) -> str:
    """Return the chart as an SVG picture."""
    made: str = _library().vegalite_to_svg(json.dumps(chart))
    return made


def versions() -> str:
    """Return what draws the charts."""
    library = _library()
    return f"Vega {library.get_vega_version()} and Vega-Lite {library.get_vegalite_versions()[-1]}"


def licence() -> str:
    """Return the licences of the bundle, which the page passes on: Vega's conditions are those of vl-convert."""
    found = importlib.metadata.files(_PACKAGE) or []
    texts = [file.read_text(encoding="utf-8") for file in found if file.name == "LICENSE"]
    holders = "Vega, Vega-Lite and Vega-Embed: Copyright University of Washington Interactive Data Lab.\nvl-convert: "
    bostocks = (Path(__file__).parent.parent / "assets" / "d3-licence.txt").read_text("utf-8").strip()
    vegas = texts[0].strip() if texts else "BSD 3-Clause licence."
    return f"{holders}{vegas}\n\nD3, which is part of Vega: {bostocks}"
