"""Quantizers with 8 or 4 bits per entry and a scale per block."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...ops._checks import check_block_size
from ...ops._formats import find_format
from ...ops._philox import as_offset, as_seed
from ...ops.mix_quantized import mix_quantized_unchecked
from ...ops.quantize import quantize_unchecked
from ...training.arguments import check_one_of
from ..compressor import Compressor, Message
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor, Parts


@dataclass(frozen=True, kw_only=True)
class Quantizer(BlockwiseCompressor):
    """Blockwise quantization by ``ops.quantize``, which documents how nan and inf are encoded.

    Args:
        block_size: entries per scale, a power of two from 32 to 4096.
        seed: seed of stochastic rounding, which is unbiased; None: round to nearest.
    """

    block_size: int = 256
    seed: int | None = None
    finds_nonfinite = True

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of an entry."""

    @property
    @abc.abstractmethod
    def format(self) -> str:
        """Number format of ``ops.quantize``."""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    @override
    def granularity(self) -> int:
        return self.block_size

    @property
    @override
    def unbiased(self) -> bool:
        return self.seed is not None

    @cached_property
    @override
    def dtypes(self) -> Sequence[torch.dtype]:  # type: ignore[override]
        return find_format(self.bits, self.format).dtype, torch.float32

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the lengths of codes (bytes) and scales (one per block)."""
        return (numel * self.bits + 7) // 8, -(-numel // self.block_size)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (codes, scales)."""
        state.begin_message(x)
        return ops.quantize(x, **self._kind, residual=residual, **self._draw(state))

    @override
    def _encode(
        self, x: Tensor, state: CompressorState, residual: Residual, rows: Sequence[Tensor]
    ) -> None:
        if type(self).compress is not Quantizer.compress:  # of a subclass
            super()._encode(x, state, residual, rows)
            return
        state.begin_message(x)
        draw = self._draw(state)
        seed, offset = as_seed(draw["seed"]), as_offset(draw["offset"], x)
        quantize_unchecked(x, *self._kind.values(), residual, seed, offset, *rows)

    @override
    def _decode_mean(
        self, received: list[Tensor], layout: BufferLayout, num_ranks: int
    ) -> tuple[Tensor, int | None]:
        codes, scales = received
        sizes: dict[str, Any] = {"numel": layout.numel, "divisor": num_ranks}
        try:
            with refusing_corrupt():
                return ops.dequantize_sum(codes, scales, **self._kind, **sizes), None
        except CorruptMessageError:  # one by one, to find the sender
            return super()._decode_mean(received, layout, num_ranks)

    @override
    def _decode(self, gathered: list[Tensor], parts: Parts, x: Tensor) -> None:
        if x.numel() == 0 or max(parts.lengths) % self.block_size:  # a part alone, and its block
            super()._decode(gathered, parts, x)
            return
        codes, scales = gathered
        try:
            with refusing_corrupt():
                ops.dequantize(codes, scales, **self._kind, numel=x.numel(), out=x)
        except CorruptMessageError:  # one by one, to name the sender
            super()._decode(gathered, parts, x)

    def compress_difference_(
        self, z: Tensor, replica: Tensor, ratio: Tensor, state: CompressorState
    ) -> Message:
        """Encode ``z - replica`` and update both, as ``ops.quantize_difference_``."""
        state.begin_message(z)
        return ops.quantize_difference_(z, replica, ratio, **self._kind, **self._draw(state))

    @override
    def decompress(
        self,
        message: Message,
        layout: BufferLayout,
        out: Tensor,
        *,
        accumulate: bool = False,
        corrupt: Tensor | None = None,
    ) -> Tensor:
        """Decode (codes, scales); ``corrupt`` as for ``ops.dequantize``."""
        with refusing_corrupt():
            codes, scales = message
            return ops.dequantize(
                codes,
                scales,
                **self._kind,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
                corrupt=corrupt,
            )

    def mix_differences_(
        self,
        z: Tensor,
        weight: Tensor,
        messages: Sequence[Message],
        masses: Tensor,
        replicas: list[Tensor],
        corrupt: Tensor,
    ) -> None:
        """Add messages to their replicas and average with these, as ``ops.mix_quantized_``.

        The masses are not checked. On the CPU a CorruptMessageError means that nothing is written.
        """
        codes, scales = ([message[part] for message in messages] for part in (0, 1))
        kind = self.bits, self.format, self.block_size
        with refusing_corrupt():
            mix_quantized_unchecked(z, weight, codes, scales, masses, *kind, replicas, corrupt)

    @cached_property
    def _kind(self) -> dict[str, Any]:
        return {"bits": self.bits, "format": self.format, "block_size": self.block_size}

    def _draw(self, state: CompressorState) -> dict[str, Any]:
        """Return the seed and the index of the draw of this message."""
        seed = None if self.seed is None else state.seed(self.seed)
        return {"seed": seed, "offset": state.step}


class Int8(Quantizer):
    """Integers from -127 to 127 times a scale: a quarter of float32's bytes."""

    bits = 8
    format = "int"


class Int4(Quantizer):
    """Integers from -7 to 7 times a scale, two per byte: an eighth of float32's bytes."""

    bits = 4
    format = "int"


class Fp4(Quantizer):
    """0, and powers of two, 1 to 64, times a scale: an eighth of float32's bytes.

    E3M0, in which streaming DiLoCo sends its outer steps (Douillard et al., arXiv 2501.18512).
    Small entries of a block survive that `Int4` rounds to 0; large ones are less precise.
    """

    bits = 4
    format = "e3m0"


@dataclass(frozen=True)
class Fp8(Quantizer):
    """8-bit floats times a scale: a quarter of float32's bytes (arXiv 2209.05433).

    Small entries of a block keep more digits than as integers, large ones fewer.

    Args:
        format: "e4m3", with 4 significant bits over 18 powers of two, or "e5m2", with 3 over 32.
    """

    format: str = "e4m3"
    bits = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("format", self.format, ("e4m3", "e5m2"))


def fused_quantizer(compressor: Compressor) -> Quantizer | None:
    """Return the compressor, no subclass, if ops mix its messages in one pass, or None."""
    fused = type(compressor) in (Int8, Int4, Fp8)
    return compressor if fused and isinstance(compressor, Quantizer) else None
