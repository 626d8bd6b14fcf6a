"""The wire format of a tensor or a tuple of tensors: a fixed-size header and a packed payload.

Headers, and payloads behind them, are in the host's memory, and are written and read there by
address: after a microbatch has emptied the caches, each operation of torch would take 10 us. What
describes tensors is kept by their metadata, as the same ones are sent in each step.
"""

import ctypes
import math
import os
import struct
import zlib
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...training.arguments import require

Value = Tensor | tuple[Tensor, ...]

HEADER_WORDS = 128
HEADER_BYTES = 8 * HEADER_WORDS
_NUMBER = 1  # the index of the message's number in a header
_UNWRITTEN = -1  # never a message's number; in bytes too
_CHECKSUM = 5  # the index of the CRC-32 of all other words
_BEGIN = 11  # of what describes the tensors, or of the error
_CALL = HEADER_WORDS - 6  # of the sender's call, up to the end
_BEGINNING = struct.Struct("9q2d")  # of a header, up to _BEGIN
_DESCRIPTION_BYTES, _CALL_BYTES = 8 * (_CALL - _BEGIN), 8 * (HEADER_WORDS - _CALL)
_ALIGNMENT_BYTES = 64
_ONE_TENSOR = 3  # the count of a value that is a tensor and not a tuple
_FAILURE = -1  # in place of a count, as are -2 - kind of a refusal
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no payload is larger
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)


class TensorMeta(NamedTuple):
    """One tensor in a header; ``differentiable``: the receiver sends back a gradient."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool


class BatchMeta(NamedTuple):
    """What the first stage's rank knows of a batch, with the activations of its microbatches."""

    samples: int = 0  # of this microbatch; 0: not known
    total: int = 0  # of all microbatches of the step; 0: not known
    has_short_form: bool = False  # that rank got two positional arguments, inputs and target
    target: float = 0.0  # its ``BatchDigest`` on that rank; 0.0: not known


NO_BATCH = BatchMeta()


class RefusalKind(IntEnum):
    """What a rank refuses; receivers raise the error of this kind."""

    ARGUMENT = 0
    TYPE = 1
    NOT_FINITE = 2
    EMPTY = 3  # a microbatch without weight, alone in its update: skipped, and no error


@dataclass(frozen=True)
class Refusal:
    """Why no value is sent: one text, cut to the size of a header; it harms no later message."""

    kind: RefusalKind
    text: str
    cause: Exception | None = field(default=None, compare=False)  # on the rank that refuses


@dataclass(frozen=True)
class Header:
    """The metadata that precedes a payload; none follows a failure or a refusal."""

    stream: int  # of the sender's, from 0
    number: int  # in the stream, such as that of the microbatch
    received: int  # how many messages the sender had received from this peer by then
    tensors: tuple[TensorMeta, ...] = ()
    single: bool = False  # the value is a tensor, not a tuple of one
    failure: str | None = None  # the sender's error
    via_host: bool = False  # the payload travels over the headers' group, in the host's memory
    refusal: Refusal | None = None
    batch: BatchMeta = NO_BATCH
    loss: float = field(default=math.nan, compare=False)  # the newest that the sender knows
    call: bytes = b""  # of the sender's user, for the receiver's error: see ``read_call``

    @property
    def num_bytes(self) -> int:
        """Return the size of the payload, its tensors aligned."""
        return _num_bytes(self.tensors)

    def to_tensor(self, capacity: int = 0) -> Tensor:
        """Return the header as an int64 tensor with room for a payload of ``capacity`` bytes."""
        text, count = self.failure, 2 * len(self.tensors) + self.single
        if self.refusal is not None:
            text, count = self.refusal.text, _FAILURE - 1 - self.refusal.kind
        elif self.failure is not None:
            count = _FAILURE
        numbers = self.stream, self.number, self.received, count, self.via_host
        words = bytearray(_BEGINNING.pack(*numbers, 0, *self.batch, self.loss))
        if text is None:
            words += _describe_tensors(self.tensors)
        else:
            words += text.encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES, b"\0")
        words += self.call[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")
        struct.pack_into("q", words, 8 * _CHECKSUM, zlib.crc32(words))
        tensor = new_header(capacity)
        ctypes.memmove(tensor.data_ptr(), bytes(words), HEADER_BYTES)
        return tensor


def cut_failure(text: str) -> str:
    """Return what a receiver reads of a failure's text: as much as a header has room for."""
    return text.encode()[:_DESCRIPTION_BYTES].decode(errors="ignore")


def read_call(tensor: Tensor) -> str:
    """Return the call that the sender of a header was in."""
    words = ctypes.string_at(tensor.data_ptr() + 8 * _CALL, _CALL_BYTES)
    return words.rstrip(b"\0").decode(errors="replace")


def new_header(capacity: int = 0) -> Tensor:
    """Return an int64 tensor to receive a header into, and a payload of ``capacity`` bytes."""
    tensor = torch.empty(HEADER_WORDS + capacity // 8, dtype=torch.int64, device="cpu")
    ctypes.memset(tensor.data_ptr() + 8 * _NUMBER, _UNWRITTEN, 8)
    return tensor


def has_arrived(header: Tensor) -> bool:
    """Return whether a tensor from ``new_header`` has been written to, at least in part."""
    return header[_NUMBER].item() != _UNWRITTEN


def read_header(tensor: Tensor) -> Header:
    """Return the header that ``to_tensor`` encoded; a ValueError if it is none, or damaged."""
    words = ctypes.string_at(tensor.data_ptr(), HEADER_BYTES)
    *numbers, checksum, samples, total, has_short_form, target, loss = _BEGINNING.unpack_from(words)
    before, after = words[: 8 * _CHECKSUM], words[8 * (_CHECKSUM + 1) :]
    if checksum != zlib.crc32(after, zlib.crc32(bytes(8), zlib.crc32(before))):
        raise ValueError("a wrong checksum")
    stream, number, received, count, via_host = numbers
    batch = BatchMeta(samples, total, bool(has_short_form), target)
    description = words[8 * _BEGIN : 8 * _CALL]
    if _FAILURE - len(RefusalKind) <= count <= _FAILURE:
        text = description.rstrip(b"\0").decode(errors="ignore")
        if count == _FAILURE:
            return Header(stream, number, received, failure=text)
        refusal = Refusal(RefusalKind(_FAILURE - 1 - count), text)
        return Header(stream, number, received, refusal=refusal, loss=loss)
    is_single = bool(count % 2)
    if (
        not 0 <= count // 2 <= HEADER_WORDS
        or is_single != (count == _ONE_TENSOR)
        or via_host not in (0, 1)
    ):
        raise ValueError(f"a count of {count} and a place of {via_host}")
    tensors = _read_tensors(description, count // 2)
    header = Header(
        stream, number, received, tensors, is_single, None, bool(via_host), None, batch, loss
    )
    if header.num_bytes > _MEMORY_BYTES:
        raise ValueError(f"a value of {header.num_bytes} bytes, more than this machine's memory")
    return header


@lru_cache
def _num_bytes(tensors: tuple[TensorMeta, ...]) -> int:
    return sum(aligned(tensor.dtype.itemsize * math.prod(tensor.shape)) for tensor in tensors)


@lru_cache
def _describe_tensors(tensors: tuple[TensorMeta, ...]) -> bytes:
    """Return what a header has of its tensors, up to the sender's call."""
    words = array("q")
    for meta in tensors:
        require(meta.dtype in _DTYPES, "tensors to send must be of a plain dtype", meta.dtype)
        words.extend((_DTYPES.index(meta.dtype), meta.differentiable, len(meta.shape)))
        words.extend(meta.shape)
    rule = f"a value to send must have at most about {_CALL // 6} tensors"
    require(len(words) <= _CALL - _BEGIN, rule, len(tensors))
    return words.tobytes().ljust(_DESCRIPTION_BYTES, b"\0")


@lru_cache
def _read_tensors(description: bytes, number: int) -> tuple[TensorMeta, ...]:
    tensors, words = list[TensorMeta](), array("q", description)
    for _ in range(number):
        tensors.append(_read_meta(words))
        words = words[3 + len(tensors[-1].shape) :]
    return tuple(tensors)


def _read_meta(words: "array[int]") -> TensorMeta:
    if len(words) < 3:
        raise ValueError("more tensors than it has room for")
    dtype, differentiable, dimensions = words[:3]
    shape = tuple(words[3 : 3 + dimensions]) if dimensions >= 0 else ()
    is_valid = len(shape) == dimensions and all(size >= 0 for size in shape)
    if not (is_valid and 0 <= dtype < len(_DTYPES) and differentiable in (0, 1)):
        raise ValueError(
            f"a tensor of dtype {dtype} with {dimensions} dimensions {list(shape)}, gradient "
            f"{differentiable}"
        )
    plain = _DTYPES[dtype]
    if differentiable and not (plain.is_floating_point or plain.is_complex):
        raise ValueError(f"a tensor of {plain} that requires a gradient")
    return TensorMeta(plain, shape, bool(differentiable))


def describe(value: Value) -> tuple[TensorMeta, ...]:
    """Return the metadata of a value's tensors."""
    return tuple(TensorMeta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors_of(value))


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def aligned(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to where the next tensor begins."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def detached(value: Value) -> Value:
    """Return a value outside of its graph, as a message would be; with its ``requires_grad``."""
    tensors = tuple(each.detach().requires_grad_(each.requires_grad) for each in tensors_of(value))
    return tensors[0] if isinstance(value, Tensor) else tensors
