"""Averages over all ranks or over pairs, which may travel beside the training."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from ...comm import Collectives, CommStats, Run
from ...compression import BufferLayout, Compressor
from ...compression.corrupt_messages import with_sender
from ...compression.hooks.comm_worker import CommWorker, comm_worker_for
from ...compression.state_store import StateStore
from ..topology import Matching
from .exchange import NeighborExchange, Round
from .header import MessageHeaders

STILL, FROZEN, TRAINED = range(3)
"""What a parameter is since the last average: frozen and unchanged, frozen, or trained."""


class AllRanks:
    """Averages of flat tensors over all ranks.

    Args:
        in_background: in a thread, or on streams, with a process group of its own; all ranks then
            start averages in the same order.
        store: the compressor's states; None: new ones.
        compressor: of the differences to tensors that are equal on all ranks; None: none.

    Attributes:
        hidden_seconds: host time in collectives in the background.
        store: the compressor's states; None without one.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        compressor: Compressor | None,
        in_background: bool,
        store: StateStore | None = None,
    ) -> None:
        self.hidden_seconds = 0.0
        self._run, self._compressor = run, compressor
        self._collectives = Collectives(run, run.stats)
        self._worker: CommWorker | None = None
        if in_background and run.size > 1:
            self._worker = comm_worker_for(device)
            self._collectives = Collectives(run.within(range(run.size)), CommStats())
        # Of that run, in which the worker also ends an average that a rank has closed before.
        self.headers = MessageHeaders(self._collectives.run)
        self.store = self._new_store() if store is None else store

    def reset(self) -> None:
        """Forget the errors of earlier messages."""
        self.store = self._new_store()

    @torch.no_grad()
    def agree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the averages of tensors over all ranks; of equal ones these, to the last bit."""
        collectives, found = Collectives(self._run), []
        for tensor in tensors:
            first = tensor.clone()
            collectives.broadcast_(first, 0)
            difference = tensor - first
            collectives.all_reduce_(difference)
            found.append(first.add_(difference, alpha=1 / self._run.size))
        return found

    def _new_store(self) -> StateStore | None:
        if self._compressor is None:
            return None
        return StateStore(self._compressor, self._run.group_rank, self._run.size)

    @torch.no_grad()
    def start(
        self,
        layouts: Sequence[BufferLayout],
        tensors: Sequence[Tensor],
        equal: Sequence[Tensor] = (),
        changes: list[int] | None = None,
        *,
        index: int,
        weight: Tensor,
    ) -> Callable[[], list[Tensor]]:
        """Start to average tensors, (n,) float32 or float64; return a function that waits for them.

        Args:
            layouts: of the tensors.
            equal: tensors that are equal on all ranks until the averages are waited for; read only
                with a compressor.
            changes: what parameters are, `STILL` to `TRAINED`; written when the averages are waited
                for: the most that each is on any rank.
            index: of the average.
            weight: 0-d; the ranks' sum to their number.
        """
        size, device, store = self._run.size, tensors[0].device, self.store
        row = self._run.row(device, index)
        of_ranks = torch.tensor(changes or [], dtype=torch.int32, device=device)
        if store is None:
            total = [tensor * (weight / size) for tensor in tensors]
        else:
            total = [(a - each) * weight for a, each in zip(equal, tensors, strict=True)]

        @torch.no_grad()
        def average() -> None:
            if size > 1:
                self.headers.gather(self._collectives, index, device, row)
                with self._collectives.uncounted():
                    of_ranks.copy_(self._collectives.all_gather(of_ranks).amax(0))
            for each, layout in zip(total, layouts, strict=True):
                if store is None:
                    self._collectives.all_reduce_(each)
                else:
                    state = store.of(layout, device)
                    store.compressor.mean_(each, state, self._collectives)

        stats, failures = CommStats(), list[Exception]()

        def attempt() -> None:
            self._collectives.stats = stats  # of this average: the next may have begun at its wait
            try:
                average()
            except Exception as error:  # a future would raise another one, with this one's text
                failures.append(error)

        future = self._worker.start(attempt, total[0]) if self._worker else None
        if future is None:
            average()

        # A job on another stream may still have to read them when this returns.
        kept = [row, of_ranks]

        def wait() -> list[Tensor]:
            if future is not None:
                self._wait(future, stats)
            kept.clear()
            for error in failures:
                raise error
            if changes and min(changes) < TRAINED:
                changes[:] = of_ranks.tolist()
            if store is None:
                return total
            return [a - each for a, each in zip(equal, total, strict=True)]

        return wait

    def _wait(self, future: Future[Tensor], stats: CommStats) -> None:
        with self._run.waiting(self._run.stats):
            future.wait()
        self._run.stats.count_bytes(stats.wire_bytes)
        self.hidden_seconds += stats.waiting_seconds


class Pairs:
    """Averages with one partner of a matching, which changes with each.

    Args:
        matching: None: nobody has a partner.
        compressor: of the differences to other tensors, which may differ between partners; None:
            none. Then of these tensors only one slice is averaged, which is sent as it is.
        turns: in how many averages each slice has had its turn.
        interleaved: of how many tensors the averages are, one after the other.
    """

    hidden_seconds = 0.0  # messages need no thread

    def __init__(
        self,
        exchange: NeighborExchange,
        matching: Matching | None,
        compressor: Compressor | None = None,
        turns: int = 1,
        interleaved: int = 1,
    ) -> None:
        self._exchange, self._matching, self._compressor = exchange, matching, compressor
        self.headers = exchange.headers
        self._turns, self._interleaved = turns, interleaved
        self.reset()

    def reset(self) -> None:
        """Forget the errors of earlier messages."""
        self.store: StateStore | None = None
        if self._compressor is not None:
            rank, size = self._exchange.rank, self._exchange.num_ranks
            self.store = StateStore(self._compressor, rank, size)

    def agree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors: ranks go on from their own."""
        return list(tensors)

    @torch.no_grad()
    def start(
        self,
        layouts: Sequence[BufferLayout],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        changes: list[int] | None = None,
        *,
        index: int,
        weight: Tensor,
    ) -> Callable[[], list[Tensor]]:
        """Do as ``AllRanks.start``, with the partner of a round; alone the average is one's own.

        The tensors must not be written before. ``changes`` stay this rank's own.
        """
        rank, matching = self._exchange.rank, self._matching
        partner = None if matching is None else matching.partner(rank, index)
        if partner is None:
            return lambda: list(tensors)

        def swap(message: Sequence[Tensor]) -> Round:
            return self._exchange.swap(message, [partner], [partner], round_index=index)

        if self.store is not None:
            return self._start_compressed(layouts, tensors, others, index, partner, swap)
        swapped = swap(tensors)

        def wait() -> list[Tensor]:
            theirs = swapped.wait().first_or(tensors)
            # Both partners add the same two numbers: equal data stay equal to the last bit.
            return [(a + b).mul_(0.5) for a, b in zip(tensors, theirs, strict=True)]

        return wait

    def _start_compressed(
        self,
        layouts: Sequence[BufferLayout],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor],
        index: int,
        partner: int,
        swap: Callable[[Sequence[Tensor]], Round],
    ) -> Callable[[], list[Tensor]]:
        assert self.store is not None
        compressor, stats = self.store.compressor, self._exchange.run.stats
        turn, turns = index // self._interleaved % self._turns, self._turns
        slices, messages = [], []

        def in_turn(tensor: Tensor) -> Tensor:
            n = tensor.numel()
            return tensor[n * turn // turns : n * (turn + 1) // turns]

        for layout, tensor, other in zip(layouts, tensors, others, strict=True):
            with stats.encoding():
                state = self.store.of(layout, tensor.device)
                messages.append(compressor.compress(tensor - other, state))
            slices.append(in_turn(other))
        parts = [part for message in messages for part in message] + slices
        swapped = swap(parts)

        @torch.no_grad()
        def wait() -> list[Tensor]:
            theirs = iter(swapped.wait().first_or(parts))
            means = []
            for layout, message, other in zip(layouts, messages, others, strict=True):
                mean = compressor.decompress(message, layout, torch.empty_like(other))
                received = tuple(next(theirs) for _ in message)
                with stats.decoding(), with_sender(self._exchange.run.global_rank(partner)):
                    compressor.decompress(received, layout, mean, accumulate=True)
                means.append(mean.mul_(0.5).add_(other))
            for mean, own in zip(means, slices, strict=True):
                in_turn(mean).add_((next(theirs) - own).mul_(0.5))
            return means

        return wait
