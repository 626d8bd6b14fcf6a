"""Gradients with a nan or an inf: how they are found, and what the ranks do about them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..comm.consistency import check_same_call, row_of_call
from ..comm.counts import Call
from ..comm.errors import NonFiniteError
from ..ops import add_or_clear_
from ..training.host_copy import HostCopy
from ..training.nonfinite import NonFinitePolicy, first_nonfinite, is_finite, is_finite_on_device
from .compressor import Compressor
from .layout import BufferLayout
from .state import CompressorState


@cache
def _row_of(piece: int) -> Tensor:
    """Return what a rank sends before it averages a buffer; never written."""
    return row_of_call(Call.BACKWARD, [piece], torch.device("cpu"))


def raise_of_ranks(
    layouts: Sequence[BufferLayout], pieces: Sequence[int], collectives: Collectives
) -> None:
    """Raise the same NonFiniteError on all ranks if a buffer of any is not finite.

    All ranks call it, with the ``layouts`` of buffers and, for each, the index of this rank's first
    parameter that is not finite, or -1. The collectives are on the CPU.
    """
    for layout, piece in zip(layouts, pieces, strict=True):
        with collectives.uncounted():
            rows = collectives.all_gather(_row_of(piece)).tolist()
        check_same_call(rows, {Call.BACKWARD}, collectives.run.group)
        for rank, (_, found, *_) in enumerate(rows):
            if found >= 0:
                name = layout.names[int(found)]
                raise NonFiniteError(
                    f"gradients must be finite, got nan or inf from rank {rank} in {name}: the "
                    "compressor's state of that buffer is unchanged; "
                    "skip this optimizer step, or, with a GradScaler, which skips it, use "
                    'nonfinite="allow"'
                )


def raise_of_means(
    layouts: Sequence[BufferLayout], pieces: Sequence[int], collectives: Collectives
) -> None:
    """Raise for means that are not finite, which all ranks know; as ``raise_of_ranks``."""
    raise_of_ranks(layouts, pieces, collectives)
    raise NonFiniteError(
        f"means must be finite, got nan or inf in the buffer of {layouts[0].names[0]} of finite "
        "gradients: they are above the largest number of the compressor's dtype; use another, or "
        "smaller gradients"
    )


class NonFiniteCheck:
    """What a hook does with buffers of gradients that have a nan or an inf.

    "raise": on the CPU all ranks raise, before anything of the buffer is sent or its state is
    written, which takes a pass and an all-gather of a number. On a GPU the host must not wait: the
    buffer counts as zeros, as for "skip", and all ranks raise in the next step; a residual may be
    lost (``Compressor.finds_nonfinite``). "skip": the buffer counts as zeros in the mean; no rank
    is told. "allow": nothing is read.
    """

    def __init__(self, policy: NonFinitePolicy) -> None:
        self.policy = policy
        self._late: list[_LateVerdict] = []

    def apply_(
        self, x: Tensor, layout: BufferLayout, collectives: Collectives, step: int | None
    ) -> None:
        """Apply the policy to gradients (numel,) that are about to be averaged; all ranks call it.

        Those that are not finite are set to 0 by "skip", and on a GPU by "raise". A NonFiniteError
        is raised on all ranks in the same call, that of an earlier step first.
        """
        if self.policy == "allow" or x.numel() == 0:
            return
        if x.device.type != "cpu":
            self._apply_on_device_(x, layout, collectives, step)
        elif self.policy == "raise":
            piece = -1 if is_finite(x) else first_nonfinite(layout.split(x))
            raise_of_ranks([layout], [piece], collectives)
        elif not is_finite(x):
            x.zero_()

    def mean_(
        self,
        compressor: Compressor,
        x: Tensor,
        layout: BufferLayout,
        state_of: Callable[[], CompressorState],
        collectives: Collectives,
        step: int | None,
    ) -> None:
        """Replace gradients (numel,) by their mean over ranks, under the policy.

        As ``apply_`` and the compressor's ``mean_``, but that a GPU need not read what the encoder
        reads anyway: see ``Compressor.finds_nonfinite``.
        """
        on_device = x.device.type != "cpu" and x.numel() > 0
        if not (on_device and self.policy == "raise" and compressor.finds_nonfinite):
            self.apply_(x, layout, collectives, step)
            compressor.mean_(x, state_of(), collectives)
            return
        self._raise_earlier(x, step)
        mean_: Any = compressor.mean_
        of_ranks = mean_(x, state_of(), collectives, drops=True)
        self._raise_later(of_ranks, layout, step)

    def _apply_on_device_(
        self, x: Tensor, layout: BufferLayout, collectives: Collectives, step: int | None
    ) -> None:
        is_bad = is_finite_on_device(x).logical_not()
        add_or_clear_(x, clear=is_bad)
        if self.policy != "raise" or _is_captured(x):
            return
        self._raise_earlier(x, step)
        with collectives.uncounted():
            of_ranks = collectives.all_gather(is_bad.long().view(1)).view(-1)
        self._raise_later(of_ranks, layout, step)

    def _raise_earlier(self, x: Tensor, step: int | None) -> None:
        """Raise for buffers of earlier steps."""
        if _is_captured(x):
            return
        earlier = [each for each in self._late if each.step != step]
        self._late = [each for each in self._late if each.step == step]
        for verdict in earlier:
            verdict.raise_if_found()

    def _raise_later(self, of_ranks: Tensor, layout: BufferLayout, step: int | None) -> None:
        if not _is_captured(of_ranks):
            self._late.append(_LateVerdict(HostCopy(of_ranks), layout, step))


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is captured, whose replays no host reads."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _LateVerdict(NamedTuple):
    """Which ranks' buffers were not finite, 0 if they were, on its way from a GPU to the host."""

    of_ranks: HostCopy
    layout: BufferLayout
    step: int | None

    def raise_if_found(self) -> None:
        """Raise for the first rank; waits for a step that is over unless the host is behind it."""
        for rank, is_bad in enumerate(self.of_ranks.values()):
            if is_bad:
                first, last = self.layout.names[0], self.layout.names[-1]
                where = first if first == last else f"one of {first} to {last}"
                raise NonFiniteError(
                    f"gradients must be finite, got nan or inf from rank {rank} in {where} in step "
                    f"{self.step}, the last one: its buffer counted as zeros in that mean; use "
                    'nonfinite="skip" to go on, or "allow" with a GradScaler'
                )
