"""Algorithms from text, written as they are constructed in Python; no text is run as code."""

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from .. import compression, gossip
from ..compression import Compressor
from ..gossip import topology
from ..gossip.algorithms.base import Algorithm
from ..gossip.topology import Topology


def parse_algorithm(text: str, num_ranks: int) -> Algorithm:
    """Return the algorithm of ``SGP(OnePeerExponential(), overlap=1)`` or the like.

    Topologies are for ``num_ranks``, or the nodes of ``Hierarchical``, unless they are given a
    number. Known are the algorithms and topologies of ``pyparallel.gossip`` and the compressors of
    ``pyparallel.compression``.

    Raises:
        ValueError: the text is something else, or a constructor refuses it.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{_RULE}, got {text!r}: {error.msg}") from error
    try:
        found = _Reader(num_ranks).value(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm {text}: {error}") from error
    if isinstance(found, type) and issubclass(found, Algorithm):
        raise ValueError(f"{_RULE}, got the class {text}; write {text}(...)")
    if not isinstance(found, Algorithm):
        raise ValueError(f"{_RULE}, got {text!r}")
    return found


_RULE = "algorithm must be such as SGP(OnePeerExponential(), overlap=1)"


def _find_names() -> dict[str, type]:
    """Return the classes that may be constructed, by name."""
    found = {}
    for module, kind in (gossip, Algorithm), (topology, Topology), (compression, Compressor):
        for name in module.__all__:
            each = getattr(module, name)
            if inspect.isclass(each) and issubclass(each, kind) and not inspect.isabstract(each):
                found[name] = each
    return found


class _Reader:
    """Values of a parsed text; topologies are for ``num_ranks``."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._names = num_ranks, _find_names()

    def value(self, node: ast.expr, *, is_class: bool = False) -> Any:
        """Return the value of an expression."""
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found = [self.value(each) for each in elements]
                return tuple(found) if isinstance(node, ast.Tuple) else found
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = zip(filter(None, keys), values, strict=True)
                return {self.value(key): self.value(value) for key, value in pairs}
            case ast.Name(id=name):
                kind = self._find(name)
                return kind if is_class or not issubclass(kind, Topology) else self._make(kind)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                return self._call(self._find(name), args, keywords)
        try:
            return ast.literal_eval(node)  # numbers and texts
        except ValueError:
            rule = "must be a number, a text, or a constructor's call"
            raise ValueError(f"{ast.unparse(node)} {rule}") from None

    def _find(self, name: str) -> type:
        if name not in self._names:
            near = difflib.get_close_matches(name, self._names, 1)
            fix = f"; did you mean {near[0]}?" if near else ""
            where = "an algorithm, a topology or a compressor"
            raise ValueError(f"{name} must be the name of {where}{fix}")
        return self._names[name]

    def _call(self, kind: type, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        reader = self
        if kind is gossip.Hierarchical:
            given = [*args[1:2], *(each.value for each in keywords if each.arg == "ranks_per_node")]
            per_node = self.value(given[0]) if given else 1
            if isinstance(per_node, int) and per_node > 0:
                reader = _Reader(self._num_ranks // per_node)
        positional = [reader.value(each) for each in args]
        options = {}
        for each in keywords:
            if each.arg is None:
                raise ValueError("** must not be used")
            options[each.arg] = reader.value(each.value, is_class=each.arg == "between")
        return self._make(kind, *positional, **options)

    def _make(self, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        takes_ranks = next(iter(inspect.signature(kind).parameters), "") == "num_ranks"
        if takes_ranks and not args and "num_ranks" not in options:
            args = (self._num_ranks,)
        return kind(*args, **options)
