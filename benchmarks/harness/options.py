"""The options column of rows, without arguments that are the default anyway."""

import ast
import inspect

from pyparallel import compression, gossip, pipeline, subnets
from pyparallel.gossip import topology

PACKAGES = (gossip, topology, pipeline, subnets, compression)


def shorten(options: str) -> str:
    """Return ``SGP(Ring(4))`` for ``SGP(topology=Ring(4), overlap=0)``; other text as it is."""
    try:
        tree = ast.parse(options, mode="eval")
    except SyntaxError:
        return options
    return ast.unparse(_Shorten().visit(tree)).replace("'", '"')


class _Shorten(ast.NodeTransformer):
    """Removes arguments that equal the default; the first argument loses its name."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        found = next((getattr(each, name) for each in PACKAGES if name in each.__all__), None)
        if found is None:
            return node
        parameters = inspect.signature(found).parameters
        defaults = {key: shorten(repr(each.default)) for key, each in parameters.items()}
        left = [
            each
            for each in node.keywords
            if ast.unparse(each.value).replace("'", '"') != defaults.get(each.arg)
        ]
        if left and not node.args and left[0].arg == next(iter(parameters)):
            node.args = [left.pop(0).value]
        node.keywords = left
        return node
