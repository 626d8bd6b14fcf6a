"""How a value is said where it goes from one rank to another: as it is, or compressed."""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from ...comm import Value, tensors_of
from ...compression import BufferLayout, Compressor, CompressorState, CorruptMessageError, Piece
from ...ops import FLOAT_DTYPES


class Codec(Protocol):
    """What happens to values on their way from one rank to another."""

    def encode(self, value: Value, stream: str, number: int) -> Value:
        """What travels for a value.

        Args:
            value: a tensor or a tuple of tensors.
            stream: whose values these are, by one name at both ends.
            number: of this one in the stream.
        """

    def decode(self, value: Value, stream: str) -> Value:
        """The value that what has arrived stands for."""


class Verbatim:
    """Values travel as they are."""

    def encode(self, value: Value, stream: str, number: int) -> Value:
        """The value."""
        return value

    def decode(self, value: Value, stream: str) -> Value:
        """The value."""
        return value


class Compressing:
    """Floating-point tensors travel compressed, others as they are.

    What travels is a tuple. Its first tensor has no entries and the shape (0, 1) where the value
    is one tensor, (0, 0) where it is a tuple. In place of a floating-point tensor comes a stand-in
    without entries, of its dtype, that needs a gradient if it does, and has the shape (0, length of
    the message, *shape of the tensor); then the tensors of the message. All of this is in the
    parcel's label, which the host has at hand.

    Args:
        compressor: without memory. Its draws follow from the stream and the number alone.
        rank: this one, for what ranks draw apart.
    """

    def __init__(self, compressor: Compressor, rank: int) -> None:
        self._compressor = compressor
        self._rank = rank
        self._states: dict[BufferLayout, CompressorState] = {}

    @torch.no_grad()
    def encode(self, value: Value, stream: str, number: int) -> Value:
        """As `Codec.encode`.

        Raises:
            ValueError: a floating-point tensor that is not float32, bfloat16 or float16.
        """
        tensors = tensors_of(value)
        single = isinstance(value, Tensor)
        parts = [torch.empty((0, int(single)), device=tensors[0].device if tensors else None)]
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point():
                parts += self._compress(tensor, f"{stream}, tensor {index}", number)
            else:
                parts.append(tensor)
        return tuple(parts)

    @torch.no_grad()
    def decode(self, value: Value, stream: str) -> Value:
        """As `Codec.decode`.

        Raises:
            CorruptMessageError: what `encode` cannot have made.
        """
        heading, *rest = tensors_of(value)
        if tuple(heading.shape) not in {(0, 0), (0, 1)}:
            raise CorruptMessageError(f"got a heading of shape {list(heading.shape)}")
        parts, tensors = deque(rest), list[Tensor]()
        while parts:
            part = parts.popleft()
            if part.is_floating_point():
                name = f"{stream}, tensor {len(tensors)}"
                part = self._decompress(part, _message_of(part, parts), name)
            tensors.append(part)
        if not heading.shape[1]:
            return tuple(tensors)
        if len(tensors) != 1:
            raise CorruptMessageError(f"got {len(tensors)} tensors in place of one")
        return tensors[0]

    def _compress(self, tensor: Tensor, name: str, number: int) -> tuple[Tensor, ...]:
        layout = BufferLayout((Piece(name, tuple(tensor.shape)),))
        if layout not in self._states:
            self._states[layout] = self._compressor.init(layout, tensor.device, self._rank)
        state = self._states[layout]
        state.step = number
        message = self._compressor.compress(tensor.detach().contiguous().view(-1), state)
        stand_in = tensor.new_empty((0, len(message), *tensor.shape))
        return stand_in.requires_grad_(tensor.requires_grad), *message

    def _decompress(self, stand_in: Tensor, message: tuple[Tensor, ...], name: str) -> Tensor:
        layout = BufferLayout((Piece(name, tuple(stand_in.shape[2:])),))
        out = torch.empty(layout.numel, dtype=stand_in.dtype, device=stand_in.device)
        self._compressor.decompress(message, layout, out)
        return out.view(stand_in.shape[2:]).requires_grad_(stand_in.requires_grad)


def _message_of(stand_in: Tensor, parts: deque[Tensor]) -> tuple[Tensor, ...]:
    """What follows a stand-in, taken from the parts."""
    is_one = stand_in.dim() >= 2 and stand_in.shape[0] == 0 and stand_in.dtype in FLOAT_DTYPES
    if not is_one or stand_in.shape[1] > len(parts):
        raise CorruptMessageError(
            f"got {stand_in.dtype} of shape {list(stand_in.shape)} for a stand-in with a message, "
            f"and {len(parts)} tensors after it"
        )
    return tuple(parts.popleft() for _ in range(stand_in.shape[1]))
