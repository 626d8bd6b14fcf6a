"""Perm-K: ranks send disjoint shares of a random permutation."""

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from ...training.arguments import check_integer
from ..compressor import AttachPoint
from ..state import CompressorState
from .permutation import Order, Permutation
from .permutation_sketch import PermutationSketch
from .random_k import check_run_length


@dataclass(frozen=True)
class PermK(PermutationSketch):
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
        check_run_length(self.run_length)
        check_num_ranks(self.num_ranks)

    @override
    def validation_error(self, place: AttachPoint) -> str | None:
        if self.num_ranks is None and place is not AttachPoint.DDP:
            return f"num_ranks must be given for {place.value}, got {self}"
        return None

    @property
    @override
    def permutation(self) -> Permutation:
        return Permutation(self.seed, self.run_length)

    @override
    def num_shares(self) -> int:
        return require_num_ranks(self.num_ranks, f"PermK(seed={self.seed}, num_ranks=...)")

    @override
    def for_num_ranks(self, num_ranks: int) -> "PermK":
        return replace(self, num_ranks=num_ranks)

    @override
    def precondition_(self, values: Tensor, order: Order, state: CompressorState) -> None:
        """Do nothing: Perm-K has no preconditioner."""


def check_num_ranks(num_ranks: int | None) -> None:
    """Check that num_ranks is None or at least 1."""
    if num_ranks is not None:
        check_integer("num_ranks", num_ranks, rule=">= 1 or None")


def require_num_ranks(num_ranks: int | None, fix: str) -> int:
    """Return the number of ranks, or raise a ValueError."""
    if num_ranks is None:
        name = fix.partition("(")[0]
        raise ValueError(
            f"num_ranks must be given for single messages of {name}, got None; use {fix}"
        )
    return num_ranks
