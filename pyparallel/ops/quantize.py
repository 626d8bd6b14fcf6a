"""``quantize``, ``dequantize`` and ``dequantize_sum``: 8, 4 or 2 bits an entry, scales of blocks.

A message is in one piece, (codes,) and (scales,), or in rows, (rows, codes) and (rows, scales), of
as many whole blocks each, which may lie apart; the last ones may be longer than the message.
"""

import torch
from torch import Tensor

from ._checks import check_buffer, check_like, num_blocks, output
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._formats import (
    CORRUPT,
    check_message,
    check_message_in_rows,
    check_messages,
    decode_message,
    find_format,
)
from ._library import checked, define
from ._philox import as_offset, as_seed, random_bits

SMALLEST = 2.0**-100  # a block with a smaller largest magnitude is encoded as zero


def quantize_reference(
    x: Tensor,
    bits: int,
    format: str,
    block_size: int,
    residual: Tensor | None,
    seed: int | None,
    offset: Tensor,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    kind, numel = find_format(bits, format), x.numel()
    sums = x.float() if residual is None else x.float() + residual.float()
    random = None if seed is None else random_bits(numel, seed % 2**64, offset, x.device)
    if not kind.has_scales:
        each = kind.encode(sums, random)
        _store(kind.pack(each), codes)
        if residual is not None:
            rest = sums - kind.decode(each)
            residual.copy_(torch.where(rest.isfinite(), rest, residual.float()))
        return

    padding = num_blocks(numel, block_size) * block_size - numel
    blocks = torch.nn.functional.pad(sums, (0, padding)).view(-1, block_size)

    absmax = blocks.abs().amax(dim=1)
    is_finite = absmax < float("inf")  # False for nan too
    is_live = is_finite & (absmax >= SMALLEST)
    # Divide by a tensor: torch would multiply by the reciprocal of a Python number.
    largest = torch.full_like(absmax, kind.largest)
    scale = torch.where(is_live, absmax / largest, 0.0)
    scaled = torch.where(is_live[:, None], blocks * (largest / absmax)[:, None], 0.0)

    if random is not None:
        random = torch.nn.functional.pad(random, (0, padding)).view(-1, block_size)
    each = torch.where(is_live[:, None], kind.encode(scaled, random), 0)
    _store(kind.pack(each.flatten()[:numel]), codes)
    if residual is not None:
        scale = kind.fit_scale(scale, scaled, each)
    _store(torch.where(is_finite, scale, float("nan")), scales)
    if residual is not None:
        rest = (blocks - kind.decode(each) * scale[:, None]).flatten()[:numel]
        keeps = is_finite.repeat_interleave(block_size)[:numel]
        residual.copy_(torch.where(keeps, rest, residual.float()))


def _store(flat: Tensor, target: Tensor) -> None:
    """Write the codes or scales of a message in one piece, or to its rows."""
    if target.dim() == 1:
        target.copy_(flat)
    else:
        for row, part in zip(target, flat.split(target.size(1)), strict=False):
            row[: part.numel()].copy_(part)


def dequantize_reference(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    format: str,
    block_size: int,
    accumulate: bool,
    out: Tensor,
    corrupt: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    kind, numel = find_format(bits, format), out.numel()
    codes = codes.reshape(-1)[: kind.num_codes(numel)]
    scales = scales.reshape(-1)[: kind.num_scales(numel, block_size)]
    values, is_corrupt = decode_message(codes, scales, kind, block_size, numel)
    refuse_or_count(is_corrupt, corrupt, CORRUPT)
    if accumulate:
        out.copy_(torch.where(is_corrupt, out.float(), out.float() + values))
    else:
        out.copy_(torch.where(is_corrupt, 0.0, values))


def dequantize_sum_reference(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    format: str,
    block_size: int,
    divisor: float,
    out: Tensor,
    corrupt: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    kind, numel = find_format(bits, format), out.numel()
    messages = [
        decode_message(*message, kind, block_size, numel)
        for message in zip(codes, scales, strict=True)
    ]
    for _, is_corrupt in messages:
        refuse_or_count(is_corrupt, corrupt, CORRUPT)
    total = torch.zeros_like(out, dtype=torch.float32)
    for values, is_corrupt in messages:
        total = torch.where(is_corrupt, total, total + values)
    out.copy_(total / torch.full_like(total, divisor))


quantize_unchecked = define(
    "quantize(Tensor x, int bits, str format, int block_size, Tensor(a!)? residual, int? seed, "
    "Tensor offset, Tensor(b!) codes, Tensor(c!) scales) -> ()",
    quantize_reference,
)
_quantize_checked = checked(quantize_unchecked)
dequantize_unchecked = define(
    "dequantize(Tensor codes, Tensor scales, int bits, str format, int block_size, "
    "bool accumulate, Tensor(a!) out, Tensor(b!) corrupt) -> ()",
    dequantize_reference,
)
_dequantize_checked = checked(dequantize_unchecked)
dequantize_sum_unchecked = define(
    "dequantize_sum(Tensor codes, Tensor scales, int bits, str format, int block_size, "
    "float divisor, Tensor(a!) out, Tensor(b!) corrupt) -> ()",
    dequantize_sum_reference,
)
_dequantize_sum_checked = checked(dequantize_sum_unchecked)


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    format: str = "int",
    block_size: int = 256,
    residual: Tensor | None = None,
    seed: int | None = None,
    offset: int | Tensor = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode a buffer in 8, 4 or 2 bits per entry, optionally with error feedback in the same pass.

    Each block of ``block_size`` entries of ``acc = x + residual`` is divided by its scale, its
    largest magnitude over the largest number of the format. It is rounded to nearest (ties to
    even), or stochastically: then the decoded value is ``acc`` in expectation (QSGD, Alistarh et
    al., NeurIPS 2017, arXiv 1610.02132). The rounding error becomes the residual (error feedback,
    Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847).

    Formats: 8 bits "int" (-127 to 127), 4 bits "int" (-7 to 7), 8 bits "e4m3" and "e5m2", which are
    ``torch.float8_e4m3fn`` and ``torch.float8_e5m2`` bit for bit; and, only here,

    * 2 bits "ternary": -1, 0 and 1 (TernGrad, Wen et al., NeurIPS 2017, arXiv 1705.07878). With a
      residual the scale is the mean magnitude of the entries that are not encoded as 0, which
      minimizes the error: with the largest magnitude, residuals would grow from step to step.
    * 8 bits "natural": powers of two from 2**-80 to 2**44 of each sign, 0, inf and nan, without
      scales (Horvath et al., arXiv 1905.10988). ``acc`` is rounded as it is; above 2**44 it becomes
      inf. Where that, an inf or a nan is sent, the residual keeps its old value.
    * 4 bits "e3m0": 0, and 1, 2, 4, ... 64 of each sign; ties become 0, 2, 8 or 32 (FP4 of
      streaming DiLoCo, Douillard et al., arXiv 2501.18512).

    A block whose largest magnitude is below 2**-100 gets scale 0 and codes 0; its residual is
    ``acc``. A block with an inf or a nan gets scale nan and codes 0, decodes to nan everywhere, so
    that the error is visible, and keeps its old, finite residual.

    Args:
        x: (n,) float32, bfloat16 or float16.
        bits: 8, 4 or 2.
        format: "int", "e3m0", "e4m3", "e5m2", "ternary" or "natural".
        block_size: entries that share a scale, a power of two from 32 to 4096.
        residual: (n,) in one of x's dtypes: the error of earlier messages. Written.
        seed: in [0, 2**64), for stochastic rounding; None: round to nearest.
        offset: index of the draw of this seed, at least 0; a number, or a 0-d int64 tensor on the
            cpu or x's device (in a CUDA graph, so that each replay can draw new numbers).
        out: codes and scales of an earlier call, written and returned, to avoid allocation, which
            costs more than the op. None: new tensors.

    Returns:
        The codes and the scales. Codes are (n,) int8 for 8 bits "int", (n,) uint8 for the other 8
        bits, (ceil(n / 2),) uint8 for 4 and (ceil(n / 4),) for 2, the first entry in the lowest
        bits, 0 after the last. "natural" has 128 for a negative entry, plus 0 for 0, 1 to 125 for
        2**-80 to 2**44, 126 for inf; 127 is nan. "e3m0" has 8 for a negative entry, plus 0 for 0, 1
        to 7 for 1 to 64. "ternary" has 0, 1, or 2 for -1. Scales are (ceil(n / block_size),)
        float32; (0,) for "natural".
    """
    check_buffer("x", x)
    kind = find_format(bits, format, block_size)
    if residual is not None:
        check_like("residual", residual, "x", x)
    seed, offset = as_seed(seed), as_offset(offset, x)
    if out is None:
        codes = torch.empty(kind.num_codes(x.numel()), dtype=kind.dtype, device=x.device)
        blocks = kind.num_scales(x.numel(), block_size)
        scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    else:
        codes, scales = out
        check_message("codes", codes, "scales", scales, kind, block_size, x.numel(), x.device)
    _quantize_checked(x, bits, format, block_size, residual, seed, offset, codes, scales)
    return codes, scales


def dequantize(
    codes: Tensor,
    scales: Tensor,
    *,
    bits: int,
    format: str = "int",
    block_size: int = 256,
    numel: int,
    out: Tensor | None = None,
    accumulate: bool = False,
    corrupt: Tensor | None = None,
) -> Tensor:
    """Decode messages of ``quantize``: each code times the scale of its block.

    Messages are not trusted. An entry is corrupt if its block's scale is negative or infinite, or
    if its code is one that ``quantize`` never emits: -128, or -8 of 4 bits; an inf or a nan of
    8-bit floats; 3 of "ternary"; -0 of "e3m0", -0 or -nan of "natural". The CPU rejects the whole
    message before anything is written. Elsewhere, without a host synchronization, a corrupt entry
    is written as 0, or adds nothing, and is counted.

    Args:
        codes, scales: as returned by ``quantize``; or in rows, as in received bytes.
        bits, format, block_size: as given to it.
        numel: n, the number of entries.
        out: (n,) float32, bfloat16 or float16, written and returned; None: a new float32 tensor.
        accumulate: add to ``out``, which must be given, instead of overwriting it.
        corrupt: 0-d int64 on codes' device; the number of corrupt entries is added to it. Without
            it a later call of an op that decodes raises, on the same GPU; in a function compiled by
            ``torch.compile`` an assertion on the device fails.
    """
    kind = find_format(bits, format, block_size)
    out = output(out, numel, accumulate, codes.device)
    if codes.dim() == 2:
        check_message_in_rows(codes, scales, kind, block_size, numel, out.device)
    else:
        check_message("codes", codes, "scales", scales, kind, block_size, numel, out.device)
    counter = corrupt_counter(corrupt, out)
    _dequantize_checked(codes, scales, bits, format, block_size, accumulate, out, counter)
    stop_if_corrupt(corrupt, counter, CORRUPT)
    return out


def dequantize_sum(
    codes: Tensor,
    scales: Tensor,
    *,
    bits: int,
    format: str = "int",
    block_size: int = 256,
    numel: int,
    divisor: float = 1.0,
    out: Tensor | None = None,
    corrupt: Tensor | None = None,
) -> Tensor:
    """Decode several messages of ``quantize`` and add them up in one pass, such as for a mean.

    Entries are added in float32, those of the first message first, and divided by ``divisor``: to
    the bit what ``dequantize(accumulate=True)`` of one message after the other gives in a float32
    buffer of zeros. Messages are not trusted, as for ``dequantize``: the CPU rejects all if one is
    corrupt.

    Args:
        codes: (messages, codes of n entries) with a message's codes in each row, at least one; rows
            may lie apart, as in received bytes.
        scales: (messages, ceil(n / block_size)) float32, or (messages, 0) for "natural"; likewise.
        bits, format, block_size: as given to ``quantize``.
        numel: n, the number of entries.
        divisor: what the sum is divided by, not 0, such as the number of messages.
        out: (n,) float32, bfloat16 or float16, written and returned; None: a new float32 tensor.
        corrupt: as for ``dequantize``.
    """
    kind = find_format(bits, format, block_size)
    if divisor == 0:
        raise ValueError(f"divisor must not be 0, got {divisor}")
    out = output(out, numel, False, codes.device)
    check_messages(codes, scales, kind, block_size, numel, out.device)
    counter = corrupt_counter(corrupt, out)
    _dequantize_sum_checked(codes, scales, bits, format, block_size, float(divisor), out, counter)
    stop_if_corrupt(corrupt, counter, CORRUPT)
    return out
