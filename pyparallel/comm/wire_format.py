"""A parcel: a tensor or a tuple of them as one message, and the label that says what is inside."""

from dataclasses import dataclass

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]

HEADER_WORDS = 128
_NUMBER = 1  # where a label holds its parcel's number
_NOT_HERE = -1  # which is never this
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
    """What the label says of one tensor: ``differentiable`` asks for its gradient."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool

    @property
    def num_bytes(self) -> int:
        """Of the tensor alone."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Header:
    """What travels before a parcel's bytes.

    Args:
        stream: which of the sender's streams of like parcels this is of, from 0.
        number: its number there, such as that of the microbatch.
        received: how many parcels the sender has had from the receiver when it wrote this.
        items: of the tensors.
        single: the value is the one tensor, not a tuple of one.
        failure: the sender can go on no longer, and why; then there is no parcel.
    """

    stream: int
    number: int
    received: int
    items: tuple[TensorMeta, ...] = ()
    single: bool = False
    failure: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of the parcel, its tensors aligned."""
        return sum(_aligned(item.num_bytes) for item in self.items)

    def to_tensor(self) -> Tensor:
        """(LABEL_WORDS,) int64.

        Raises:
            ValueError: a dtype that does not travel, or more dimensions than a label has room for.
        """
        count = -1 if self.failure is not None else 2 * len(self.items) + self.single
        words = [self.stream, self.number, self.received, count]
        for item in self.items:
            if item.dtype not in _DTYPES:
                raise ValueError(f"what travels must be of a plain dtype, got {item.dtype}")
            words += [_DTYPES.index(item.dtype), item.differentiable, len(item.shape), *item.shape]
        if len(words) > HEADER_WORDS:
            raise ValueError(
                f"a value that travels must have at most about {HEADER_WORDS // 6} tensors, got "
                f"{len(self.items)}"
            )
        tensor = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        tensor[: len(words)] = torch.tensor(words)
        if self.failure is not None:
            _write_text(tensor[_TEXT], self.failure)
        return tensor


def new_header() -> Tensor:
    """(LABEL_WORDS,) int64, for a label to be received into."""
    return torch.full((HEADER_WORDS,), _NOT_HERE)


def has_arrived(label: Tensor) -> bool:
    """Whether a label has been written into what ``new_header`` made, or is being written."""
    return label[_NUMBER].item() != _NOT_HERE


def read_header(tensor: Tensor) -> Header:
    """The label that was written so."""
    words = tensor.tolist()
    stream, number, received, count = words[:4]
    if count < 0:
        return Header(stream, number, received, failure=_read_text(tensor[_TEXT]))
    items, at = [], 4
    for _ in range(count // 2):
        dtype, differentiable, dimensions = words[at : at + 3]
        shape = tuple(words[at + 3 : at + 3 + dimensions])
        items.append(TensorMeta(_DTYPES[dtype], shape, bool(differentiable)))
        at += 3 + dimensions
    return Header(stream, number, received, tuple(items), single=bool(count % 2))


def describe(value: Value) -> tuple[TensorMeta, ...]:
    """What a label says of a value."""
    return tuple(TensorMeta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors_of(value))


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def pack(value: Value) -> Tensor:
    """The bytes of a value: of one contiguous tensor without a copy."""
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


def unpack(payload: Tensor, label: Header) -> Value:
    """The value that was packed: views of the payload, which need gradients as they did there."""
    tensors, begin = [], 0
    for item in label.items:
        part = payload[begin : begin + item.num_bytes]
        tensor = part.view(item.dtype).view(item.shape)
        tensors.append(tensor.requires_grad_(item.differentiable))
        begin += _aligned(item.num_bytes)
    return tensors[0] if label.single else tuple(tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _write_text(words: Tensor, text: str) -> None:
    room = words.view(torch.uint8)
    written = text.encode()[: room.numel()]
    room[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)


def _read_text(words: Tensor) -> str:
    return bytes(words.view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")
