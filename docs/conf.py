"""How Sphinx builds these pages: strictly, offline, from the docstrings, the checks' code and the stored notebooks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]
os.environ.setdefault("MPLBACKEND", "Agg")

import api_pages  # noqa: E402
import check_pages  # noqa: E402
import for_site  # noqa: E402
import notebook_parts  # noqa: E402
import retina  # noqa: E402
import tested_pages  # noqa: E402

import pyrobnn  # noqa: E402

project = "pyrobnn"
author = "The pyrobnn authors"
project_copyright = author
release = pyrobnn.__version__
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "myst_nb",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "paper.md"]  # the paper is for a journal, in its form
suppress_warnings = [
    "mystnb.unknown_mime_type"
]  # widgets' states beside the text that a page shows
templates_path: list[str] = []

# pages that are written at every build; none is under version control
for folder in ("api", "checks", "claims", "tutorials"):
    shutil.rmtree(HERE / folder, ignore_errors=True)
api_pages.write(HERE / "api")
check_pages.write(HERE / "checks")
(HERE / "api" / "tested.txt").write_text(tested_pages.table(), encoding="utf-8")
shutil.copytree(
    ROOT / "notebooks", HERE / "tutorials", ignore=shutil.ignore_patterns(".*", "gallery")
)
for stem in ("09_science", "10_learning"):  # stories show some of their cells
    notebook_parts.write(ROOT / "notebooks" / f"{stem}.ipynb", HERE / "tutorials" / "parts")
claims = HERE / "claims"
claims.mkdir()
for claim in (ROOT / "scripts").glob("*/claim.md"):
    shutil.copy(claim, claims / f"{claim.parent.name}.md")
measured = (ROOT / "scripts/results/README.md").read_text(encoding="utf-8")
(claims / "measured.txt").write_text(
    re.sub(r"\.\./(\w+)/claim\.md", r"claims/\1.md", measured), encoding="utf-8"
)

html_scaled_image_link = False  # a picture of twice the resolution is no link to itself
nb_execution_mode = "off"  # the outputs are those that are stored
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_inline", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https", "mailto")

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # what stands before a colon under "Returns" is a shape or a condition
napoleon_custom_sections = ["Caveat", "Papers"]
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(?!pyrobnn\b).*",
    ),  # what others document is on the network, and a build needs none
    (r"py:class", r".*\.[A-Z]"),  # type variables
    # of internal modules, which have no page: types in signatures, and what docstrings point to
    (r"py:.*", r"pyrobnn(\.\w+){3,}"),
    (r"py:mod", r"pyrobnn(\.\w+){2,}"),
]

html_theme = "furo"
html_title = "pyrobnn"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f8b", "color-brand-content": "#1f5f8b"},
    "dark_css_variables": {"color-brand-primary": "#7fb7e0", "color-brand-content": "#7fb7e0"},
}
linkcheck_timeout = 20
linkcheck_workers = 4


def setup(app: Any) -> None:
    """Property docstrings begin with a comment: of their first line napoleon takes what precedes a colon for a type."""

    def begin(
        app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        lines[:0] = ["..", ""] if what == "property" else []

    app.connect("autodoc-process-docstring", begin, priority=400)
    app.connect("source-read", for_site.replace)
    app.connect("doctree-resolved", retina.halve)
