"""Build the site: ``make docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import inventories  # noqa: E402  found in docs/extensions

import pyparallel  # noqa: E402  this checkout, found now

project = "pyparallel"
author = "the pyparallel authors"
copyright = author
version = release = pyparallel.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "rendered_pages",
    "tables",
    "linked_names",
    "public_names",
]
exclude_patterns = ["_build", "gains.md"]  # the latter is part of other pages

myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

nitpicky = True  # a name that does not exist breaks the build
nitpick_ignore = [("py:class", "nx.DiGraph")]
# The inventories lie beside this file, so that the build needs no network.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", inventories.build("torch")),
    "python": ("https://docs.python.org/3/", inventories.build("python")),
}

html_theme = "pydata_sphinx_theme"
html_title = "pyparallel"
html_show_sphinx = False
html_theme_options = {
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_static_path = ["static"]
html_css_files = ["pyparallel.css"]
