"""How Sphinx builds docs/ as a site: `make docs` writes docs/_build/html, with warnings as errors.

Pages are Markdown that GitHub shows as well. What they need beside MyST is in docs/site: links that
leave docs/, and docstrings, which are plain text with `names` in backticks and indented code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

project = "dtensor"
copyright = "the authors of dtensor"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dtensor"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["site_parts/static"]
html_css_files = ["wide.css"]
templates_path: list[str] = []

# As on GitHub, a heading is linked to by its words: traces.md#calibrate.
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
# An example's output is not Python, and is not guessed to be.
highlight_language = "none"


def setup(app: Sphinx) -> None:
    from site_parts import docstrings, links

    docstrings.setup(app)
    links.setup(app)
