"""PushSum over flat buffers: mechanism, without an opinion on who the neighbors are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Exchange, PeerError, Round, Transfer
from ..ops import mix_
from .topology import Topology


class PushSum:
    """The de-biased parameters z of a rank, its mass w, and rounds of averaging with neighbors.

    Only z and w are kept. The message is z itself, with the mass that goes along beside it; the
    numerator x = w * z of the paper exists only while an optimizer steps on it.

    A round is ``send``, whenever the caller likes something else, ``merge``; ``mix`` is both at
    once. In between its messages travel, and their mass is missing from w.

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: the way to the neighbors.
        topology: who they are at each round, and which share of the mass they get.
        snapshot: whether z may change while a round is under way: then a copy of it is sent.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        exchange: Exchange,
        topology: Topology,
        *,
        snapshot: bool = False,
    ) -> None:
        self.buffers = list(buffers)
        self.exchange = exchange
        self.topology = topology
        self.round_index = 0
        self._under_way: Round | None = None
        self._num_received = 0
        self._holds_numerator = False
        self._failure: PeerError | None = None
        device = self.buffers[0].device
        self.weight = torch.ones((), dtype=torch.float64, device=device)
        self._outgoing = [torch.empty_like(each) for each in self.buffers] if snapshot else None
        self._sent_masses = torch.zeros(0, dtype=torch.float64, device=device)
        self._inboxes: list[list[Tensor]] = []
        self._received_masses = torch.zeros(0, dtype=torch.float64, device=device)

    @property
    def in_flight(self) -> bool:
        """Whether a round has been sent and not merged."""
        return self._under_way is not None

    def mix(self) -> None:
        """Send to this round's out-neighbors and average with what its in-neighbors sent.

        Raises:
            PeerError: a neighbor is gone. z and w of this rank are then as before the round, but
                other neighbors may have merged what it sent: every later round raises the same.
        """
        self.send()
        self.merge()

    @torch.no_grad()
    def send(self) -> None:
        """Let a round begin: the messages leave, and their mass with them.

        Without a snapshot the buffers must not change until ``merge`` has returned.

        Raises:
            PeerError: a neighbor is known to be gone.
        """
        if self._failure is not None:
            raise self._failure
        rank, index = self.exchange.rank, self.round_index
        in_peers = self.topology.in_peers(rank, index)
        self._make_room(len(in_peers))
        masses = self._received_masses[: len(in_peers)]
        sent_masses, messages = self._split_mass(self.topology.shares(rank, index)), self._take()
        sends = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(self.topology.out_peers(rank, index))
            for tensor in (sent_masses[slot : slot + 1], *messages)
        ]
        receives = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(in_peers)
            for tensor in (masses[slot : slot + 1], *self._inboxes[slot])
        ]
        with torch.profiler.record_function("pyparallel::gossip_send"):
            try:
                self._under_way = self.exchange.start(sends, receives, step=index)
            except PeerError as error:
                self._failure = error
                raise
        self._num_received = len(in_peers)
        self.weight -= sent_masses.sum()

    @torch.no_grad()
    def merge(self) -> None:
        """Wait for the messages of the round under way, if there is one, and average with them.

        Raises:
            PeerError: a neighbor is gone, as ``mix`` says.
        """
        self.arrive()
        if self._under_way is None:
            return
        with torch.profiler.record_function("pyparallel::gossip_merge"):
            self.weight.copy_(self._merged(self.buffers))
        self._under_way = None
        self.round_index += 1

    def arrive(self) -> None:
        """Wait for the messages of the round under way, if there is one, and leave them be."""
        if self._under_way is None:
            return
        with torch.profiler.record_function("pyparallel::gossip_wait"):
            try:
                self._under_way.wait()
            except PeerError as error:
                self._failure = error
                self._under_way = None
                self.weight += self._sent_masses.sum()
                raise

    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """What z and w would be if the round under way were merged now; nothing changes."""
        self.arrive()
        if self._under_way is None:
            return self.buffers, self.weight
        copies = [buffer.clone() for buffer in self.buffers]
        return copies, self._merged(copies)

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Turn z into x = w * z, in place; nothing to do where w is 1 by construction."""
        if self.in_flight or not self.topology.regular:
            self._holds_numerator = True
            for buffer in self.buffers:
                buffer.mul_(self.weight)

    @torch.no_grad()
    def to_debiased(self) -> None:
        """Turn x back into z = x / w, in place; nothing to do where the buffers hold z."""
        if self._holds_numerator:
            self._holds_numerator = False
            for buffer in self.buffers:
                buffer.div_(self.weight)

    def _take(self) -> list[Tensor]:
        """What is sent: z, or a copy that lasts."""
        if self._outgoing is None:
            return self.buffers
        for copy, buffer in zip(self._outgoing, self.buffers, strict=True):
            copy.copy_(buffer)
        return self._outgoing

    def _split_mass(self, shares: Sequence[float]) -> Tensor:
        if len(self._sent_masses) != len(shares):
            self._sent_masses = self._sent_masses.new_zeros(len(shares))
        for slot, share in enumerate(shares):  # numbers of Python's: nothing waits for a copy
            torch.mul(self.weight, share, out=self._sent_masses[slot])
        return self._sent_masses

    def _make_room(self, num_messages: int) -> None:
        while len(self._inboxes) < num_messages:
            self._inboxes.append([torch.empty_like(buffer) for buffer in self.buffers])
            self._received_masses = self._received_masses.new_zeros(len(self._inboxes))

    def _merged(self, buffers: Sequence[Tensor]) -> Tensor:
        """Average buffers with the messages that have arrived; the weight they have then."""
        masses = self._received_masses[: self._num_received]
        for index, buffer in enumerate(buffers):
            weight = self.weight.clone()  # each call adds the masses to it
            messages = [inbox[index] for inbox in self._inboxes[: self._num_received]]
            mix_(buffer, weight, messages, masses)
        return weight
