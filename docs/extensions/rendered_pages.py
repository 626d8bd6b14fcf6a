"""Render pages as Jinja templates before Sphinx parses them, with numbers looked up in rows."""

from pathlib import Path

import jinja2
import jinja2.meta
import rows
from sphinx.errors import ExtensionError

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).resolve().parents[1]),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    comment_start_string="{##",  # {#name} is an anchor in Markdown
    comment_end_string="##}",
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals |= {
    "rows": rows.rows,
    "value": rows.value,
    "mean": rows.mean,
    "std": rows.std,
    "best_mean": rows.best_mean,
}


def render(text: str) -> str:
    """Return the text of a page with its numbers filled in.

    Raises:
        LookupError: a number has no row.
        jinja2.TemplateError: the page is not a valid template.
    """
    return ENVIRONMENT.from_string(text).render()


def _on_source_read(app, docname, source):
    rows.USED.clear()
    try:
        included = list(jinja2.meta.find_referenced_templates(ENVIRONMENT.parse(source[0])))
        source[0] = render(source[0])
    except (LookupError, jinja2.TemplateError) as error:
        raise ExtensionError(f"{docname}: {error}") from error
    for path in rows.USED:  # a page is rendered again once its rows have changed
        app.env.note_dependency(str(path))
    for name in included:
        app.env.note_dependency(name)


def setup(app):
    """Register with Sphinx."""
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True}
