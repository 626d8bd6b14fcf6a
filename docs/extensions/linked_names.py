"""Link names in code style: `SGP(topology)` leads to the reference, `torch.nn.Linear` to torch.

What is in code style must exist: see checked_names. Types in signatures are linked by their public
name, and stay plain text where they have none.
"""

import re

import checked_names
from docutils import nodes
from inventories import exists, names
from public_names import targets
from sphinx import addnodes
from sphinx.ext import intersphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
TORCH = {name.rpartition(".")[2]: name for name in names("torch")}
OPS = {"quantize", "dequantize"}  # other names of one lower-case word may mean anything
NAME = re.compile(r"([A-Za-z_][\w.]*\w|\w+)(\(.*\))?", re.DOTALL)


def _link_names(app, doctree):
    known = targets()
    blocks = doctree.findall(nodes.literal_block)
    python = [each.astext() for each in blocks if each.get("language") == "python"]
    defined = set().union(*map(checked_names.defined_in, python))
    for literal in list(doctree.findall(nodes.literal)):
        if message := checked_names.fault(literal.astext(), defined):
            LOGGER.warning("%s", message, location=literal)
            continue
        match = NAME.fullmatch(literal.astext())
        if match is None or isinstance(literal.parent, (nodes.reference, addnodes.pending_xref)):
            continue
        name = match[1]
        head, _, rest = name.partition(".")
        if head in ("pyparallel", "torch"):
            target = name
        elif head in known and (head[0].isupper() or "_" in head or head in OPS):
            target = known[head] + (f".{rest}" if rest else "")
        else:
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, in_code=True
        )
        link["refdoc"] = app.env.docname
        link["optional"] = True
        literal.replace_self(link)
        link += literal


def _resolve_by_public_name(app, env, node, contnode):
    """Resolve the defining module's name, such as that of a type in a signature."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    _head, _, last = target.rpartition(".")
    public = targets().get(last)
    if target.startswith("pyparallel") and public and public != target:
        domain = env.domains["py"]
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    if target.startswith("torch") and last in TORCH and TORCH[last] != target:
        node["reftarget"] = TORCH[last]
        return intersphinx.missing_reference(app, env, node, contnode)
    if node.get("optional") or exists(target):
        return contnode  # a type without a page of its own
    return None


def setup(app):
    """Register with Sphinx."""
    app.connect("doctree-read", _link_names)
    app.connect("missing-reference", _resolve_by_public_name, priority=900)
    return {"parallel_read_safe": True}
