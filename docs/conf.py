"""The documentation site: `make docs` builds it from these pages and the docstrings into build/site."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from pareback import __version__  # noqa: E402

project, author, release = "pareback", "The pareback developers", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# The pages are read in place on a code host as well: their links to results/ and the README stay as they are.
include_patterns = ["docs/**", "results/**/*.md", "results/*.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
root_doc = "docs/contents"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"pareback {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Examples on the pages are run by the tests; links to folders and data files are not pages.
suppress_warnings = ["myst.header"]
linkcheck_ignore = [r"https?://"]
