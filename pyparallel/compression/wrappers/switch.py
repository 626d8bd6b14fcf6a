"""Another compressor from some step on: warm-up, inside one registered hook."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, check_buffer
from ..layout import BufferLayout
from ..residual import RESIDUAL
from ..sparsifiers.base import check_numbers
from ..state import CompressorState
from ..validation import CorruptMessageError, refusing_corrupt

Pairs = tuple[tuple[int, Compressor], ...]


@dataclass(frozen=True, repr=False)
class Switch(Compressor):
    """Compressors one after another, such as ``Switch({0: Cast(), 9: ErrorFeedback(TopK(0.1))})``.

    Step k, counted from 0 in messages of a buffer, is of the compressor with the largest key that
    is not above k. What the one before still owes, where it feeds back errors, is added to the
    first buffer of the next: nothing is lost, and nothing else is taken over. Only one of them has
    memory at a time.

    Args:
        compressors: by their first steps, one of which is 0; kept as a tuple of pairs, ascending.
    """

    compressors: Pairs

    def __init__(self, compressors: Mapping[int, Compressor]) -> None:
        for step, compressor in compressors.items():
            if not isinstance(step, int) or step < 0 or not isinstance(compressor, Compressor):
                raise ValueError(
                    "compressors must be compressors by the number of their first step, got "
                    f"{compressor!r} for {step!r}"
                )
        if 0 not in compressors:
            raise ValueError(
                f"compressors must have one for step 0, got steps {sorted(compressors)}; Cast() "
                "is a mild one to begin with"
            )
        object.__setattr__(self, "compressors", tuple(sorted(compressors.items(), key=_first_step)))

    def __repr__(self) -> str:
        """What makes it again."""
        return f"Switch({dict(self.compressors)!r})"

    @property
    def unbiased(self) -> bool:
        """Where all are."""
        return all(each.unbiased for _, each in self.compressors)

    @property
    def fixed_length(self) -> bool:
        """No, unless there is but one, of which it holds."""
        return len(self.compressors) == 1 and self.compressors[0][1].fixed_length

    @property
    def feeds_back(self) -> bool:
        """Where any does."""
        return any(each.feeds_back for _, each in self.compressors)

    @property
    def takes_residual(self) -> bool:
        """Where all do."""
        return all(each.takes_residual for _, each in self.compressors)

    def validation_error(self, place: AttachPoint) -> str | None:
        """It serves gradients, where steps are of training and lengths may vary."""
        if place not in (AttachPoint.DDP, AttachPoint.FSDP_GRADIENTS):
            return (
                f"compressor must be the same at all steps where it serves {place.value}, got "
                f"{self}"
            )
        problems = (each.validation_error(place) for _, each in self.compressors)
        return next((problem for problem in problems if problem), None)

    def contraction(self, layout: BufferLayout) -> float | None:
        """The least of all."""
        found = [each.contraction(layout) for _, each in self.compressors]
        known = [each for each in found if each is not None]
        return min(known) if len(known) == len(found) else None

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With the memory of the first."""
        state = _SwitchState(layout, rank)
        state.on_load = partial(self._activate_last, device=device)
        state.on_load(state)
        return state

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: ((1,) int64, which of them it is, *its message)."""
        with self._active_compressor(x, state) as (index, total):
            message = self.compressors[index][1].compress(total, state.inner[index], residual)
        which = torch.full((1,), index, dtype=torch.int64, device=x.device)
        return (which, *message)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`; on GPUs the host waits for the message's first tensor."""
        with refusing_corrupt():
            which, *rest = message
        check_numbers(which, 1)
        index = int(which)
        if not 0 <= index < len(self.compressors):
            raise CorruptMessageError(f"got compressor {index} of {len(self.compressors)}")
        compressor = self.compressors[index][1]
        return compressor.decompress(tuple(rest), layout, out, accumulate=accumulate)

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As of the compressor whose turn it is."""
        with self._active_compressor(x, state) as (index, total):
            self.compressors[index][1].mean_(total, state.inner[index], collectives, residual)
        if total is not x:
            x.copy_(total)

    @contextmanager
    def _active_compressor(self, x: Tensor, state: CompressorState) -> Iterator[tuple[int, Tensor]]:
        """Whose turn it is, and what it is to send; a step that is refused is none."""
        check_buffer(x, state.layout)
        assert isinstance(state, _SwitchState)
        index, active, inner = self._index(state.step), state.active, state.inner
        if index != active:
            pending = _pending_residual(state, x.device)
            self._activate(index, state, x.device)
            x = x if pending is None else pending.add_(x)
        try:
            yield index, x
        except BaseException:
            state.active, state.inner = active, inner
            raise
        state.step += 1

    def _index(self, step: int) -> int:
        return bisect_right(self.compressors, max(0, step), key=_first_step) - 1

    def _activate_last(self, state: CompressorState, *, device: torch.device) -> None:
        """Make the memory of the last message's compressor, from which the next may yet take."""
        self._activate(self._index(state.step - 1), state, device)

    def _activate(self, index: int, state: CompressorState, device: torch.device) -> None:
        assert isinstance(state, _SwitchState)
        state.active = index
        state.inner = [CompressorState(state.layout, state.rank) for _ in self.compressors]
        compressor = self.compressors[index][1]
        state.inner[index] = compressor.init(state.layout, device, state.rank)


@dataclass
class _SwitchState(CompressorState):
    """Whose turn it is, and so whose memory there is."""

    active: int = 0


def _first_step(pair: tuple[int, Compressor]) -> int:
    return pair[0]


def _pending_residual(state: CompressorState, device: torch.device) -> Tensor | None:
    """What the inner states have not sent yet, (numel,) float32; None: they do not feed back."""
    named = state.parameter_state()
    found = [
        (name, tensor)
        for name, tensors in named.items()
        for key, tensor in tensors.items()
        if key.rpartition(".")[2] == RESIDUAL
    ]
    if not found:
        return None
    pending = torch.zeros(state.layout.numel, dtype=torch.float32, device=device)
    parts = dict(zip(state.layout.names, state.layout.split(pending), strict=True))
    for name, residual in found:
        parts[name].add_(residual)
    return pending
