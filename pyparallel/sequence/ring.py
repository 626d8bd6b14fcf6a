"""Parts of keys and values that go around a ring of ranks: who needs which, and their messages."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..comm import Run
from ..comm.collectives import packed_bytes, unpack
from ..comm.p2p import PointToPoint, Transfer
from ..compression import BufferLayout, Message
from ..compression.quantizers.blockwise import BlockwiseCompressor

WIDE = {torch.float64: torch.float64} | dict.fromkeys(
    (torch.float32, torch.bfloat16, torch.float16), torch.float32
)
"""Each dtype of q, k and v, with the one in which results are merged and gradients are added."""

MOST_ROWS = 256  # of q, whose scores are in memory at once without a flash kernel

FORWARD, BACKWARD, GRADIENTS = range(3)  # kinds of messages

Causal = bool | Literal["zigzag"]


@dataclass(frozen=True, eq=False)
class Ring:
    """The ring of one call of ``ring_attention`` and of its backward.

    At step s rank r has the part of rank r - s, if it needs it. A part is sent from rank to rank as
    far as the last one that needs it, in the backward with its gradients of ranks but the owner,
    which that rank sends to the owner.

    Args:
        lengths: of k and v of each rank.
        like: (batch, heads, 0, dim), of the dtype and on the device of q, k and v.
        compressor: of k and v; None: they are sent as they are.
        uses_flash: whether torch's flash kernels compute.
    """

    run: Run
    messages: PointToPoint
    lengths: Sequence[int]
    like: Tensor
    causal: Causal
    scale: float
    compressor: BlockwiseCompressor | None
    uses_flash: bool

    def part(self, step: int) -> int:
        """Return the rank whose part this rank has at a step."""
        return (self.run.group_rank - step) % self.run.size

    def last_step(self, part: int) -> int:
        """Return the step at which the last rank that needs a part has it."""
        return self.run.size - 1 - (part if self.causal is True else 0)

    def blocks(self, part: int, num_queries: int) -> Iterator[tuple[slice, slice, bool]]:
        """Yield rows of q and of a part that they see, and whether these are the same places.

        The sequence is chunks in order: rows of one see earlier chunks whole, and no later one.
        """
        most = max(1, num_queries) if self.uses_flash else MOST_ROWS
        for query_chunk, queries in self._chunks(self.run.group_rank, num_queries):
            for begin in range(queries.start, queries.stop, most):
                rows = slice(begin, min(begin + most, queries.stop))
                for key_chunk, keys in self._chunks(part, self.lengths[part]):
                    is_own = bool(self.causal) and key_chunk == query_chunk
                    is_seen = not self.causal or key_chunk <= query_chunk
                    columns = slice(keys.start, begin) if is_own else keys
                    if is_seen and columns.stop > columns.start:
                        yield rows, columns, False
                    if is_own:
                        yield rows, rows, True

    def _chunks(self, rank: int, length: int) -> list[tuple[int, slice]]:
        if self.causal != "zigzag":
            return [(rank, slice(0, length))]
        half = length // 2
        last = 2 * self.run.size - 1
        return [(rank, slice(0, half)), (last - rank, slice(half, length))]

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the message of this rank's k and v: (bytes,) uint8."""
        packed = self._empty(self.run.group_rank)
        places = unpack(packed, self._kinds(self.run.group_rank))
        for place, part in zip(places, self._encode(torch.stack([k, v])), strict=True):
            place.copy_(part)
        return packed

    def unpack(self, packed: Tensor, part: int) -> tuple[Tensor, ...]:
        """Return k and v of a rank by its message."""
        message = unpack(packed, self._kinds(part))
        if self.compressor is None:
            return message[0].view(self._shape(part)).unbind()
        out = self.zeros(part)
        if out.numel():
            layout = BufferLayout.flat(out.numel())
            self.compressor.decompress(tuple(message), layout, out.view(-1))
        return out.to(self.like.dtype).unbind()

    def zeros(self, part: int) -> Tensor:
        """Return zeros like k and v of a rank, or their gradients: (2, batch, heads, length, dim).

        They are of the dtype in which gradients are added.
        """
        return self.like.new_zeros(self._shape(part), dtype=WIDE[self.like.dtype])

    def _shape(self, part: int) -> tuple[int, ...]:
        batch, heads, _, dim = self.like.shape
        return 2, batch, heads, self.lengths[part], dim

    def _encode(self, x: Tensor) -> Message:
        if self.compressor is None:
            return (x.view(-1),)
        layout = BufferLayout.flat(x.numel())
        return self.compressor.compress(x.view(-1), self.compressor.init(layout, x.device))

    def _kinds(self, part: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the lengths and dtypes of the tensors in a rank's message."""
        numel = math.prod(self._shape(part))
        sizes = [numel] if self.compressor is None else self.compressor.sizes(numel)
        return tuple(zip(sizes, self._dtypes, strict=True))

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        return [each.dtype for each in self._encode(self.like.new_zeros(1))]

    def _empty(self, part: int) -> Tensor:
        return self.like.new_zeros(packed_bytes(self._kinds(part)), dtype=torch.uint8)

    def trip(self, message: Tensor, kind: int) -> Iterator[tuple[int, Tensor | None]]:
        """Yield each step, with the message that is here then, while it is sent to the next rank.

        None: this rank does not need the part of this step, which has not come.
        """
        current: Tensor | None = message
        for step in range(self.run.size):
            sends, receives, arriving = list[Transfer](), list[Transfer](), None
            if current is not None and step < self.last_step(self.part(step)):
                sends.append(Transfer(self.part(-1), current, kind))
            if step < self.last_step(self.part(step + 1)):
                arriving = self._empty(self.part(step + 1))
                receives.append(Transfer(self.part(1), arriving, kind))
            wait = self._start(sends, receives)
            yield step, current
            wait()
            current = arriving

    def send_gradients(
        self, step: int, grads: Tensor | None, returned: Tensor
    ) -> tuple[Tensor | None, Callable[[], None]]:
        """Start to send the gradients of the part that was here, and to receive others.

        Returns:
            What other ranks have added to the gradients of the next step's part, None if there is
            none, and what waits for it. At the last step of this rank's own part it is ``returned``
            that is received: the gradients of all others.
        """
        part, coming, me = self.part(step), self.part(step + 1), self.run.group_rank
        sends, receives, arriving = list[Transfer](), list[Transfer](), None
        if grads is not None and step:
            peer = part if step == self.last_step(part) else self.part(-1)
            sends.append(Transfer(peer, grads, GRADIENTS))
        if 0 < step < self.last_step(coming):
            arriving = self.zeros(coming)
            receives.append(Transfer(self.part(1), arriving, GRADIENTS))
        if step == self.last_step(me) > 0:
            receives.append(Transfer(self.part(-step), returned, GRADIENTS))
        return arriving, self._start(sends, receives)

    def _start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Callable[[], None]:
        """Start messages, and return what waits for them; empty ones are left out."""
        sent, received = ([t for t in side if t.tensor.numel()] for side in (sends, receives))
        return self.messages.start(sent, received).wait
