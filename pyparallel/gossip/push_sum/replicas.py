"""All mirrors of one flat buffer that a rank keeps: its own, and those of whom it listens to."""

from typing import Any

import torch
from torch import Tensor

from ...compression import BufferLayout, Compressor, Message
from .replica import Replica

Audience = tuple[int, ...]
"""The ranks that hear the same messages."""


class Replicas:
    """A mirror for each audience of this rank, and for each one of others that it belongs to.

    Ranks that are always told together share a mirror: a rank of ``Ring`` or ``Complete`` keeps one
    of its own, and encodes once a round, however many neighbors listen. Over a topology's period a
    rank of ``OnePeerExponential(n)`` talks to log2(n) audiences of one and listens to as many; of
    ``RandomMatching(n)`` with a long period to n - 1 each. Mirrors are made when they are first
    needed. Each takes as much memory as the buffer.

    Args:
        like: a buffer of the values' length, dtype and device.
        layout: of the values.
        compressor: of the messages.
        rank: this one.
    """

    def __init__(
        self, like: Tensor, layout: BufferLayout, compressor: Compressor, rank: int
    ) -> None:
        self._like = like
        self._layout = layout
        self._compressor = compressor
        self._rank = rank
        self._mirrors: dict[tuple[int, Audience], Replica] = {}
        self._blank = compressor.compress(
            torch.zeros_like(like), compressor.init(layout, like.device, rank)
        )

    def of(self, teller: int, audience: Audience) -> Replica:
        """What a rank has told this audience."""
        key = (teller, audience)
        if key not in self._mirrors:
            self._mirrors[key] = Replica(self._like, self._layout, self._compressor, teller)
        return self._mirrors[key]

    def tell(self, audience: Audience, values: Tensor) -> Message:
        """What an audience is to hear now of this rank's values.

        Raises:
            ValueError: a message of another length than listeners are to expect.
        """
        mirror = self.of(self._rank, audience)
        is_first = mirror.values is None
        message = mirror.tell(values)
        lengths, expected = ([each.numel() for each in m] for m in (message, self._blank))
        if not is_first and lengths != expected:
            raise ValueError(
                f"compressor must make messages of one length, got {lengths} entries after "
                f"{expected} from {self._compressor}"
            )
        return message

    def room_for(self, mirror: Replica) -> list[Tensor]:
        """Where the next message of a mirror can be received."""
        coming = [self._like] if mirror.values is None else self._blank
        return [torch.empty_like(tensor) for tensor in coming]

    def forget(self) -> None:
        """Begin anew; all ranks do so at the same time."""
        self._mirrors = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Of all mirrors; tensors may be the live ones."""
        return [
            {"teller": teller, "audience": list(audience), "mirror": mirror.state_dict()}
            for (teller, audience), mirror in self._mirrors.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.forget()
        for each in state:
            self.of(each["teller"], tuple(each["audience"])).load_state_dict(each["mirror"])
