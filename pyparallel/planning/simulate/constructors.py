"""Algorithms and schedules from text, written as in Python; no text is run as code."""

import ast
import difflib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import compression, gossip
from ...compression import Compressor
from ...gossip import topology
from ...gossip.topology import Topology
from ...pipeline import prediction, schedules
from ...pipeline.prediction import Prediction
from ...pipeline.schedules import Schedule
from ...training import Algorithm


def parse_algorithm(text: str, num_ranks: int) -> Algorithm:
    """Return the algorithm of ``SGP(overlap=1)`` or the like.

    Topologies are for ``num_ranks``, or the nodes of ``Hierarchical``, unless they are given a
    number. Known are the algorithms and topologies of ``pyparallel.gossip`` and the compressors of
    ``pyparallel.compression``.

    Raises:
        ValueError: the text is something else, or a constructor refuses it.
    """
    names = _find_names((gossip, Algorithm), (topology, Topology), (compression, Compressor))
    reader = _Reader(num_ranks, names, "an algorithm, a topology or a compressor")
    example = "SGP(overlap=1)"
    found: Algorithm = reader.parse(text, "algorithm", Algorithm, example)
    return found


def parse_schedule(text: str) -> Schedule:
    """Return the schedule of ``PipeOptim(synchronous_updates=100)`` or the like, or a ValueError.

    Known are the schedules and predictions of ``pyparallel.pipeline``.
    """
    names = _find_names((schedules, Schedule), (prediction, Prediction))
    reader = _Reader(1, names, "a schedule or a prediction")
    found: Schedule = reader.parse(text, "schedule", Schedule, "PipeOptim()")
    return found


def _find_names(*kinds: tuple[ModuleType, type]) -> dict[str, type]:
    """Return the classes that may be constructed, by name."""
    found = {}
    for module, kind in kinds:
        for name in module.__all__:
            each = getattr(module, name)
            bases = each.__mro__[1:] if inspect.isclass(each) else ()
            if kind in bases and not inspect.isabstract(each):  # of a protocol, too
                found[name] = each
    return found


class _Reader:
    """Values of a text; topologies are for ``num_ranks``, and ``kinds`` says what ``names`` are."""

    def __init__(self, num_ranks: int, names: dict[str, type], kinds: str) -> None:
        self._num_ranks, self._names, self._kinds = num_ranks, names, kinds

    def parse(self, text: str, name: str, kind: type, example: str) -> Any:
        """Return the object of a kind that a text constructs; ``example`` is another text."""
        rule = f"{name} must be such as {example}"
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{rule}, got {text!r}: {error.msg}") from error
        try:
            found = self.value(tree)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} {text}: {error}") from error
        if isinstance(found, type) and issubclass(found, kind):
            raise ValueError(f"{rule}, got the class {text}; write {text}(...)")
        if not isinstance(found, kind):
            raise ValueError(f"{rule}, got {text!r}")
        return found

    def value(self, node: ast.expr, *, is_class: bool = False) -> Any:
        """Return the value of an expression."""
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found = [self.value(element) for element in elements]
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
            raise ValueError(f"{name} must be the name of {self._kinds}{fix}")
        return self._names[name]

    def _call(self, kind: type, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        reader = self
        if kind is gossip.Hierarchical:
            given = [*args[1:2], *(each.value for each in keywords if each.arg == "ranks_per_node")]
            per_node = self.value(given[0]) if given else 1
            if isinstance(per_node, int) and per_node > 0:
                reader = _Reader(self._num_ranks // per_node, self._names, self._kinds)
        positional = [reader.value(arg) for arg in args]
        options = {}
        for keyword in keywords:
            if keyword.arg is None:
                raise ValueError("** must not be used")
            options[keyword.arg] = reader.value(keyword.value, is_class=keyword.arg == "between")
        return self._make(kind, *positional, **options)

    def _make(self, kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        takes_ranks = next(iter(inspect.signature(kind).parameters), "") == "num_ranks"
        if takes_ranks and not args and "num_ranks" not in options:
            args = (self._num_ranks,)
        return kind(*args, **options)
