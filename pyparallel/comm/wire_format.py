"""The wire format of a tensor or a tuple of tensors: a fixed-size header and a packed payload."""

from dataclasses import dataclass

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]

HEADER_WORDS = 128
_NUMBER = 1  # the index of the message's number in a header
_UNWRITTEN = -1  # never a message's number
_TEXT = slice(4, HEADER_WORDS)
_ALIGNMENT_BYTES = 64
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class TensorMeta:
    """One tensor in a header; ``differentiable``: the receiver sends back a gradient."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor, without alignment."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Header:
    """The metadata that precedes a payload.

    Args:
        stream: which of the sender's streams the message is of, from 0.
        number: its number in the stream, such as that of the microbatch.
        received: how many messages the sender had received from this peer when it wrote this.
        tensors: one for each tensor of the payload.
        single: the value is a tensor, not a tuple of one.
        failure: the sender's error; then no payload follows.
    """

    stream: int
    number: int
    received: int
    tensors: tuple[TensorMeta, ...] = ()
    single: bool = False
    failure: str | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size of the payload, its tensors aligned."""
        return sum(_aligned(each.num_bytes) for each in self.tensors)

    def to_tensor(self) -> Tensor:
        """Return the header as a (HEADER_WORDS,) int64 tensor.

        Raises:
            ValueError: an unsupported dtype, or more dimensions than a header has room for.
        """
        count = -1 if self.failure is not None else 2 * len(self.tensors) + self.single
        words = [self.stream, self.number, self.received, count]
        for meta in self.tensors:
            if meta.dtype not in _DTYPES:
                raise ValueError(f"tensors to send must be of a plain dtype, got {meta.dtype}")
            words += [_DTYPES.index(meta.dtype), meta.differentiable, len(meta.shape), *meta.shape]
        if len(words) > HEADER_WORDS:
            raise ValueError(
                f"a value to send must have at most about {HEADER_WORDS // 6} tensors, got "
                f"{len(self.tensors)}"
            )
        tensor = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        tensor[: len(words)] = torch.tensor(words)
        if self.failure is not None:
            _write_text(tensor[_TEXT], self.failure)
        return tensor


def new_header() -> Tensor:
    """Return a (HEADER_WORDS,) int64 tensor to receive a header into."""
    return torch.full((HEADER_WORDS,), _UNWRITTEN)


def has_arrived(header: Tensor) -> bool:
    """Return whether a tensor from ``new_header`` has been written to, at least in part."""
    return header[_NUMBER].item() != _UNWRITTEN


def read_header(tensor: Tensor) -> Header:
    """Return the header that ``to_tensor`` encoded."""
    words = tensor.tolist()
    stream, number, received, count = words[:4]
    if count < 0:
        return Header(stream, number, received, failure=_read_text(tensor[_TEXT]))
    tensors, at = [], 4
    for _ in range(count // 2):
        dtype, differentiable, dimensions = words[at : at + 3]
        shape = tuple(words[at + 3 : at + 3 + dimensions])
        tensors.append(TensorMeta(_DTYPES[dtype], shape, bool(differentiable)))
        at += 3 + dimensions
    return Header(stream, number, received, tuple(tensors), single=bool(count % 2))


def describe(value: Value) -> tuple[TensorMeta, ...]:
    """Return the metadata of a value's tensors."""
    return tuple(TensorMeta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors_of(value))


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def pack(value: Value) -> Tensor:
    """Return the payload of a value, uint8; a view if it is one contiguous tensor."""
    parts = [
        tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for tensor in tensors_of(value)
    ]
    if len(parts) == 1 and parts[0].numel() % _ALIGNMENT_BYTES == 0:
        return parts[0]
    packed = parts[0].new_zeros(sum(_aligned(part.numel()) for part in parts)) if parts else None
    if packed is None:
        return torch.empty(0, dtype=torch.uint8)
    begin = 0
    for part in parts:
        packed[begin : begin + part.numel()] = part
        begin += _aligned(part.numel())
    return packed


def unpack(payload: Tensor, header: Header) -> Value:
    """Return the packed value as views of the payload, with the sender's ``requires_grad``."""
    tensors, begin = [], 0
    for meta in header.tensors:
        part = payload[begin : begin + meta.num_bytes]
        tensor = part.view(meta.dtype).view(meta.shape)
        tensors.append(tensor.requires_grad_(meta.differentiable))
        begin += _aligned(meta.num_bytes)
    return tensors[0] if header.single else tuple(tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _write_text(words: Tensor, text: str) -> None:
    target = words.view(torch.uint8)
    written = text.encode()[: target.numel()]
    target[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)


def _read_text(words: Tensor) -> str:
    return bytes(words.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")
