"""The fragments of a model, whose outer steps come one after the other."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...compression import BufferLayout
from ...training import FlatBuckets, plain_name, summarize
from ...training.arguments import require
from ..push_sum.layout import layouts_of


@dataclass(frozen=True)
class Span:
    """Neighboring parameters in a flat buffer: entries ``begin`` to ``end`` of one."""

    bucket: int
    begin: int
    end: int
    layout: BufferLayout

    def of(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return this part of the buffers, (n,), a view."""
        return buffers[self.bucket][self.begin : self.end]


def find_fragments(
    module: nn.Module, buckets: FlatBuckets, fragments: int | Sequence[Sequence[str]]
) -> list[list[Span]]:
    """Return the spans of each fragment.

    Args:
        fragments: a number: every so many-th layer belongs to one, as in streaming DiLoCo; a layer
            is what the first number in parameters' names counts, or a module without one. Or the
            names of each one's modules or parameters.

    Raises:
        ValueError: there are fewer layers, or a trainable parameter is in no fragment, or in two.
    """
    layouts = layouts_of(buckets, module)
    if fragments == 1:
        return [[Span(i, 0, each.numel, each) for i, each in enumerate(layouts)]]
    rule = "fragments must be 1 with shards, which cut parameters"
    require(buckets.segments, rule, summarize(fragments))
    trained = {name for each in layouts for name in each.names}
    names = [name for name, _ in module.named_parameters() if plain_name(name) in trained]
    numbers = _fragment_numbers([plain_name(name) for name in names], fragments)
    found: list[list[Span]] = [[] for _ in range(1 + max(numbers.values()))]
    for bucket, layout in enumerate(layouts):
        number = 0
        for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
            number = numbers.get(piece.name, number)  # a gap belongs to what is before it
            span = Span(bucket, offset, offset + piece.numel, BufferLayout((piece,)))
            found[number] = _join(found[number], span)
    return found


def _join(spans: list[Span], span: Span) -> list[Span]:
    """Return spans and one more, as one where it begins at the end of the last."""
    if not spans or (spans[-1].bucket, spans[-1].end) != (span.bucket, span.begin):
        return [*spans, span]
    last = spans[-1]
    layout = BufferLayout(last.layout.pieces + span.layout.pieces)
    return [*spans[:-1], Span(last.bucket, last.begin, span.end, layout)]


def _fragment_numbers(
    names: Sequence[str], fragments: int | Sequence[Sequence[str]]
) -> dict[str, int]:
    """Return the fragment of each parameter, by name."""
    if isinstance(fragments, int):
        layers = {name: _layer_of(name) for name in names}
        order = list(dict.fromkeys(layers.values()))
        rule = f"fragments must be at most the model's number of layers, {len(order)}"
        require(fragments <= len(order), rule, fragments)
        return {name: order.index(layer) % fragments for name, layer in layers.items()}
    numbers: dict[str, int] = {}
    for name in names:
        of = [
            number
            for number, parts in enumerate(fragments)
            if any(name == part or name.startswith(f"{part}.") for part in parts)
        ]
        rule = "fragments must have each trainable parameter in one fragment"
        require(len(of) == 1, rule, f"{name} in {of or 'none'}")
        numbers[name] = of[0]
    empty = sorted(set(range(len(fragments))) - set(numbers.values()))
    require(not empty, "fragments must have parameters each", f"none in fragments {empty}")
    return numbers


def _layer_of(name: str) -> str:
    """Return the layer of a parameter: up to the first number in its name, else its module."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0]
