"""Compression of values sent from one rank to another."""

from collections import deque

import torch
from torch import Tensor

from ...compression import BufferLayout, Compressor, CompressorState, CorruptMessageError, Piece
from ...ops import FLOAT_DTYPES
from .format import Value, tensors_of


class Codec:
    """Compresses floating-point tensors before they are sent, and decompresses them there.

    The encoded value is a tuple. Its first tensor is empty and has the shape (0, 1) if the value is
    a tensor, (0, 0) if it is a tuple. A floating-point tensor is replaced by an empty placeholder
    of its dtype and ``requires_grad``, of shape (0, number of compressed tensors, *shape of the
    tensor), followed by these: so all metadata is in the message's header. Random draws are seeded
    by stream and number, and by the rank where they differ between ranks.
    """

    def __init__(self, compressor: Compressor, rank: int) -> None:
        self._compressor = compressor
        self._rank = rank
        self._states: dict[BufferLayout, CompressorState] = {}

    @torch.no_grad()
    def encode(self, value: Value, stream: object, number: int) -> Value:
        """Return the tensors to send for a value; ``number`` is unique in its ``stream``."""
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
    def decode(self, value: Value, stream: object) -> Value:
        """Decompress; a CorruptMessageError for what ``encode`` cannot have returned."""
        marker, *rest = tensors_of(value)
        if tuple(marker.shape) not in {(0, 0), (0, 1)}:
            raise CorruptMessageError(f"got a first tensor of shape {list(marker.shape)}")
        parts, tensors = deque(rest), list[Tensor]()
        while parts:
            part = parts.popleft()
            if part.is_floating_point():
                name = f"{stream}, tensor {len(tensors)}"
                part = self._decompress(part, _take_compressed(part, parts), name)
            tensors.append(part)
        if not marker.shape[1]:
            return tuple(tensors)
        if len(tensors) != 1:
            raise CorruptMessageError(f"got {len(tensors)} tensors instead of one")
        return tensors[0]

    def _compress(self, tensor: Tensor, name: str, number: int) -> tuple[Tensor, ...]:
        layout = BufferLayout((Piece(name, tuple(tensor.shape)),))
        if layout not in self._states:
            self._states[layout] = self._compressor.init(layout, tensor.device, self._rank)
        state = self._states[layout]
        state.step = number
        compressed = self._compressor.compress(tensor.detach().contiguous().view(-1), state)
        placeholder = tensor.new_empty((0, len(compressed), *tensor.shape))
        return placeholder.requires_grad_(tensor.requires_grad), *compressed

    def _decompress(self, placeholder: Tensor, compressed: tuple[Tensor, ...], name: str) -> Tensor:
        layout = BufferLayout((Piece(name, tuple(placeholder.shape[2:])),))
        out = torch.empty(layout.numel, dtype=placeholder.dtype, device=placeholder.device)
        self._compressor.decompress(compressed, layout, out)
        return out.view(placeholder.shape[2:]).requires_grad_(placeholder.requires_grad)


def _take_compressed(placeholder: Tensor, parts: deque[Tensor]) -> tuple[Tensor, ...]:
    is_empty = placeholder.dim() >= 2 and placeholder.shape[0] == 0
    valid = is_empty and placeholder.dtype in FLOAT_DTYPES
    if not valid or placeholder.shape[1] > len(parts):
        raise CorruptMessageError(
            f"got {placeholder.dtype} of shape {list(placeholder.shape)} for a placeholder, and "
            f"{len(parts)} tensors after it"
        )
    return tuple(parts.popleft() for _ in range(placeholder.shape[1]))
