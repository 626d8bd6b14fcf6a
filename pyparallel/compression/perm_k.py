"""Every entry from one rank alone: shares of a permutation that all ranks draw."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .compressor import AttachPoint, Message, check_served
from .corruption import CorruptMessageError, refusing_corrupt
from .layout import Layout
from .random_k import check_run_length
from .ranks import Ranks
from .residual import add_residual
from .sparsifier import Sparsifier, check_numbers, check_values, show_nonfinite_
from .state import State


@dataclass(frozen=True)
class PermK(Sparsifier):
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
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ValueError(f"num_ranks must be a number from 1 up or None, got {self.num_ranks}")

    @property
    def unbiased(self) -> bool:
        """Without a residual."""
        return True

    def problem(self, place: AttachPoint) -> str | None:
        """It must be told the number of ranks where no mean is taken whole."""
        if self.num_ranks is None and place is not AttachPoint.DDP:
            return f"num_ranks must be said where PermK serves {place.value}, got {self}"
        return None

    def contraction(self, layout: Layout) -> float | None:
        """With a residual: one share of num_ranks; None: not known."""
        return None if self.num_ranks is None else 1 / self.num_ranks

    def compress(self, x: Tensor, state: State, residual: Tensor | None = None) -> Message:
        """As `Compressor.compress`: (values in x's dtype, (2,) int64: the draw and the share).

        Values are as many as the longest share has, whichever this one is.

        Raises:
            ValueError: num_ranks has not been said.
        """
        num_ranks = self._num_ranks()
        order, values = self._draw(x, state, num_ranks, residual)
        if residual is None:
            values.mul_(num_ranks)
        values = _pad(values, order.longest)
        numbers = torch.tensor([state.step, order.share_of(state.rank)], device=x.device)
        return values, numbers

    def decompress(
        self, message: Message, layout: Layout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`; on GPUs the host waits for the message's numbers."""
        num_ranks = self._num_ranks()
        with refusing_corrupt():
            values, numbers = message
            check_values(values, self.num_values((numbers,), layout))
        step, share = numbers.tolist()
        order = self._order(layout, step, num_ranks, out.device)
        values = values[: order.length(share)]
        if accumulate:
            values = order.take(out, share).add_(values)
        else:
            out.zero_()
        order.put_(out, values, share)
        return out

    def mean_(self, x: Tensor, state: State, ranks: Ranks, residual: Tensor | None = None) -> None:
        """As `Compressor.mean_`, in as many shares as there are ranks, whatever num_ranks says."""
        with ranks.meter.encoding():
            order, values = self._draw(x, state, ranks.size, residual)
        gathered = ranks.all_gather(_pad(values, order.longest))
        with ranks.meter.decoding():
            for row, share in zip(gathered, map(order.share_of, range(ranks.size)), strict=True):
                order.put_(x, row[: order.length(share)], share)
            if residual is not None:
                x.div_(ranks.size)

    def num_values(self, where: Message, layout: Layout) -> int:
        """As `Sparsifier.num_values`."""
        (numbers,) = where
        check_numbers(numbers, 2)
        share, num_ranks = int(numbers[1]), self._num_ranks()
        if not 0 <= share < num_ranks:
            raise CorruptMessageError(f"got share {share} of {num_ranks}")
        return _Shares(layout.numel, num_ranks, self.run_length).longest

    def _draw(
        self, x: Tensor, state: State, num_ranks: int, residual: Tensor | None
    ) -> tuple["_Order", Tensor]:
        """This message's order, and this rank's share of x, in x's dtype."""
        check_served(x, state.layout)
        state.step += 1
        order = self._order(state.layout, state.step, num_ranks, x.device)
        share = order.share_of(state.rank)
        if residual is None:
            return order, show_nonfinite_(order.take(x, share), x)
        total = add_residual(x, residual)
        chosen = order.take(total, share)
        values = chosen.to(x.dtype, copy=True)
        residual.copy_(total)
        order.put_(residual, chosen.sub_(values), share)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return order, show_nonfinite_(values, x)

    def _num_ranks(self) -> int:
        if self.num_ranks is None:
            raise ValueError(
                "num_ranks must be said where PermK makes messages on their own, got None; use "
                f"PermK(seed={self.seed}, num_ranks=...)"
            )
        return self.num_ranks

    def _order(self, layout: Layout, step: int, num_ranks: int, device: torch.device) -> "_Order":
        seed = State(layout).seed(self.seed, shared=True)
        # manual_seed takes 32 bits of what it is given.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{step}".encode()))
        shares = _Shares(layout.numel, num_ranks, self.run_length)
        turn = int(torch.randint(num_ranks, (), generator=generator))
        runs = torch.randperm(shares.num_runs, generator=generator)
        return _Order(layout.numel, num_ranks, self.run_length, runs.to(device), turn)


@dataclass(frozen=True)
class _Shares:
    """How many entries each share has: whole runs, and in the last share what no run holds."""

    numel: int
    num_ranks: int
    longest_run: int

    @property
    def run_length(self) -> int:
        return max(1, min(self.longest_run, self.numel // self.num_ranks))

    @property
    def num_runs(self) -> int:
        return self.numel // self.run_length

    def bounds(self, share: int) -> tuple[int, int]:
        """The runs of a share, as places in the order."""
        first, last = (s * self.num_runs // self.num_ranks for s in (share, share + 1))
        return first, last

    def has_rest(self, share: int) -> bool:
        return share == self.num_ranks - 1

    @property
    def longest(self) -> int:
        return max(self.length(share) for share in range(self.num_ranks))

    def length(self, share: int) -> int:
        first, last = self.bounds(share)
        rest = self.numel - self.num_runs * self.run_length if self.has_rest(share) else 0
        return (last - first) * self.run_length + rest


@dataclass(frozen=True)
class _Order(_Shares):
    """A draw: the order of the runs, and how far the ranks are turned against the shares.

    Shares differ in length by a run or so: it is the turn that gives all ranks the same chances.
    """

    runs: Tensor
    turn: int

    def share_of(self, rank: int) -> int:
        return (rank + self.turn) % self.num_ranks

    def take(self, flat: Tensor, share: int) -> Tensor:
        """A share of a buffer: a copy."""
        first, last = self.bounds(share)
        chosen = self._in_runs(flat).index_select(0, self.runs[first:last]).view(-1)
        return torch.cat([chosen, self._rest(flat)]) if self.has_rest(share) else chosen

    def put_(self, flat: Tensor, values: Tensor, share: int) -> None:
        """Write a share into a buffer."""
        first, last = self.bounds(share)
        split = (last - first) * self.run_length
        rows = values[:split].view(-1, self.run_length).to(flat.dtype)
        self._in_runs(flat).index_copy_(0, self.runs[first:last], rows)
        if self.has_rest(share):
            self._rest(flat).copy_(values[split:])

    def _in_runs(self, flat: Tensor) -> Tensor:
        return flat[: self.num_runs * self.run_length].view(self.num_runs, self.run_length)

    def _rest(self, flat: Tensor) -> Tensor:
        return flat[self.num_runs * self.run_length :]


def _pad(values: Tensor, length: int) -> Tensor:
    if values.numel() == length:
        return values
    padded = values.new_zeros(length)
    padded[: values.numel()] = values
    return padded
