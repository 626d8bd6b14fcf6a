"""The fragments of a model, whose outer steps come one after the other."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import BufferLayout
from ...training import FlatBuckets, plain_name, summarize
from ...training.arguments import require
from ...training.shards import local_of
from ..messages.averages import FROZEN, STILL, TRAINED
from ..push_sum.layout import is_gap, layouts_of
from .base import OuterRule, widened


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

    @cached_property
    def of_parameters(self) -> BufferLayout:
        """Return the layout without the gaps between parameters."""
        return BufferLayout(tuple(piece for piece in self.layout.pieces if not is_gap(piece.name)))

    def without_gaps(self, tensor: Tensor) -> Tensor:
        """Return a copy of the parameters' entries of such a part, one after the other."""
        return torch.cat(self._of_each(tensor))

    def with_gaps(self, entries: Tensor) -> Tensor:
        """Return the part whose parameters have these entries, with zeros in its gaps."""
        tensor = entries.new_zeros(self.end - self.begin)
        places = self._of_each(tensor)
        torch._foreach_copy_(places, list(entries.split([place.numel() for place in places])))
        return tensor

    def _of_each(self, tensor: Tensor) -> list[Tensor]:
        """Return each parameter's entries of such a part, views."""
        parts = zip(
            self.layout.pieces,
            tensor.split([each.numel for each in self.layout.pieces]),
            strict=True,
        )
        return [entries for piece, entries in parts if not is_gap(piece.name)]


class Fragment:
    """A fragment on this rank: where it is, its rule, and what is in flight of it.

    Args:
        first: the step of its first outer step.
    """

    def __init__(
        self, spans: list[Span], buckets: FlatBuckets, rule: OuterRule, first: int
    ) -> None:
        self.rule = rule
        self.tensors = [span.of(buckets.buffers) for span in spans]
        parts = [dict(buckets.find_parts(tensor)) for tensor in self.tensors]
        # Those of which this rank's shard is empty too: others have entries.
        self._owned = [
            (parameter, [(place, each[i]) for place, each in enumerate(parts) if i in each])
            for i, parameter in enumerate(buckets.parameters)
            if any(i in part for part in parts) or not local_of(parameter).numel()
        ]
        self._changes: list[int] | None = None  # of what is in flight; None: not known
        self.spans = spans
        self._first = first
        self._sent_at = 0
        self._wait: Callable[[], list[Tensor]] | None = None  # for averages that are in flight

    @property
    def weights(self) -> list[Tensor]:
        """Return this rank's weights, ``widened``; perhaps the live ones."""
        return list(map(widened, self.tensors))

    @torch.no_grad()
    def find_changes(self) -> list[int]:
        """Return what each parameter is on this rank, `STILL` to `TRAINED`."""
        return [
            TRAINED if parameter.requires_grad else STILL if self._is_slow(parts) else FROZEN
            for parameter, parts in self._owned
        ]

    def _is_slow(self, parts: Sequence[tuple[int, slice]]) -> bool:
        """Return whether weights are those after the last outer step."""
        pairs = [(self.tensors[i][part], self.rule.slow[i][part]) for i, part in parts
                 if self.rule.slow]  # fmt: skip
        return len(pairs) == len(parts) and all(
            torch.equal(slow.to(own.dtype), own) for own, slow in pairs
        )

    def _frozen(self, changes: Sequence[int]) -> list[tuple[int, slice, bool]]:
        """Return tensor and entries of each parameter that is not trained, and if it is still."""
        return [
            (i, part, change == STILL)
            for (_, parts), change in zip(self._owned, changes, strict=True)
            for i, part in parts
            if change != TRAINED
        ]

    @torch.no_grad()
    def message(self, changes: Sequence[int]) -> list[Tensor]:
        """Return what is averaged, without the rounding of 16-bit weights that are still."""
        weights = self.weights
        for i, part, is_still in self._frozen(changes):
            if is_still and weights[i] is not self.tensors[i]:
                weights[i][part] = self.rule.slow[i][part]
        return self.rule.message(weights)

    def count(self, step: int, interval: int) -> int | None:
        """Return how many outer steps come before one that begins at a step; None: none does."""
        count, rest = divmod(step - self._first, interval)
        return None if rest or count < 0 else count

    def is_due(self, step: int, delay: int) -> bool:
        """Return whether what is in flight has travelled for so many steps."""
        return self._wait is not None and step - self._sent_at >= delay

    def hold(
        self,
        step: int,
        wait: Callable[[], list[Tensor]] | None,
        changes: list[int] | None = None,
    ) -> None:
        """Keep what waits for the averages of what was sent at a step, and what has changed."""
        self._sent_at, self._wait, self._changes = step, wait, changes

    def without_gaps(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters' entries of tensors of the spans."""
        return [span.without_gaps(each) for span, each in zip(self.spans, tensors, strict=True)]

    def with_gaps(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the spans, with zeros in their gaps."""
        return [span.with_gaps(each) for span, each in zip(self.spans, tensors, strict=True)]

    @torch.no_grad()
    def take_outer_step(self, mix: float) -> None:
        """Wait for the averages, and go on from the outer step and a share of the own weights."""
        assert self._wait is not None
        averages, self._wait = self._wait(), None
        changes = self.find_changes() if self._changes is None else self._changes
        frozen = self._frozen(changes)
        stepped = self.rule.take(averages, frozen)
        for each, new in zip(self.tensors, stepped, strict=True):
            each.copy_(torch.lerp(new, widened(each), mix) if mix else new)
        for i, part, _ in frozen if mix else ():  # nothing was learned of them meanwhile
            self.tensors[i][part].copy_(stepped[i][part])

    def in_flight(self) -> dict[str, Any] | None:
        """Wait for what is in flight, and return it; the outer step still comes when it is due."""
        if self._wait is None:
            return None
        averages = self._wait()
        self._wait = lambda: averages
        return {"sent_at": self._sent_at, "averages": averages}

    def load_in_flight(self, saved: dict[str, Any] | None) -> None:
        """Restore what ``in_flight`` returned, when a thread no longer writes the compressor's."""
        if self._wait is not None:
            with suppress(Exception):  # nobody reads these averages
                self._wait()
        device = self.tensors[0].device  # saved ones are the CPU's
        averages = [each.to(device, copy=True) for each in saved["averages"]] if saved else []
        self.hold(saved["sent_at"] if saved else 0, (lambda: averages) if saved else None)


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
