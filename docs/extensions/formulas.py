"""Formulas as pictures that matplotlib draws when the site is built: a reader needs no network.

Sphinx's own renderer loads MathJax from a server. The pictures have the formula's TeX as their
text, and are sized in ``em``, so that they follow the text around them.
"""

import base64
import html
import io
from functools import cache

import matplotlib as mpl
from docutils import nodes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser

FONT = FontProperties(size=12, math_fontfamily="stix")
EM = 10.0  # points of the formula in an em of the text around it, whose letters are wider
MARGIN = 1.0  # points, of glyphs that reach beyond their box


@cache
def draw(tex: str) -> str:
    """Return an ``<img>`` of a formula, whose baseline is that of the text.

    Raises:
        ValueError: matplotlib does not know a symbol.
    """
    text = f"${' '.join(tex.split())}$"
    width, height, depth, _, _ = MathTextParser("path").parse(text, dpi=72, prop=FONT)
    width, height, depth = width + 2 * MARGIN, height + 2 * MARGIN, depth + MARGIN
    figure = Figure(figsize=(width / 72, height / 72))
    figure.text(MARGIN / width, depth / height, text, fontproperties=FONT)
    picture = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": tex}):  # the same bytes in each build
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    data = base64.b64encode(picture.getvalue()).decode()
    style = f"height: {height / EM:.2f}em; vertical-align: {-depth / EM:.2f}em"
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img class="formula" style="{style}" alt="{html.escape(tex)}" src="{source}">'


def _visit_inline(self, node):
    self.body.append(draw(node.astext()))
    raise nodes.SkipNode


def _visit_block(self, node):
    self.body.append(f'<div class="formula">{draw(node.astext())}</div>')
    raise nodes.SkipNode


def setup(app):
    """Register with Sphinx, as ``html_math_renderer = "formulas"``."""
    app.add_html_math_renderer("formulas", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True}
