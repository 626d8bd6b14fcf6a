"""Perm-K: ranks send disjoint shares of a random permutation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ...comm.collectives import Collectives, int64_on
from ...training.arguments import check_integer
from ..compressor import AttachPoint, Message, all_but
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual, add_residual
from ..state import CompressorState
from .base import Sparsifier, check_numbers, check_values, propagate_nonfinite_
from .permutation import Order, Permutation


@dataclass(frozen=True)
class PermK(Sparsifier):
    """Each rank sends its own share of the entries (Szlendak, Tyurin, Richtarik).

    All ranks draw one permutation per message, and sketch i keeps the i-th part of it, scaled by
    the number of ranks: every sketch is unbiased, and in the mean each entry comes from one rank
    (arXiv 2110.03300). If all ranks hold the same buffer, the mean is that buffer, bit for bit.
    Runs of neighbors are permuted, which has the same variance: it depends on each entry's
    probabilities alone. With a residual nothing is scaled: such a sketch is contractive, as error
    feedback needs.

    A mean takes one all-gather of a share from each rank, half the bytes of an all-reduce; the
    payload is a share. If any entry of x is nan or infinite, the whole share is nan. The
    permutation is drawn on the host, also for GPUs: 2 ms for 6.5 million entries.

    Args:
        seed: seed of the random draws, which depend on the step, so ranks must be at the same step.
        num_ranks: number of shares for a single message; None: single messages are not possible.
            Means use the size of the group.
        run_length: number of neighbors that are permuted together, at least 1; fewer in a buffer
            that would not have one run per rank.
    """

    seed: int = 0
    num_ranks: int | None = None
    run_length: int = 32
    unbiased = True

    def __post_init__(self) -> None:
        check_integer("run_length", self.run_length)
        if self.num_ranks is not None:
            check_integer("num_ranks", self.num_ranks, rule=">= 1 or None")

    @property
    @override
    def refusals(self) -> Mapping[AttachPoint, str]:
        places = all_but(AttachPoint.DDP) if self.num_ranks is None else ()
        return dict.fromkeys(places, "num_ranks must be given for {place}, got {self}")

    def for_num_ranks(self, num_ranks: int) -> "PermK":
        """Return this compressor for means over that many ranks."""
        return replace(self, num_ranks=num_ranks)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values in x's dtype, (2,) int64: step and share).

        Values are zero-padded to the length of the longest share.
        """
        num_shares = self._num_shares()
        order, values = self._draw(x, state, num_shares, residual)
        if residual is None:
            values.mul_(num_shares)
        numbers = int64_on(x.device, [state.step, order.share_of(state.rank)])
        return _pad(values, order.longest), numbers

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Decode a message; on GPUs the host waits for its step and share."""
        with refusing_corrupt():
            values, numbers = message
            check_values(values, self.num_values((numbers,), layout))
        step, share = numbers.tolist()
        order = self._permutation.draw(layout, step, self._num_shares(), out.device)
        values = values[: order.length(share)]
        if accumulate:
            values = order.take(out, share).add_(values)
        else:
            out.zero_()
        order.put_(out, values, share)
        return out

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        """Average with as many shares as there are ranks."""
        with collectives.stats.encoding():
            order, values = self._draw(x, state, collectives.size, residual)
        gathered = collectives.all_gather(_pad(values, order.longest))
        with collectives.stats.decoding():
            for rank, row in enumerate(gathered):
                share = order.share_of(rank)
                order.put_(x, row[: order.length(share)], share)
            if residual is not None:
                x.div_(collectives.size)

    @override
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        (numbers,) = where
        check_numbers(numbers, 2)
        share, num_shares = int(numbers[1]), self._num_shares()
        if not 0 <= share < num_shares:
            raise CorruptMessageError(f"share must be in [0, {num_shares}), got {share}")
        return self._permutation.shares(layout.numel, num_shares).longest

    @property
    def _permutation(self) -> Permutation:
        return Permutation(self.seed, self.run_length)

    def _num_shares(self) -> int:
        if self.num_ranks is None:
            raise ValueError(
                "num_ranks must be given for single messages of PermK, got None; use "
                f"PermK(seed={self.seed}, num_ranks=...)"
            )
        return self.num_ranks

    def _draw(
        self, x: Tensor, state: CompressorState, num_shares: int, residual: Residual
    ) -> tuple[Order, Tensor]:
        """Return this message's permutation, and this rank's share of x, in x's dtype."""
        state.begin_message(x)
        order = self._permutation.draw(state.layout, state.step, num_shares, x.device)
        share = order.share_of(state.rank)
        if residual is None:
            return order, propagate_nonfinite_(order.take(x, share), x)
        total = add_residual(x, residual)
        chosen = order.take(total, share)
        values = chosen.to(x.dtype, copy=True)
        residual.copy_(total)
        order.put_(residual, chosen.sub_(values), share)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return order, propagate_nonfinite_(values, x)


def _pad(values: Tensor, length: int) -> Tensor:
    missing = length - values.numel()
    return functional.pad(values, (0, missing)) if missing else values
