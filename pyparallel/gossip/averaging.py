"""PushSum over flat buffers: mechanism, without an opinion on who the neighbors are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Exchange, PeerError, Transfer
from ..ops import mix_
from .topology import Topology


class PushSum:
    """The de-biased parameters z of a rank, its mass w, and rounds of averaging with neighbors.

    Only z and w are kept. The message is z itself, with the mass that goes along beside it; the
    numerator x = w * z of the paper exists only while an optimizer steps on it.

    Args:
        buffers: flat buffers that hold z; written in place.
        exchange: the way to the neighbors.
        topology: who they are at each round, and which share of the mass they get.
    """

    def __init__(self, buffers: Sequence[Tensor], exchange: Exchange, topology: Topology) -> None:
        self.buffers = list(buffers)
        self.exchange = exchange
        self.topology = topology
        self.round_index = 0
        self._holds_numerator = False
        self._failure: PeerError | None = None
        device = self.buffers[0].device
        self.weight = torch.ones((), dtype=torch.float64, device=device)
        self._sent_masses = torch.zeros(0, dtype=torch.float64, device=device)
        self._inboxes: list[list[Tensor]] = []
        self._received_masses = torch.zeros(0, dtype=torch.float64, device=device)

    @torch.no_grad()
    def mix(self) -> None:
        """Send to this round's out-neighbors and average with what its in-neighbors sent.

        Raises:
            PeerError: a neighbor is gone. z and w of this rank are then as before the round, but
                other neighbors may have merged what it sent: every later round raises the same.
        """
        if self._failure is not None:
            raise self._failure
        rank, index = self.exchange.rank, self.round_index
        out_peers = self.topology.out_peers(rank, index)
        in_peers = self.topology.in_peers(rank, index)
        self._make_room(len(in_peers))
        masses = self._received_masses[: len(in_peers)]
        sent_masses = self._split_mass(self.topology.shares(rank, index))

        sends = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(out_peers)
            for tensor in (sent_masses[slot : slot + 1], *self.buffers)
        ]
        receives = [
            Transfer(peer, tensor)
            for slot, peer in enumerate(in_peers)
            for tensor in (masses[slot : slot + 1], *self._inboxes[slot])
        ]
        try:
            self.exchange.start(sends, receives, step=index).wait()
        except PeerError as error:
            self._failure = error
            raise

        self.weight -= sent_masses.sum()
        self._merge(masses)
        self.round_index += 1

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Turn z into x = w * z, in place; nothing to do where w is 1 by construction."""
        if not self.topology.regular:
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

    def _split_mass(self, shares: Sequence[float]) -> Tensor:
        if len(self._sent_masses) < len(shares):
            self._sent_masses = self._sent_masses.new_zeros(len(shares))
        for slot, share in enumerate(shares):  # numbers of Python's: nothing waits for a copy
            torch.mul(self.weight, share, out=self._sent_masses[slot])
        return self._sent_masses[: len(shares)]

    def _make_room(self, num_messages: int) -> None:
        while len(self._inboxes) < num_messages:
            self._inboxes.append([torch.empty_like(buffer) for buffer in self.buffers])
            self._received_masses = self._received_masses.new_zeros(len(self._inboxes))

    def _merge(self, masses: Tensor) -> None:
        kept = self.weight.clone()
        for index, buffer in enumerate(self.buffers):
            self.weight.copy_(kept)  # each call adds the masses to it
            messages = [inbox[index] for inbox in self._inboxes[: len(masses)]]
            mix_(buffer, self.weight, messages, masses)
