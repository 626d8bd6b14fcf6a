"""Different compressors for different parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives, int64_on
from ...training.arguments import check_type, require, summarize
from ..compressor import AttachPoint, Compressor, Message, all_but
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout, Entries
from ..residual import Residual
from ..state import CompressorState
from .composed import Composed

Pairs = tuple[tuple[str, Compressor], ...]


@dataclass(frozen=True, repr=False)
class PerParameter(Composed):
    """Compressors by parameter name, matched like file names in a shell.

    In ``PerParameter({"*.bias": Cast(), "*": ErrorFeedback(TopK(0.01))})`` the first pattern that
    matches a name applies. In each buffer, the parameters of one pattern are compressed together,
    copied into one buffer if they are not contiguous.

    Args:
        compressors: by pattern of `fnmatch` (case-sensitive); kept as a tuple of pairs.
    """

    refusals = dict.fromkeys(
        all_but(AttachPoint.DDP, AttachPoint.GOSSIP, AttachPoint.OUTER_STEPS),
        "compressor must not depend on parameter names for {place}, where buffers have none, got "
        "{self}; use one compressor for all",
    )
    compressors: Pairs

    def __init__(self, compressors: Mapping[str, Compressor]) -> None:
        rule = 'compressors by pattern such as {"*": Int8()}'
        check_type("compressors", compressors, Mapping, rule)
        require(compressors, "compressors must not be empty", "{}", 'use {"*": compressor}')
        for pattern, compressor in compressors.items():
            if not isinstance(compressor, Compressor):
                raise ValueError(
                    "compressors must map patterns to compressors, got "
                    f"{summarize(compressor)} for {pattern!r}; use Cast() for 16 bits an entry"
                )
        object.__setattr__(self, "compressors", tuple(compressors.items()))

    def __repr__(self) -> str:
        return f"PerParameter({dict(self.compressors)!r})"

    @property
    @override
    def parts(self) -> tuple[Compressor, ...]:
        return tuple(each for _, each in self.compressors)

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """Return a state for each pattern, also for those that match nothing in this buffer."""
        groups = self._groups(layout)
        inner = [
            compressor.init(group.layout, device, rank)
            for (_, compressor), group in zip(self.compressors, groups, strict=True)
        ]
        return CompressorState(layout, rank, inner=inner)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return the number of tensors of each pattern, (patterns,) int64, then their tensors."""
        state.layout.check(x)
        messages = []
        for compressor, group, inner in self._parts(state):
            with group.open_if_any(residual) as lost:
                messages.append(compressor.compress(group.read(x), inner, lost))
        lengths = int64_on(x.device, [len(message) for message in messages])
        return (lengths, *(tensor for each in messages for tensor in each))

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message; on GPUs the host waits for its first tensor."""
        parts = zip(self.compressors, self._groups(layout), self._split(message), strict=True)
        decoded: list[tuple[Entries, Tensor]] = []  # decode all before writing any
        for (_, compressor), group, part in parts:
            if group.is_whole(layout):
                compressor.decompress(part, layout, out, accumulate=accumulate)
            else:
                values = torch.empty(group.layout.numel, dtype=torch.float32, device=out.device)
                decoded.append((group, compressor.decompress(part, group.layout, values)))
        for group, values in decoded:
            group.write(out, values.add_(group.read(out)) if accumulate else values)
        return out

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        state.layout.check(x)
        for compressor, group, inner in self._parts(state):
            # A pattern without parameters counts the step: another layout may have some.
            used = collectives if group.runs else _SkipEmpty(collectives)
            with group.open(x) as part, group.open_if_any(residual) as lost:
                compressor.mean_(part, inner, used, lost)

    def _parts(
        self, state: CompressorState
    ) -> Iterator[tuple[Compressor, Entries, CompressorState]]:
        groups = self._groups(state.layout)
        for (_, compressor), group, inner in zip(
            self.compressors, groups, state.inner, strict=True
        ):
            yield compressor, group, inner

    @cached_property
    def _group_cache(self) -> dict[BufferLayout, list[Entries]]:
        """Groups by layout: names are matched once."""
        return {}

    def _groups(self, layout: BufferLayout) -> list[Entries]:
        if layout not in self._group_cache:
            self._group_cache[layout] = self._match(layout)
        return self._group_cache[layout]

    def _match(self, layout: BufferLayout) -> list[Entries]:
        chosen = [self._index(name) for name in layout.names]
        found = []
        for mine in range(len(self.compressors)):
            places = [place for place, index in enumerate(chosen) if index == mine]
            offsets = [layout.offsets[place] for place in places]
            found.append(Entries.of([layout.pieces[place] for place in places], offsets))
        return found

    def _index(self, name: str) -> int:
        for index, (pattern, _) in enumerate(self.compressors):
            if fnmatchcase(name, pattern):
                return index
        patterns = ", ".join(repr(pattern) for pattern, _ in self.compressors)
        raise ValueError(
            f"compressors must have a pattern for every parameter, got none for {name!r} in "
            f'{patterns}; add "*" as the last pattern'
        )

    def _split(self, message: Message) -> list[Message]:
        with refusing_corrupt():
            lengths, *tensors = message
        if lengths.shape != (len(self.compressors),) or lengths.dtype != torch.int64:
            raise CorruptMessageError(
                f"lengths must be {len(self.compressors)} int64, got {summarize(lengths)}"
            )
        counts = lengths.tolist()
        if min(counts) < 0 or sum(counts) != len(tensors):
            raise CorruptMessageError(f"lengths must sum to {len(tensors)} tensors, got {counts}")
        rest = iter(tensors)
        return [tuple(next(rest) for _ in range(count)) for count in counts]


class _SkipEmpty(Collectives):
    """Collectives that skip a call without entries."""

    def __init__(self, collectives: Collectives) -> None:
        vars(self).update(vars(collectives))

    @override
    def all_to_all(
        self, tensor: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]
    ) -> Tensor:
        if not any(sizes_out) and not any(sizes_in):
            return tensor
        return super().all_to_all(tensor, sizes_out, sizes_in)

    @override
    def all_gather_uneven(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        if not any(tensor.numel() for tensor in tensors):
            return [tuple(tensors)] * self.size
        return super().all_gather_uneven(tensors)
