"""Averages over replicas of unequal numbers of shards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ...compression import BufferLayout, Compressor, Message
from ...compression.corrupt_messages import with_sender
from ...compression.state_store import StateStore
from ..topology import Matching
from .exchange import NeighborExchange, Received, Round
from .overlaps import Overlap
from .replica_rounds import as_one_replica


class Replicas:
    """Averages of flat tensors of replicas of unequal numbers of shards, in float64.

    Ranks send the rows that others have too: to all other replicas, or to one partner of each turn.
    With a compressor a rank encodes each `Overlap` by itself and keeps the error of its messages;
    an average is then that of decoded messages, one's own included, equal on all of its replicas.

    Args:
        exchanges: of each tensor.
        matching: of the partners; None: all replicas average together.
        compressor: of the differences to other tensors, which may differ between partners; None:
            none. Then of an overlap of these tensors one slice is averaged, as it is, by partners.
        turns: in how many averages each slice has had its turn.
    """

    hidden_seconds = 0.0

    def __init__(
        self,
        exchanges: Sequence[NeighborExchange],
        matching: Matching | None = None,
        compressor: Compressor | None = None,
        turns: int = 1,
    ) -> None:
        self._exchanges, self._matching, self._turns = exchanges, matching, turns
        self._compressor = compressor
        self.reset()

    def reset(self) -> None:
        """Forget the errors of earlier messages."""
        self.store: StateStore | None = None
        if self._compressor is not None:
            first = self._exchanges[0]
            self.store = StateStore(self._compressor, first.rank, first.num_ranks)

    @torch.no_grad()
    def agree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the averages over all replicas, or with partners the tensors as they are."""
        if self._matching is not None:
            return list(tensors)
        one = torch.ones((), dtype=torch.float64, device=tensors[0].device)
        pairs = zip(self._exchanges, tensors, strict=True)
        return [exchange.average(each, one).to(each.dtype) for exchange, each in pairs]

    def _agree_on(self, changes: list[int] | None, device: torch.device) -> None:
        if changes and self._matching is None:
            collectives = Collectives(self._exchanges[0].run)
            rows = collectives.all_gather(torch.tensor(changes, device=device))
            changes[:] = map(int, rows.amax(0).tolist())

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
        """Do as ``AllRanks.start``, for replicas instead of ranks."""
        own, number = self._exchanges[0].rank, self._exchanges[0].num_ranks
        peers = [each for each in range(number) if each != own]
        if self._matching is not None:
            partner = self._matching.partner(own, index)
            peers = [] if partner is None else [partner]
        if not peers:
            return lambda: list(tensors)
        if self.store is not None:
            given = zip(self._exchanges, layouts, tensors, others, strict=True)
            started = [_Encoded(self.store, *each) for each in given]
            turn = None if self._matching is None else (index % self._turns, self._turns)
            for each in started:
                each.send(peers, index, weight, turn)

            @torch.no_grad()
            def wait_and_decode() -> list[Tensor]:
                for each in started:
                    each.receive()
                self._agree_on(changes, tensors[0].device)
                with as_one_replica(self._exchanges[0].run):
                    return [each.decode() for each in started]

            return wait_and_decode
        rounds, sent = [], [each.clone() for each in tensors]
        for exchange, tensor in zip(self._exchanges, sent, strict=True):
            into = [[torch.zeros_like(tensor)] for _ in peers]  # for its gaps
            masses = weight.double().expand(len(peers))
            rounds.append(
                exchange.swap([tensor], peers, peers, into=into, round_index=index, masses=masses)
            )

        @torch.no_grad()
        def wait() -> list[Tensor]:
            found = zip(self._exchanges, rounds, sent, strict=True)
            means = [
                exchange.mean(tensor, weight, peers, swapped.wait()).to(tensor.dtype)
                for exchange, swapped, tensor in found
            ]
            self._agree_on(changes, tensors[0].device)
            return means

        return wait

    def raise_nonfinite(self) -> None:
        """Raise for gradients that were not finite on another rank."""
        for each in self._exchanges:
            each.headers.raise_nonfinite()


class _Encoded:
    """An average of decoded messages of one tensor's differences to another, by overlaps."""

    def __init__(
        self,
        store: StateStore,
        exchange: NeighborExchange,
        layout: BufferLayout,
        tensor: Tensor,
        other: Tensor,
    ) -> None:
        assert exchange.overlaps is not None
        self._exchange, self._other, self._compressor = exchange, other, store.compressor
        self._parts = exchange.overlaps.split(layout)
        self._messages: list[Message] = []
        difference = tensor - other
        for each in self._parts:
            with exchange.run.stats.encoding():
                state = store.of(each.entries.layout, tensor.device)
                self._messages.append(
                    store.compressor.compress(each.entries.read(difference), state)
                )

    def send(
        self, peers: Sequence[int], index: int, weight: Tensor, turn: tuple[int, int] | None
    ) -> None:
        """Start to exchange the messages, and of each overlap the slice whose turn it is."""
        self._peers, self._weight, self._turn = peers, weight, turn
        sent = [
            (*message, self._in_turn(each.entries.read(self._other)))
            for each, message in zip(self._parts, self._messages, strict=True)
        ]
        self._slices = [message[-1] for message in sent]
        into = [[tuple(map(torch.empty_like, message)) for message in sent] for _ in peers]
        masses = weight.double().expand(len(peers))
        self._round: Round = self._exchange.swap(
            sent, peers, peers, into=into, round_index=index, masses=masses, parts=self._parts
        )

    def receive(self) -> None:
        """Wait for the messages."""
        self._received = self._round.wait()

    def decode(self) -> Tensor:
        """Return the average; a CorruptMessageError names the rank whose message is refused."""
        average, received = self._other.clone(), self._received.messages
        for place, part in enumerate(self._parts):
            if not part.entries.runs:  # of a rank without rows
                continue
            theirs: list[Any] = [messages[place] for messages in received]
            decoded = [
                [self._decode(part, message[:-1], peer)]
                for peer, message in zip(self._peers, theirs, strict=True)
            ]
            own = self._decode(part, self._messages[place], self._exchange.rank)
            pulled = self._mean(self._slices[place], [[message[-1]] for message in theirs])
            with part.entries.open(average) as values:
                values.add_(self._mean(own, decoded))
                self._in_turn(values).add_(pulled - self._slices[place])
        return average

    def _in_turn(self, tensor: Tensor) -> Tensor:
        turn, turns = self._turn or (0, 1)
        n = tensor.numel() if self._turn else 0
        return tensor[n * turn // turns : n * (turn + 1) // turns]

    def _decode(self, part: Overlap, message: Message, sender: int) -> Tensor:
        layout, device = part.entries.layout, self._other.device
        decoded = torch.empty(layout.numel, dtype=torch.float32, device=device)
        rank = self._exchange.run.global_rank(part.holders[sender])
        with self._exchange.run.stats.decoding(), with_sender(rank):
            return self._compressor.decompress(message, layout, decoded)

    def _mean(self, own: Tensor, others: Sequence[Sequence[Tensor]]) -> Tensor:
        received = Received(others, self._received.masses)
        return self._exchange.mean(own, self._weight, self._peers, received).to(own.dtype)
