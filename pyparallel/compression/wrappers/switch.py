"""Compressors that change at given steps, such as for warm-up, in one registered hook."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.collectives import Collectives
from ...training.arguments import check_type, require, summarize
from ..compressor import AttachPoint, Compressor, Message, all_but
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout
from ..residual import RESIDUAL, Residual
from ..sparsifiers.base import check_numbers
from ..state import CompressorState
from .composed import Composed

Pairs = tuple[tuple[int, Compressor], ...]


@dataclass(frozen=True, repr=False)
class Switch(Composed):
    """Compressors by first step, such as ``Switch({0: Cast(), 9: ErrorFeedback(TopK(0.1))})``.

    Step k, counted from 0 in messages of a buffer, uses the compressor with the largest key up to
    k. The pending residual of the previous one, if it has error feedback, is added to the first
    buffer of the next: nothing is lost, and no other state is carried over. Only the active
    compressor has state.

    Args:
        compressors: by first step, one of which is 0; kept as a tuple of pairs, ascending.
    """

    refusals = dict.fromkeys(
        all_but(AttachPoint.DDP, AttachPoint.FSDP_GRADIENTS),
        "compressor must be the same at all steps for {place}, got {self}; use one of its "
        "compressors",
    )
    compressors: Pairs

    def __init__(self, compressors: Mapping[int, Compressor]) -> None:
        rule = "compressors by first step such as {0: Cast(), 1000: Int8()}"
        check_type("compressors", compressors, Mapping, rule)
        for step, compressor in compressors.items():
            if not isinstance(step, int) or step < 0 or not isinstance(compressor, Compressor):
                raise ValueError(
                    "compressors must map first steps to compressors, got "
                    f"{summarize(compressor)} for {step!r}"
                )
        rule = "compressors must have one for step 0"
        require(0 in compressors, rule, f"steps {sorted(compressors)}", "begin with Cast()")
        object.__setattr__(self, "compressors", tuple(sorted(compressors.items(), key=_first_step)))

    def __repr__(self) -> str:
        return f"Switch({dict(self.compressors)!r})"

    @property
    @override
    def parts(self) -> tuple[Compressor, ...]:
        return tuple(each for _, each in self.compressors)

    @property
    @override
    def fixed_length(self) -> bool:
        return len(self.compressors) == 1 and super().fixed_length

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        state = _SwitchState(layout, rank, switch=self, device=device)
        state.activate(self.index_at(-1))
        return state

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return the index of the compressor, (1,) int64, then its message."""
        with self._active_compressor(x, state) as (index, total):
            message = self.compressors[index][1].compress(total, state.inner[index], residual)
        which = torch.full((1,), index, dtype=torch.int64, device=x.device)
        return (which, *message)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message; on GPUs the host waits for its first tensor."""
        with refusing_corrupt():
            which, *rest = message
        check_numbers(which, 1)
        index = int(which)
        if not 0 <= index < len(self.compressors):
            raise CorruptMessageError(f"index must be in [0, {len(self.compressors)}), got {index}")
        compressor = self.compressors[index][1]
        return compressor.decompress(tuple(rest), layout, out, accumulate=accumulate)

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        with self._active_compressor(x, state) as (index, total):
            self.compressors[index][1].mean_(total, state.inner[index], collectives, residual)
        if total is not x:
            x.copy_(total)

    @contextmanager
    def _active_compressor(self, x: Tensor, state: CompressorState) -> Iterator[tuple[int, Tensor]]:
        """Yield the step's compressor index and input; a step that raises does not count."""
        state.layout.check(x)
        assert isinstance(state, _SwitchState)
        index = self.index_at(state.step)
        with state.stepping():
            pending = _pending_residual(state.leave_others(index), x.device)
            yield index, x if pending is None else pending.add_(x)

    def index_at(self, step: int) -> int:
        """Return the index of the compressor of a step."""
        return bisect_right(self.compressors, max(0, step), key=_first_step) - 1


@dataclass(kw_only=True)
class _SwitchState(CompressorState):
    """State that includes the index of the active compressor, which alone has state."""

    switch: Switch
    device: torch.device
    active: int = field(default=0, init=False)

    def activate(self, *indices: int) -> None:
        """Replace the inner states by new ones of these compressors, the first of which is next."""
        self.active = indices[0]
        self.inner = [
            each.init(self.layout, self.device, self.rank)
            if index in indices
            else CompressorState(self.layout, self.rank)
            for index, (_, each) in enumerate(self.switch.compressors)
        ]

    def leave_others(self, index: int) -> list[CompressorState]:
        """Make a compressor the active one; return the states of others that have a residual."""
        is_active, inner = index == self.active, self.inner
        others = [
            each for i, each in enumerate(inner) if i != index and (each.entries or each.inner)
        ]
        if others or not is_active:
            self.activate(index)
        if is_active:
            self.inner[index] = inner[index]
        return others

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the step of the block; if it raises, undo what it has activated instead."""
        active, inner = self.active, self.inner
        try:
            yield
        except BaseException:
            self.active, self.inner = active, inner
            raise
        self.step += 1

    @override
    def load_state(
        self, parameter_state: dict[str, dict[str, Tensor]], common_state: dict[str, Any]
    ) -> None:
        """Load also what parameters that had no gradient since have kept of earlier compressors."""
        self.step = common_state.get("step", self.step)
        kept = {
            int(key.partition(".")[0])
            for tensors in parameter_state.values()
            for key in tensors
            if key.rpartition(".")[2] == RESIDUAL
        }
        self.activate(self.switch.index_at(self.step - 1), *kept)
        super().load_state(parameter_state, common_state)


def _first_step(pair: tuple[int, Compressor]) -> int:
    return pair[0]


def _pending_residual(states: list[CompressorState], device: torch.device) -> Tensor | None:
    """Return the sum of a buffer's residuals, (numel,) float32; None without error feedback."""
    found = [
        (name, tensor)
        for state in states
        for name, tensors in state.parameter_state().items()
        for key, tensor in tensors.items()
        if key.rpartition(".")[2] == RESIDUAL
    ]
    if not found:
        return None
    layout = states[0].layout
    pending = torch.zeros(layout.numel, dtype=torch.float32, device=device)
    parts = dict(zip(layout.names, layout.split(pending), strict=True))
    for name, residual in found:
        parts[name].add_(residual)
    return pending
