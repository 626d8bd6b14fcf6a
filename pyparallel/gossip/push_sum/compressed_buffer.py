"""PushSum of one flat buffer with compressed messages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...comm import PeerError
from ...comm.profiling import profiled
from ...compression import BufferLayout, Compressor, CorruptMessageError, Message
from ...compression.layout import Entries
from ...ops.mix import mix_unchecked
from ...training import check_like
from ..messages import NeighborExchange
from ..messages.replica_rounds import as_one_replica
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
    """A message being received of each part, its sender, the replicas, and whether as the first."""

    sender: int
    replicas: list[Replica]
    messages: list[Message]
    is_first: bool


class CompressedBuffer(RoundBuffer):
    """De-biased values z, push-sum weight w, and one compressed round at a time with neighbors.

    Messages are deltas against a replica of z that sender and receivers share (`Replica`), as in
    CHOCO-SGD (Koloskova et al., ICML 2019, arXiv 1902.00340); receivers average with the replica
    instead of z. To conserve mass, sending the mass m takes only m * replica from the numerator;
    the sender keeps the residual: ``z += (z - replica) * m / (w - m)``, then ``w -= m``. With any
    compressor the sum of w * z over ranks and messages is conserved up to rounding.
    The compressor is the same on all ranks, with ``fixed_length``.

    Between replicas of unequal numbers of shards each `Overlap` is a part of the values, with
    messages and replicas of its own; otherwise the values are one part.
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
        overlaps = exchange.overlaps
        self._overlaps = None if overlaps is None else overlaps.split(layout)
        whole = Entries(layout, ((0, values.numel()),))
        self._parts = [each.entries for each in self._overlaps] if self._overlaps else [whole]
        self._replicas = [
            Replicas(values[: each.layout.numel], each.layout, compressor, exchange.rank)
            for each in self._parts
        ]
        self.follows_layouts = not self._overlaps
        if not self._overlaps:
            first, others = values.nbytes, self._replicas[0].difference_lengths
            exchange.reserve([[first], others], values.device)
            self.message_lengths = f"{first} for a first message and {others} for others"
        self._step = 0
        self._sent_replicas: list[Replica] = []  # of each part
        self._sent_mass = torch.zeros_like(self.weight)
        self._pending_messages: list[_PendingMessage] = []
        self._received_replicas: list[list[Replica]] = []

    @override
    @torch.no_grad()
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round; z retains the residual.

        After a PeerError z and w are as before, but replicas differ between ranks: no other round
        can follow.
        """
        masses = self.outgoing_mass(neighbors.shares)
        self._step, self._sent_mass = step, total_mass(masses)
        is_first, messages = self._encode(neighbors.out_peers)
        self._prepare_receives(neighbors.in_peers, step)
        into = [each.messages for each in self._pending_messages]
        self.weight -= self._sent_mass
        with self._cancelling():
            self._round = self._exchange.swap(
                messages if self._overlaps or not messages else messages[0],
                neighbors.out_peers,
                neighbors.in_peers,
                into=into if self._overlaps else [each[0] for each in into],
                round_index=step,
                masses=masses,
                masses_in=neighbors.in_masses,
                is_difference=not is_first,
                are_differences=[not each.is_first for each in self._pending_messages],
                parts=self._overlaps,
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
            if self._pending_messages and (self._overlaps or not self._apply_and_average()):
                self._apply_messages()
        if self.in_flight:
            with profiled("pyparallel::gossip_merge"):
                self._average(self.values, self.weight)
            self.in_flight = False

    @property
    @override
    def snapshot(self) -> Tensor:
        sent = [each.values for each in self._sent_replicas if each.values is not None]
        if sent and not self._overlaps:
            return sent[0]
        values = self.values.clone()
        for part, of_part in zip(self._parts, sent, strict=False):
            part.write(values, of_part)
        return values

    @override
    def take_snapshot(self) -> None:
        self._sent_replicas = []  # z, until it is encoded

    @override
    def release(self) -> None:
        super().release()
        self._pending_messages = []
        for each in self._replicas:
            each.reset()

    @override
    def reset_weight(self) -> None:
        super().reset_weight()
        for each in self._replicas:
            each.reset()

    @override
    def state_dict(self) -> dict[str, Any]:
        self.wait()
        in_flight = {"step": self._step, "masses": self._received_masses}
        mirrors: list[Any] = [each.state_dict() for each in self._replicas]
        return {
            "weight": self.weight,
            "replicas": mirrors if self._overlaps else mirrors[0],
            "in_flight": in_flight if self.in_flight else None,
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self.weight.copy_(state["weight"])
        for each, mirrors in self._mirrors_of(state):
            each.load_state_dict(mirrors)
        self.in_flight = state["in_flight"] is not None
        if self.in_flight:
            self._step = state["in_flight"]["step"]
            self._received_masses = state["in_flight"]["masses"].to(self.weight)
            senders = self._topology.in_peers(self._exchange.rank, self._step)
            self._received_replicas = [self._replicas_of(sender, self._step) for sender in senders]

    @override
    def check_state(self, state: dict[str, Any], num_ranks: int, path: str) -> None:
        super().check_state(state, num_ranks, path)
        for each, mirrors in self._mirrors_of(state):
            each.check_state(mirrors, f"{path}.replicas")
        if (in_flight := state["in_flight"]) is not None:
            check_like(in_flight["step"], 0, f"{path}.in_flight.step")
            senders = self._topology.in_peers(self._exchange.rank, in_flight["step"])
            own = self.weight.new_zeros(len(senders))
            check_like(in_flight["masses"], own, f"{path}.in_flight.masses")

    @override
    def _average(self, values: Tensor, weight: Tensor) -> None:
        self._mix(values, weight, self._received_replicas, self._received_masses)

    def _mix(
        self, values: Tensor, weight: Tensor, replicas: Sequence[Sequence[Replica]], masses: Tensor
    ) -> None:
        """Do ``mix_`` with the replicas of each message, part by part."""
        before = weight if len(self._parts) == 1 else weight.clone()
        for index, part in enumerate(self._parts):
            weight.copy_(before)
            found = [each[index].values for each in replicas]
            with part.open(values) as z:
                mix_unchecked(z, weight, [each for each in found if each is not None], masses)

    def _mirrors_of(self, state: dict[str, Any]) -> list[tuple[Replicas, list[dict[str, Any]]]]:
        """Return the replicas of each part, and their state."""
        mirrors = state["replicas"] if self._overlaps else [state["replicas"]]
        return list(zip(self._replicas, mirrors, strict=True))

    def _replicas_of(self, sender: int, step: int) -> list[Replica]:
        receivers = self._topology.out_peers(sender, step)
        return [each.of(sender, receivers) for each in self._replicas]

    def _encode(self, out_peers: tuple[int, ...]) -> tuple[bool, list[Message]]:
        """Return whether the messages are their replicas' first, and that of each part."""
        self._sent_replicas = []
        if not out_peers:
            return True, []
        self._sent_replicas = [each.of(self._exchange.rank, out_peers) for each in self._replicas]
        is_first, messages = self._sent_replicas[0].values is None, []
        with profiled("pyparallel::gossip_encode"):
            ratio = self._sent_mass / (self.weight - self._sent_mass)
            for part, replicas in zip(self._parts, self._replicas, strict=True):
                with part.open(self.values) as z:
                    messages.append(replicas.encode_(out_peers, z, ratio))
        return is_first, messages

    def _prepare_receives(self, in_peers: tuple[int, ...], step: int) -> None:
        self._received_replicas = [self._replicas_of(peer, step) for peer in in_peers]
        self._pending_messages = []
        for peer, replicas in zip(in_peers, self._received_replicas, strict=True):
            pairs = zip(self._replicas, replicas, strict=True)
            messages: list[Message] = [tuple(each.allocate_message(one)) for each, one in pairs]
            is_first = replicas[0].values is None
            self._pending_messages.append(_PendingMessage(peer, replicas, messages, is_first))

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
        received = [(each.replicas[0], each.messages[0]) for each in self._pending_messages]
        try:
            with profiled("pyparallel::gossip_merge"):
                done = self._replicas[0].apply_and_mix_(
                    received, self.values, self.weight, self._received_masses
                )
        except CorruptMessageError:
            self._apply_messages()  # one at a time: raises the error that names the sender
            raise
        if done:
            self._pending_messages, self.in_flight = [], False
        return done

    def _apply_messages(self) -> None:
        run, together = self._exchange.run, bool(self._overlaps and self._pending_messages)
        with profiled("pyparallel::gossip_decode"), as_one_replica(run, together):
            while self._pending_messages:
                pending = self._pending_messages[0]
                for index, replica in enumerate(pending.replicas):
                    try:
                        replica.apply(pending.messages[index])
                    except CorruptMessageError as error:
                        there = pending.sender
                        if self._overlaps:
                            there = self._overlaps[index].holders[there]
                        there = run.global_rank(there)
                        raise CorruptMessageError(
                            f"{run.place(self._step)}: messages must be valid for their "
                            f"compressor, got a corrupt one on edge {there} -> "
                            f"{self._exchange.me} from rank {there} ({error}): {_DISAGREE}"
                        ) from error
                del self._pending_messages[0]

    def _raise_if_counted(self, *, wait: bool) -> None:
        if count := sum(each.corrupt_count(wait=wait) for each in self._replicas):
            raise CorruptMessageError(
                f"{self._exchange.run.place(self._step)}: "
                f"messages must be valid for their compressor, got {count} corrupt entries up to "
                f"now, which were left out: {_DISAGREE}"
            )

    def _cancel_send(self) -> None:
        """Undo a send's changes of z and w, also if an optimizer has changed z since."""
        if self._takes_back and self._sent_replicas:
            self._mix(self.values, self.weight, [self._sent_replicas], self._sent_mass.view(1))
            self._sent_replicas = []
