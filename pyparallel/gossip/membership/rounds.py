"""PushSum rounds of one epoch, whose messages are acknowledged."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from ...comm.p2p import Pending, Transfer
from ...ops import mix_
from ..messages import NeighborExchange
from ..messages.exchange import RECEIPT
from ..push_sum import PushSum
from ..push_sum.buffer import RoundBuffer
from ..topology import Neighbors, Topology
from .ledger import Account


class AcknowledgedRounds(PushSum):
    """PushSum in which a sender knows what was merged.

    A round is merged by all buffers of a rank, or by none. The receivers' receipts, of 8 bytes, are
    awaited before the next round is sent, so a copy of one message is kept, as its sender's share
    of the ledger (`Account`). Ranks count rounds from 0.

    Args:
        buffers: of an exchange; each keeps the message that it sent last.
        topology: as of `PushSum`, and ``overlap``.
        members: identities of the group's ranks.
        account: this rank's, updated in every round.
        epoch: its number.
        scale: push-sum weights of this epoch, over those of the account.
        keeps_values: as of `PushSum`.
    """

    def __init__(
        self,
        buffers: Sequence[RoundBuffer],
        exchange: NeighborExchange,
        topology: Topology,
        overlap: int,
        members: Sequence[str],
        account: Account,
        epoch: int,
        scale: float,
        keeps_values: bool,
    ) -> None:
        super().__init__(buffers, exchange, topology, overlap, keeps_values=keeps_values)
        self._members, self._account = members, account
        self._epoch, self._scale = epoch, scale
        self._sent: Neighbors | None = None  # of the round in flight, also after an error
        self._receipts: Pending | None = None
        for buffer in buffers:
            buffer.weight.fill_(account.weight * scale)

    @property
    def weight(self) -> float:
        """The push-sum weight, which is that of all buffers between rounds."""
        return float(self._round_buffers[0].weight)

    @property
    def sent_messages(self) -> list[Tensor]:
        """The last message that was sent, of each buffer."""
        return [buffer.snapshot for buffer in self._round_buffers]

    @override
    def _neighbors_of(self, round_index: int) -> Neighbors:
        # After a change weights differ, and a complete round must be one of messages too.
        found = super()._neighbors_of(round_index)
        return replace(found, in_masses=(), is_complete=False)

    @override
    def before_step(self) -> None:
        self.await_receipts()
        super().before_step()

    @override
    def before_update(self) -> None:
        if self.weight != 1:
            self._numerators = self._round_buffers
            for buffer in self._numerators:
                buffer.to_numerator(keeps_values=self._keeps_values)

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        """Step each bucket, in one pass that copies it for the round after it."""
        is_free = self._sent is None and not self._account.sent  # all is acknowledged
        for index, buffer in enumerate(self._round_buffers):
            sends = self.run.counts.synchronizes and is_free
            buffer.step(partial(step_bucket, index), merges=False, sends=sends)

    @override
    def reset(self) -> None:
        self.await_receipts()
        super().reset()
        self._account.merge(self._epoch, -1, (), 1 / self._scale)

    def await_receipts(self) -> None:
        """Wait until the receivers of the last round have merged it; a PeerError if one cannot."""
        if self._receipts is not None:
            self._receipts.wait()
            self._receipts = None
            self._account.sent.clear()

    def move(self, neighbors: Neighbors) -> None:
        """Take a round with other neighbors than the topology's, all ranks together."""
        self.send(neighbors)
        self.merge()
        self.await_receipts()
        for buffer in self._round_buffers:
            buffer.release()

    @override
    def send(self, neighbors: Neighbors | None = None) -> None:
        """Send a round, to the topology's neighbors or others, once the last one is received."""
        self.await_receipts()
        neighbors = neighbors or self._neighbors_of(self.round_index)
        masses = self._round_buffers[0].outgoing_mass(neighbors.shares).tolist()
        receivers = [self._members[peer] for peer in neighbors.out_peers]
        sent = {peer: mass / self._scale for peer, mass in zip(receivers, masses, strict=True)}
        kept = (self.weight - sum(masses)) / self._scale
        for buffer in self._round_buffers:  # of all, as sending one may fail
            buffer.take_snapshot()
        self._account.send(self._epoch, self.round_index, sent, kept)
        self._sent, self._steps_in_flight = neighbors, 0
        with self._keeping_failures():
            for buffer in self._round_buffers:
                buffer.send(neighbors, self.round_index)

    @override
    def merge(self) -> None:
        """Merge the round in flight, if any, once all its messages have arrived.

        After a PeerError nothing is merged, and the account says what was sent, and that it was not
        acknowledged.
        """
        if self._sent is None:
            return
        self.wait()
        if not self.weight:  # what a member that joins has is not averaged: 0 times nan is nan
            for buffer in self._round_buffers:
                buffer.values.zero_()
        with self._keeping_failures():
            for buffer in self._round_buffers:
                buffer.merge()
        neighbors, index, self._sent = self._sent, self.round_index, None
        self._staleness, self.round_index = self._steps_in_flight, index + 1
        senders = [self._members[peer] for peer in neighbors.in_peers]
        self._account.merge(self._epoch, index, senders, self.weight / self._scale)
        self._exchange_receipts(neighbors, index)
        self.exchange.headers.raise_nonfinite()

    def merge_returned(self, messages: Sequence[Tensor], mass: float) -> None:
        """Merge what this rank has sent in an earlier epoch, whose mass has come back."""
        for buffer, message in zip(self._round_buffers, messages, strict=True):
            mix_(buffer.values, buffer.weight, [message], buffer.weight.new_tensor([mass]))
        self._account.merge(self._epoch, -1, (), self.weight / self._scale)

    def release(self) -> None:
        """Release what keeps the group's connections; the last message stays."""
        self._receipts = None
        for buffer in self._round_buffers:
            buffer.release()

    def _exchange_receipts(self, neighbors: Neighbors, index: int) -> None:
        receipt = torch.full((1,), float(index), dtype=torch.float64, device="cpu")
        self._receipts = self.exchange.start(
            [Transfer(peer, receipt, RECEIPT) for peer in neighbors.in_peers],
            [Transfer(peer, torch.empty_like(receipt), RECEIPT) for peer in neighbors.out_peers],
        )
