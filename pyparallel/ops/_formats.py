"""The formats of quantized messages: encoding of scaled numbers as codes, and decoding.

A message is a buffer of codes and one float32 scale per block; an entry is code times scale.
"""

import abc
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ._checks import check_block_size, check_rows, check_tensor, describe, num_blocks

CORRUPT = "codes and scales must be what quantize emits, got a corrupt message"


class Format(abc.ABC):
    """A format of codes, which are uint8 here, one per entry."""

    dtype: torch.dtype  # of the buffer of codes
    bits: int
    largest: float  # the largest number that has a code
    has_scales = True  # otherwise numbers are encoded as they are

    def num_codes(self, numel: int) -> int:
        """Return the length of the buffer that holds the codes of ``numel`` entries."""
        return (numel * self.bits + 7) // 8

    def pack(self, codes: Tensor) -> Tensor:
        """Return the codes in the layout of a message, the first of a byte in its lowest bits."""
        per_byte = 8 // self.bits
        groups = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
        packed = groups[:, 0]
        for place in range(1, per_byte):
            packed = packed | groups[:, place] << place * self.bits
        return packed.contiguous().view(self.dtype)

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """Return one code per entry of a message with ``numel`` entries."""
        packed, mask = packed.view(torch.uint8), (1 << self.bits) - 1
        places = [packed >> place & mask for place in range(0, 8, self.bits)]
        return torch.stack(places, dim=1).flatten()[:numel]

    @abc.abstractmethod
    def encode(self, scaled: Tensor, random: Tensor | None) -> Tensor:
        """Return the nearest codes; with 16 random bits per entry, stochastically rounded ones."""

    @abc.abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of the codes."""

    @abc.abstractmethod
    def is_corrupt(self, codes: Tensor) -> Tensor:
        """Return whether each code is one that ``encode`` never produces."""

    def num_scales(self, numel: int, block_size: int) -> int:
        """Return the number of scales of ``numel`` entries."""
        return num_blocks(numel, block_size) if self.has_scales else 0

    def fit_scale(self, scale: Tensor, scaled: Tensor, codes: Tensor) -> Tensor:
        """Return the (blocks,) scales of a message with a residual: those given, by default.

        ``scaled`` (blocks, block_size) was encoded as ``codes``, in units of the largest
        magnitudes.
        """
        return scale


@dataclass(frozen=True)
class Integers(Format):
    """Two's complement without the most negative number; two codes of 4 bits share a byte."""

    bits: int
    dtype: torch.dtype  # a byte holds one signed code or two
    largest: float

    @override
    def encode(self, scaled: Tensor, random: Tensor | None) -> Tensor:
        """Round to nearest, ties to even; or stochastically: add noise in [0, 1) and round down."""
        whole = scaled.round() if random is None else (scaled + _fraction(random)).floor()
        whole = whole.clamp(-self.largest, self.largest)
        return whole.to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1)

    @override
    def decode(self, codes: Tensor) -> Tensor:
        sign = 1 << (self.bits - 1)
        return ((codes.int() ^ sign) - sign).float()

    @override
    def is_corrupt(self, codes: Tensor) -> Tensor:
        return codes == 1 << (self.bits - 1)


@dataclass(frozen=True)
class Floats(Format):
    """8-bit floats, bit for bit ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``."""

    kind: torch.dtype
    mantissa_bits: int
    bias: int  # of the exponent
    largest: float
    special_codes: tuple[int, int]  # the first and the last of those that are inf or nan
    bits = 8
    dtype = torch.uint8

    @override
    def encode(self, scaled: Tensor, random: Tensor | None) -> Tensor:
        """Round to nearest, ties to even; or stochastically: add noise below the last kept bit."""
        clamped = scaled.clamp(-self.largest, self.largest)
        if random is None:
            return clamped.to(self.kind).view(torch.uint8)
        magnitude, dropped = clamped.abs(), 23 - self.mantissa_bits
        noise = (random << (dropped - 16)) + (1 << (dropped - 17))
        bits = magnitude.view(torch.int32).long() + noise
        normal = (bits >> dropped) - ((127 - self.bias) << self.mantissa_bits)
        scale = 2.0 ** (self.bias - 1 + self.mantissa_bits)
        subnormal = (magnitude * scale + _fraction(random)).floor().long()
        codes = torch.where(magnitude < 2.0 ** (1 - self.bias), subnormal, normal)
        return (codes | torch.signbit(scaled).long() << 7).to(torch.uint8)

    @override
    def decode(self, codes: Tensor) -> Tensor:
        return codes.view(self.kind).float()

    @override
    def is_corrupt(self, codes: Tensor) -> Tensor:
        first, last = self.special_codes
        magnitude = codes & 0x7F
        return (magnitude >= first) & (magnitude <= last)


class Ternary(Format):
    """-1, 0 and 1 as 2, 0 and 1, four to a byte; an entry is drawn or not (TernGrad)."""

    bits = 2
    dtype = torch.uint8
    largest = 1.0

    @override
    def encode(self, scaled: Tensor, random: Tensor | None) -> Tensor:
        """Send the entries above a half; or each with its magnitude as the probability."""
        threshold = torch.tensor(0.5, device="cpu") if random is None else _fraction(random)
        sign = torch.signbit(scaled).to(torch.uint8)
        return torch.where(threshold < scaled.abs(), 1 + sign, 0).to(torch.uint8)

    @override
    def decode(self, codes: Tensor) -> Tensor:
        return (codes & 1).float() - (codes >> 1).float()

    @override
    def is_corrupt(self, codes: Tensor) -> Tensor:
        return codes == 3

    @override
    def fit_scale(self, scale: Tensor, scaled: Tensor, codes: Tensor) -> Tensor:
        """Return the mean magnitudes of the sent entries, which minimize the error.

        They are counted in multiples of 2**-18 of the largest, whose sum is exact in any order.
        """
        is_sent = codes != 0
        units = torch.where(is_sent, (scaled.abs() * 2.0**18).round(), 0.0).long().sum(dim=1)
        counts = is_sent.sum(dim=1).clamp(min=1)
        return scale * (units.float() / counts.float() * 2.0**-18)


@dataclass(frozen=True)
class Powers(Format):
    """0, and powers of two from ``2**lowest`` to ``largest`` of both signs, as codes from 1.

    Without scales then come inf and nan. There are no codes of -0 and -nan.
    """

    bits: int
    lowest: int
    largest: float
    has_scales: bool
    dtype = torch.uint8

    @override
    def encode(self, scaled: Tensor, random: Tensor | None) -> Tensor:
        """Round to nearest, ties to even codes; or stochastically."""
        magnitude, smallest = scaled.abs(), 2.0**self.lowest
        bits = magnitude.view(torch.int32).long()
        if random is None:
            rounded = bits + (1 << 22) - 1 + (bits >> 23 & 1)
            threshold = torch.tensor(0.5, device="cpu")
        else:
            rounded, threshold = bits + (random << 7) + 64, _fraction(random)
        small = (threshold * smallest < magnitude).long()
        codes = torch.where(magnitude < smallest, small, (rounded >> 23) - 126 - self.lowest)
        if not self.has_scales:
            codes = torch.where(magnitude > self.largest, 126, codes)
        negative = torch.signbit(scaled) & (codes != 0)
        codes = torch.where(negative, codes + (1 << (self.bits - 1)), codes)
        return torch.where(scaled.isnan(), 127, codes).to(torch.uint8)

    @override
    def decode(self, codes: Tensor) -> Tensor:
        sign = 1 << (self.bits - 1)
        exponent = codes.int() & (sign - 1)
        values = torch.where(exponent == 0, 0.0, 2.0 ** (exponent + self.lowest - 1).double())
        values = torch.where(exponent == 126, torch.inf, values.float())
        values = torch.where(exponent == 127, torch.nan, values)
        return torch.where(codes >= sign, -values, values)

    @override
    def is_corrupt(self, codes: Tensor) -> Tensor:
        return (codes == 1 << (self.bits - 1)) | (codes == 255)


_FORMATS: dict[tuple[int, str], Format] = {
    (8, "int"): Integers(8, torch.int8, 127.0),
    (4, "int"): Integers(4, torch.uint8, 7.0),
    (8, "e4m3"): Floats(torch.float8_e4m3fn, 3, 7, 448.0, (0x7F, 0x7F)),
    (8, "e5m2"): Floats(torch.float8_e5m2, 2, 15, 57344.0, (0x7C, 0x7F)),
}
_GRADIENT_FORMATS: dict[tuple[int, str], Format] = {
    **_FORMATS,
    (2, "ternary"): Ternary(),
    (4, "e3m0"): Powers(4, 0, 64.0, has_scales=True),
    (8, "natural"): Powers(8, -80, 2.0**44, has_scales=False),
}


def find_format(
    bits: int, name: str, block_size: int = 256, *, of_differences: bool = False
) -> Format:
    """Return the format with these bits and name; a ValueError of them or of the block size."""
    formats = _FORMATS if of_differences else _GRADIENT_FORMATS
    if (bits, name) not in formats:
        *most, last = (f"{each} and {kind}" for each, kind in formats)
        rule = f"{', '.join(most)}, or {last}"
        raise ValueError(f"bits and format must be {rule}, got {bits} and {name}")
    check_block_size(block_size)
    return formats[bits, name]


def check_message(
    codes_name: str,
    codes: Tensor,
    scales_name: str,
    scales: Tensor,
    kind: Format,
    block_size: int,
    numel: int,
    device: torch.device,
) -> None:
    """Raise unless the message has the dtypes, lengths and device of ``numel`` entries."""
    check_tensor(codes_name, codes, kind.dtype, (kind.num_codes(numel),), device)
    check_tensor(scales_name, scales, torch.float32, (kind.num_scales(numel, block_size),), device)


def check_message_in_rows(
    codes: Tensor, scales: Tensor, kind: Format, block_size: int, numel: int, device: torch.device
) -> None:
    """Raise unless each row has as many whole blocks, and all have ``numel`` entries."""
    entries = codes.shape[1] * 8 // kind.bits
    if not entries or entries % block_size or numel > codes.shape[0] * entries:
        rule = f"codes must be rows of whole blocks of {block_size} entries, {numel} in all"
        raise ValueError(f"{rule}, got {describe(codes)}")
    check_messages(codes, scales, kind, block_size, entries, device)


def check_messages(
    codes: Tensor, scales: Tensor, kind: Format, block_size: int, numel: int, device: torch.device
) -> None:
    """Raise unless each row of codes and scales, which may lie apart, is a message."""
    shape = max(1, len(codes)), kind.num_scales(numel, block_size)
    check_rows("codes", codes, kind.dtype, (shape[0], kind.num_codes(numel)), device)
    check_rows("scales", scales, torch.float32, shape, device)


def decode_message(
    codes: Tensor, scales: Tensor, kind: Format, block_size: int, numel: int
) -> tuple[Tensor, Tensor]:
    """Return the (numel,) float32 entries of a message, and a bool mask of the corrupt ones."""
    each = kind.unpack(codes, numel)
    if not kind.has_scales:
        return kind.decode(each), kind.is_corrupt(each)
    scale = scales.repeat_interleave(block_size)[:numel]
    is_corrupt = kind.is_corrupt(each) | (scale < 0) | scale.isinf()
    return kind.decode(each) * scale, is_corrupt


def _fraction(random: Tensor) -> Tensor:
    return (random.float() + 0.5) / 65536
