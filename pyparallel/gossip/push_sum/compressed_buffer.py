"""PushSum of one flat buffer with compressed messages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm import PeerError
from ...comm.profiling import profiled
from ...compression import BufferLayout, Compressor, CorruptMessageError, Message
from ...ops.mix import mix_unchecked
from ...training import check_like
from ..messages import NeighborExchange
from ..topology import Neighbors, Topology
from .buffer import RoundBuffer, total_mass
from .replicas import Replica, Replicas

_DISAGREE = "the replicas of the two ranks no longer agree; stop the run and load a checkpoint"


def choco_sgp(
    z: Tensor, w: Tensor, replica: Tensor, compress: Callable[[Tensor], Tensor], mixing: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a round of PushSum with compressed messages on all n ranks; return z, w and replicas.

    Args:
        z: (n, d) de-biased values, a row for each rank.
        w: (n, 1) push-sum weights.
        replica: (n, d) what the receivers know of z; z itself after a first message.
        compress: C, which returns what a receiver decodes of each row.
        mixing: (n, n) P, whose columns sum to 1; p_ij is the share that j sends to i.
    """
    replica = replica + compress(z - replica)  # send q_i = C(z_i - z^_i); z^_i <- z^_i + q_i
    masses = (mixing - mixing.diag().diag()) * w.T  # m_ij = p_ij w_j, sent with q_j
    sent = masses.sum(0).view(-1, 1)
    z = z + (z - replica) * sent / (w - sent)  # what q_i leaves out stays with i
    w = w - sent
    merged = w + masses.sum(1, keepdim=True)  # w_i <- w_i - sum_j m_ji + sum_j m_ij
    return (w * z + masses @ replica) / merged, merged, replica


@dataclass(frozen=True)
class _PendingMessage:
    """A message being received, its sender, the replica it updates, and whether as its first."""

    sender: int
    replica: Replica
    message: Message
    is_first: bool


class CompressedBuffer(RoundBuffer):
    """De-biased values z, push-sum weight w, and one compressed round at a time with neighbors.

    Messages are deltas against a replica of z that sender and receivers share (`Replica`), as in
    CHOCO-SGD (Koloskova et al., ICML 2019, arXiv 1902.00340); receivers average with the replica
    instead of z. To conserve mass, sending the mass m takes only m * replica from the numerator;
    the sender keeps the residual: ``z += (z - replica) * m / (w - m)``, then ``w -= m``. With any
    compressor the sum of w * z over ranks and messages is conserved up to rounding.
    The compressor is the same on all ranks, with ``fixed_length``.
    """

    def __init__(
        self,
        values: Tensor,
        exchange: NeighborExchange,
        topology: Topology,
        compressor: Compressor,
        layout: BufferLayout,
        *,
        takes_back: bool = True,
    ) -> None:
        super().__init__(values, takes_back=takes_back)
        self._exchange = exchange
        self._topology = topology
        self._replicas = Replicas(values, layout, compressor, exchange.rank)
        first, others = values.nbytes, self._replicas.difference_lengths
        exchange.reserve([[first], others], values.device)
        self.message_lengths = f"{first} for a first message and {others} for others"
        self._step = 0
        self._sent_replica: Replica | None = None
        self._sent_mass = torch.zeros_like(self.weight)
        self._pending_messages: list[_PendingMessage] = []
        self._received_replicas: list[Replica] = []

    @override
    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round; z retains the residual.

        After a PeerError z and w are as before, but replicas differ between ranks: no other round
        can follow.
        """
        masses = self.outgoing_mass(neighbors.shares)
        self._step, self._sent_mass = step, total_mass(masses)
        is_first, message = self._encode(neighbors.out_peers)
        self._prepare_receives(neighbors.in_peers, step)
        self.weight -= self._sent_mass
        with self._cancelling():
            self._round = self._exchange.swap(
                message,
                neighbors.out_peers,
                neighbors.in_peers,
                into=[each.message for each in self._pending_messages],
                round_index=step,
                masses=masses,
                masses_in=neighbors.in_masses,
                is_difference=not is_first,
                are_differences=[not each.is_first for each in self._pending_messages],
            )
        self.in_flight = True

    @override
    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the messages of the round in flight, if any, and apply them to the replicas.

        After a PeerError or a CorruptMessageError z and w are as before the round, but other
        neighbors may have merged what this rank sent, and no other round can follow. On a GPU
        corrupt entries were left out, in this round or an earlier one.
        """
        with self._cancelling():
            self._receive()
            self._apply_messages()
        self._raise_if_counted(wait=True)

    @override
    @torch.no_grad()
    def merge(self) -> None:
        self._raise_if_counted(wait=False)
        with self._cancelling():
            self._receive()
            if self._pending_messages and not self._apply_and_average():
                self._apply_messages()
        if self.in_flight:
            with profiled("pyparallel::gossip_merge"):
                self._average(self.values, self.weight)
            self.in_flight = False

    @property
    @override
    def snapshot(self) -> Tensor:
        replica = self._sent_replica
        if replica is None or replica.values is None:
            return self.values.clone()
        return replica.values

    @override
    def take_snapshot(self) -> None:
        self._sent_replica = None  # z, until it is encoded

    @override
    def release(self) -> None:
        super().release()
        self._pending_messages = []
        self._replicas.reset()

    @override
    def reset_weight(self) -> None:
        super().reset_weight()
        self._replicas.reset()

    @override
    def state_dict(self) -> dict[str, Any]:
        self.wait()
        in_flight = {"step": self._step, "masses": self._received_masses}
        return {
            "weight": self.weight,
            "replicas": self._replicas.state_dict(),
            "in_flight": in_flight if self.in_flight else None,
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self.weight.copy_(state["weight"])
        self._replicas.load_state_dict(state["replicas"])
        self.in_flight = state["in_flight"] is not None
        if self.in_flight:
            self._step = state["in_flight"]["step"]
            self._received_masses = state["in_flight"]["masses"].to(self.weight)
            senders = self._topology.in_peers(self._exchange.rank, self._step)
            self._received_replicas = [self._replica_of(sender, self._step) for sender in senders]

    @override
    def check_state(self, state: dict[str, Any], num_ranks: int, path: str) -> None:
        super().check_state(state, num_ranks, path)
        self._replicas.check_state(state["replicas"], f"{path}.replicas")
        if (in_flight := state["in_flight"]) is not None:
            check_like(in_flight["step"], 0, f"{path}.in_flight.step")
            senders = self._topology.in_peers(self._exchange.rank, in_flight["step"])
            own = self.weight.new_zeros(len(senders))
            check_like(in_flight["masses"], own, f"{path}.in_flight.masses")

    @override
    def _average(self, values: Tensor, weight: Tensor) -> None:
        found = [each.values for each in self._received_replicas if each.values is not None]
        mix_unchecked(values, weight, found, self._received_masses)

    def _replica_of(self, sender: int, step: int) -> Replica:
        return self._replicas.of(sender, self._topology.out_peers(sender, step))

    def _encode(self, out_peers: tuple[int, ...]) -> tuple[bool, Message]:
        """Return whether the message is its replica's first, and the message."""
        self._sent_replica = None
        if not out_peers:
            return True, ()
        self._sent_replica = self._replicas.of(self._exchange.rank, out_peers)
        is_first = self._sent_replica.values is None
        with profiled("pyparallel::gossip_encode"):
            ratio = self._sent_mass / (self.weight - self._sent_mass)
            return is_first, self._replicas.encode_(out_peers, self.values, ratio)

    def _prepare_receives(self, in_peers: tuple[int, ...], step: int) -> None:
        self._received_replicas = [self._replica_of(peer, step) for peer in in_peers]
        self._pending_messages = [
            _PendingMessage(
                peer,
                replica,
                tuple(self._replicas.allocate_message(replica)),
                replica.values is None,
            )
            for peer, replica in zip(in_peers, self._received_replicas, strict=True)
        ]

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        try:
            yield
        except (PeerError, CorruptMessageError):
            self._round, self.in_flight, self._pending_messages = None, False, []
            self._cancel_send()
            raise

    def _apply_and_average(self) -> bool:
        """Apply the pending messages and average in one pass; return whether that could be done."""
        received = [(pending.replica, pending.message) for pending in self._pending_messages]
        try:
            with profiled("pyparallel::gossip_merge"):
                done = self._replicas.apply_and_mix_(
                    received, self.values, self.weight, self._received_masses
                )
        except CorruptMessageError:
            self._apply_messages()  # one at a time: raises the error that names the sender
            raise
        if done:
            self._pending_messages, self.in_flight = [], False
        return done

    def _apply_messages(self) -> None:
        with profiled("pyparallel::gossip_decode"):
            while self._pending_messages:
                pending = self._pending_messages[0]
                try:
                    pending.replica.apply(pending.message)
                except CorruptMessageError as error:
                    run, there = self._exchange.run, self._exchange.run.global_rank(pending.sender)
                    raise CorruptMessageError(
                        f"{run.place(self._step)}: messages must be valid for their compressor, "
                        f"got a corrupt one on edge {there} -> {self._exchange.me} from rank "
                        f"{there} ({error}): {_DISAGREE}"
                    ) from error
                del self._pending_messages[0]

    def _raise_if_counted(self, *, wait: bool) -> None:
        if count := self._replicas.corrupt_count(wait=wait):
            raise CorruptMessageError(
                f"{self._exchange.run.place(self._step)}: "
                f"messages must be valid for their compressor, got {count} corrupt entries up to "
                f"now, which were left out: {_DISAGREE}"
            )

    def _cancel_send(self) -> None:
        """Undo a send's changes of z and w, also if an optimizer has changed z since."""
        replica = self._sent_replica
        if self._takes_back and replica is not None and replica.values is not None:
            mix_unchecked(self.values, self.weight, [replica.values], self._sent_mass.view(1))
            self._sent_replica = None
