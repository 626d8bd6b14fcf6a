"""Every entry from one rank alone: shares of a permutation that all ranks draw."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..compressor import AttachPoint
from ..layout import BufferLayout
from ..state import CompressorState
from .permutation import Order, Permutation
from .permutation_sketch import PermutationSketch
from .random_k import check_run_length


@dataclass(frozen=True)
class PermK(PermutationSketch):
    """A rank sends its share of the entries, and no other rank does (Szlendak, Tyurin, Richtarik).

    All ranks draw one permutation for each message, and sketch i keeps the i-th part of it, scaled
    by the number of ranks: every sketch is unbiased, and in the mean each entry is that of one rank
    (arXiv 2110.03300). If all ranks hold the same buffer, the mean is it, bit for bit. Runs of
    neighbors are permuted, which is as good: the variance depends on each entry's chances alone.
    With a residual nothing is scaled: such a sketch is contractive, as error feedback needs.

    A mean takes one all-gather of a share from each rank, half the bytes of an all-reduce; the
    payload is a share. If any entry of x is nan or infinite, all of the share is nan. The
    permutation is drawn on the host, also for GPUs: 2 ms for 6.5 million entries.

    Args:
        seed: of the draws. All ranks have made as many messages of a buffer, and so draw alike.
        num_ranks: into how many shares a buffer is cut for a message on its own; None: there are
            no such messages. Means take as many shares as there are ranks.
        run_length: how many neighbors are permuted together, at least 1; fewer in a buffer that
            would not have one run for each rank.
    """

    seed: int = 0
    num_ranks: int | None = None
    run_length: int = 32

    def __post_init__(self) -> None:
        check_run_length(self.run_length)
        check_num_ranks(self.num_ranks)

    @property
    def unbiased(self) -> bool:
        """Without a residual."""
        return True

    def validation_error(self, place: AttachPoint) -> str | None:
        """It must be told the number of ranks where no mean is taken whole."""
        if self.num_ranks is None and place is not AttachPoint.DDP:
            return f"num_ranks must be said where PermK serves {place.value}, got {self}"
        return None

    def contraction(self, layout: BufferLayout) -> float | None:
        """With a residual: one share of num_ranks; None: not known."""
        return None if self.num_ranks is None else 1 / self.num_ranks

    @property
    def permutation(self) -> Permutation:
        """As `PermutationSketch.permutation`."""
        return Permutation(self.seed, self.run_length)

    def num_shares(self) -> int:
        """As `PermutationSketch.num_shares`."""
        return require_num_ranks(self.num_ranks, f"PermK(seed={self.seed}, num_ranks=...)")

    def for_num_ranks(self, num_ranks: int) -> "PermK":
        """As `PermutationSketch.among`."""
        return replace(self, num_ranks=num_ranks)

    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Not at all."""


def check_num_ranks(num_ranks: int | None) -> None:
    """Refuse what is no number of ranks, nor None."""
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"num_ranks must be a number from 1 up or None, got {num_ranks}")


def require_num_ranks(num_ranks: int | None, fix: str) -> int:
    """The number of ranks, where one is needed.

    Raises:
        ValueError: None.
    """
    if num_ranks is None:
        name = fix.partition("(")[0]
        raise ValueError(
            f"num_ranks must be said where {name} makes messages on their own, got None; use {fix}"
        )
    return num_ranks
