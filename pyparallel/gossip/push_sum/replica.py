"""What a rank has told others of its values: the same tensor at both ends of an edge."""

from typing import Any

import torch
from torch import Tensor

from ...compression import BufferLayout, Compressor, CompressorState, Message


class Replica:
    """An estimate of one rank's values that it and all who listen to it share, bit for bit.

    A message is the compressed difference between the values and the mirror; teller and listeners
    add what it decodes to, so what one message loses is in the next one's difference. The first
    message is the values themselves, in full: nobody needs to have known them before.

    Args:
        like: a buffer of the values' length, dtype and device.
        layout: of the values.
        compressor: of the differences; with messages of lengths that depend on the layout alone.
        rank: whose values these are, for what ranks draw apart.
    """

    def __init__(
        self, like: Tensor, layout: BufferLayout, compressor: Compressor, rank: int
    ) -> None:
        self._like = like
        self._layout = layout
        self._compressor = compressor
        self._rank = rank
        self.values: Tensor | None = None
        self._state: CompressorState | None = None

    @torch.no_grad()
    def tell(self, values: Tensor) -> Message:
        """What the listeners are to hear now; for the rank whose values these are.

        The message must have arrived before the next one is made.
        """
        if self.values is None:
            self.values = values.clone()
            return (self.values,)
        difference = values - self.values
        message = self._compressor.compress(difference, self._known_state(), self._lost(difference))
        self._compressor.decompress(message, self._layout, self.values, accumulate=True)
        return message

    @torch.no_grad()
    def hear(self, message: Message) -> None:
        """Take over what the teller has told.

        Raises:
            CorruptMessageError: what it cannot have told; on the CPU the mirror is as it was.
        """
        if self.values is None:
            self.values = message[0].clone()
        else:
            self._compressor.decompress(message, self._layout, self.values, accumulate=True)

    def state_dict(self) -> dict[str, Any]:
        """The values, and what the compressor remembers."""
        state = self._state and {
            "by_name": self._state.parameter_state(),
            "of_all": self._state.common_state(),
        }
        return {"values": self.values, "compressor": state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.values = None if state["values"] is None else state["values"].to(self._like).clone()
        self._state = None
        if state["compressor"] is not None:
            saved = state["compressor"]
            self._known_state().load_state(saved["by_name"], saved["of_all"])

    def _lost(self, difference: Tensor) -> Tensor | None:
        """A residual that nobody reads.

        A sketch that is scaled up to be unbiased would lead the mirror astray; where something
        keeps what is lost, it is not scaled.
        """
        unbiased = self._compressor.unbiased
        return torch.zeros_like(difference, dtype=torch.float32) if unbiased else None

    def _known_state(self) -> CompressorState:
        if self._state is None:
            self._state = self._compressor.init(self._layout, self._like.device, self._rank)
        return self._state
