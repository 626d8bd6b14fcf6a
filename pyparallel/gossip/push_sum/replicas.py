"""Copies of ranks' values that sender and receivers share: CHOCO-SGD's public copies."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compression import BufferLayout, Compressor, CompressorState, Message
from ...compression.quantizers.int_fp8 import fused_quantizer
from ...ops._corrupt import CorruptCounter
from ...training import check_like
from .layout import is_gap

Receivers = tuple[int, ...]
"""The ranks that receive the same messages."""


@functools.lru_cache(maxsize=64)
def _entries_of_gaps(layout: BufferLayout, device: torch.device) -> Tensor:
    """Return the numbers of the entries that belong to no parameter, (k,) int64."""
    pairs = zip(layout.offsets, layout.pieces, strict=True)
    gaps = [range(first, first + each.numel) for first, each in pairs if is_gap(each.name)]
    return torch.tensor([each for gap in gaps for each in gap], dtype=torch.int64, device=device)


@dataclass(eq=False)
class Replica:
    """A copy of one rank's values that is bitwise equal on that rank and on its receivers.

    A message is the compressed difference between the values and the replica. Sender and receivers
    add the decoded message, so what one message loses is part of the next difference. The first
    message is the uncompressed values.

    ``like`` is a buffer with the length, dtype and device of the values; ``rank`` owns them, and
    seeds what a compressor draws per rank. ``corrupt``, 0-d int64 on devices other than the CPU,
    counts corrupt entries of quantizers.
    """

    like: Tensor
    layout: BufferLayout
    compressor: Compressor
    rank: int
    corrupt: Tensor | None = None

    def __post_init__(self) -> None:
        self._quantizer = fused_quantizer(self.compressor)
        self.values: Tensor | None = None
        self._state: CompressorState | None = None

    @torch.no_grad()
    def encode_(self, values: Tensor, ratio: Tensor) -> Message:
        """Return the next message for the receivers, after the last one was delivered.

        Updates the replica, and the owner's values, which retain the residual: ``values += (values
        - replica) * ratio``, where the ratio, 0-d float64, is the mass sent over the mass kept.
        """
        if self.values is None:
            self.values = values.clone()
            return (self.values,)
        if self._quantizer is not None:
            state = self._get_state()
            return self._quantizer.compress_difference_(values, self.values, ratio, state)
        difference = values - self.values
        message = self.compressor.compress(
            difference, self._get_state(), self._unread_residual(difference)
        )
        self._add(message, self.values)
        own = values.float()
        values.copy_(own + (own - self.values.float()) * ratio.float())
        return message

    @torch.no_grad()
    def apply(self, message: Message) -> None:
        """Update the replica with a message; a CorruptMessageError of the CPU changes nothing."""
        if self.values is None:
            self.values = message[0].clone()
        elif self._quantizer is not None:
            self._quantizer.decompress(
                message, self.layout, self.values, accumulate=True, corrupt=self.corrupt
            )
        else:
            self._add(message, self.values)

    def _add(self, message: Message, values: Tensor) -> None:
        """Add a message; what codecs of signs decode in the gaps of parameters is left out."""
        self.compressor.decompress(message, self.layout, values, accumulate=True)
        values.index_fill_(0, _entries_of_gaps(self.layout, values.device), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the values and the state of the compressor."""
        state = self._state and {
            "parameters": self._state.parameter_state(),
            "common": self._state.common_state(),
        }
        return {"values": self.values, "compressor": state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.values = None if state["values"] is None else state["values"].to(self.like).clone()
        self._state = None
        if state["compressor"] is not None:
            saved = state["compressor"]
            self._get_state().load_state(saved["parameters"], saved["common"])

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Raise a ValueError, with the path, if a tensor of a state is of another shape."""
        if state["values"] is not None:
            check_like(state["values"], self.like, f"{path}.values")
        if (saved := state["compressor"]) is not None:
            probe = self.compressor.init(self.layout, self.like.device, self.rank)
            probe.load_state(saved["parameters"], saved["common"])

    def _unread_residual(self, difference: Tensor) -> Tensor | None:
        """Return a residual that is never read, with which unbiased compressors do not scale up.

        A sketch that is scaled up to be unbiased would make the replica diverge.
        """
        unbiased = self.compressor.unbiased
        return torch.zeros_like(difference, dtype=torch.float32) if unbiased else None

    def _get_state(self) -> CompressorState:
        if self._state is None:
            self._state = self.compressor.init(self.layout, self.like.device, self.rank)
        return self._state


class Replicas:
    """All replicas of one flat buffer on a rank: of its own values and of its in-neighbors'.

    There is one replica for each (sender, receivers): ranks that always receive together share it.
    A rank of ``Ring`` or ``Complete`` keeps one of its own and encodes once a round, however many
    neighbors there are. Over a topology's period a rank of ``OnePeerExponential(n)`` keeps log2(n)
    of its own and as many of others; of ``RandomMatching(n)`` with a long period n - 1 each.
    Replicas are allocated on first use. Each takes as much memory as the buffer.
    """

    def __init__(
        self, like: Tensor, layout: BufferLayout, compressor: Compressor, rank: int
    ) -> None:
        self._like = like
        self._layout = layout
        self._compressor = compressor
        self._quantizer = fused_quantizer(compressor)
        self._rank = rank
        self._corrupt = CorruptCounter(like.device)
        self._replicas: dict[tuple[int, Receivers], Replica] = {}
        self._message_template = compressor.compress(
            torch.zeros_like(like), compressor.init(layout, like.device, rank)
        )

    def of(self, sender: int, receivers: Receivers) -> Replica:
        """Return the replica of the values that ``sender`` sends to ``receivers``."""
        key = (sender, receivers)
        if key not in self._replicas:
            self._replicas[key] = Replica(
                self._like, self._layout, self._compressor, sender, self._corrupt.tensor
            )
        return self._replicas[key]

    @property
    def difference_lengths(self) -> list[int]:
        """Return the lengths in bytes of the tensors of a message after the first one."""
        return [each.numel() * each.element_size() for each in self._message_template]

    def encode_(self, receivers: Receivers, values: Tensor, ratio: Tensor) -> Message:
        """Return the next message of this rank's values, which retain the residual."""
        replica = self.of(self._rank, receivers)
        is_first = replica.values is None
        message = replica.encode_(values, ratio)
        lengths, expected = (
            [each.numel() for each in m] for m in (message, self._message_template)
        )
        if not is_first and lengths != expected:
            raise ValueError(
                f"compressor must make messages of one length, got {lengths} entries after "
                f"{expected} from {self._compressor}"
            )
        return message

    def allocate_message(self, replica: Replica) -> list[Tensor]:
        """Return empty tensors to receive the next message of a replica into."""
        expected = [self._like] if replica.values is None else self._message_template
        return [torch.empty_like(tensor) for tensor in expected]

    def apply_and_mix_(
        self, received: Sequence[tuple[Replica, Message]], z: Tensor, weight: Tensor, masses: Tensor
    ) -> bool:
        """Apply a message to each replica and average z, (n,), with them in one pass.

        Return whether that was done: only for quantizers, and not for a sender's first message. The
        weight and the masses, as for ``ops.mix_``, are not checked. On the CPU nothing is written
        if a CorruptMessageError is raised.
        """
        replicas = [replica.values for replica, _ in received if replica.values is not None]
        if self._quantizer is None or not received or len(replicas) < len(received):
            return False
        messages = [message for _, message in received]
        self._quantizer.mix_differences_(
            z, weight, messages, masses, replicas, self._corrupt.tensor
        )
        return True

    def corrupt_count(self, *, wait: bool) -> int:
        """Return how many entries of quantizers were left out as corrupt; 0 on the CPU.

        ``wait``: synchronize, to count the entries of all messages, not only of those decoded by
        now.
        """
        return int(self._corrupt.tensor) if wait else self._corrupt.num_counted()

    def reset(self) -> None:
        """Drop all replicas; all ranks must do so at the same time."""
        self._replicas = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all replicas; tensors may be the live ones."""
        return [
            {"sender": sender, "receivers": list(receivers), "replica": replica.state_dict()}
            for (sender, receivers), replica in self._replicas.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore what ``state_dict`` returned."""
        self.reset()
        for each in state:
            self.of(each["sender"], tuple(each["receivers"])).load_state_dict(each["replica"])

    def check_state(self, state: list[dict[str, Any]], path: str) -> None:
        """Raise a ValueError unless ranks are numbers and tensors have the shapes of here."""
        like = Replica(self._like, self._layout, self._compressor, self._rank)
        for index, each in enumerate(state):
            ranks = [each["sender"], *each["receivers"]]
            check_like(ranks, [0] * len(ranks), f"{path}.{index}.receivers")
            like.check_state(each["replica"], f"{path}.{index}.replica")
