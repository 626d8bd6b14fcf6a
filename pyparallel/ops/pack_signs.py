"""Codes that stand for means of their block: signs, and the bins of statistical quantization."""

import torch
from torch import Tensor

from ._checks import check_block_size, check_buffer, check_like, check_tensor, num_blocks, output
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._library import checked, define

_SMALLEST = 2.0**-100
_PARTIAL_SUMS = 256
_CORRUPT = "scales must be what pack_signs emits, got a corrupt message"
_UNITS = 2.0**20
_CORRUPT_TABLES = "tables must be what quantize_statistical emits, got a corrupt message"


def pack_signs_reference(
    x: Tensor, block_size: int, residual: Tensor | None, words: Tensor, scales: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    numel = x.numel()
    accumulated = x.float() if residual is None else x.float() + residual.float()
    padding = scales.numel() * block_size - numel
    blocks = torch.nn.functional.pad(accumulated, (0, padding)).view(-1, block_size)
    is_positive = blocks >= 0

    sums = _sum_in_order(blocks.abs())
    counts = torch.full_like(sums, block_size)
    counts[-1:] -= padding
    means = sums / counts
    is_finite = sums < float("inf")  # False for nan too
    live_scales = torch.where(means < _SMALLEST, 0.0, means)
    scales.copy_(torch.where(is_finite, live_scales, float("nan")))

    bits = is_positive.flatten()[:numel]
    bits = torch.nn.functional.pad(bits, (0, -numel % 8)).view(-1, 8)
    places = torch.arange(8, device=x.device)
    words.copy_((bits.long() << places).sum(dim=1))
    if residual is not None:
        sent = torch.where(is_positive, live_scales[:, None], -live_scales[:, None])
        remains = (blocks - sent).flatten()[:numel]
        keeps = is_finite.repeat_interleave(block_size)[:numel]
        residual.copy_(torch.where(keeps, remains, residual.float()))


def _sum_in_order(blocks: Tensor) -> Tensor:
    """Return the sum of each row, in an order that suits GPU warps and CPU vectors alike.

    Elements 256 apart are added in sequence; then eight neighbors each as a balanced tree; then the
    two halves of the rest, repeatedly.
    """
    first, *others = blocks.split(_PARTIAL_SUMS, dim=1)
    e = sum(others, start=first).unflatten(1, (-1, 8)).unbind(dim=2)
    sums: Tensor = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]))
    while sums.size(1) > 1:
        front, back = sums.chunk(2, dim=1)
        sums = front + back
    return sums.squeeze(1)


def unpack_signs_reference(
    words: Tensor, scales: Tensor, block_size: int, accumulate: bool, out: Tensor, corrupt: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    numel = out.numel()
    scale = scales.repeat_interleave(block_size)[:numel]
    is_corrupt = (scale < 0) | scale.isinf()
    refuse_or_count(is_corrupt, corrupt, _CORRUPT)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = (words[:, None] >> places & 1).flatten()[:numel]
    values = torch.where(bits == 1, scale, -scale)
    if accumulate:
        out.copy_(torch.where(is_corrupt, out.float(), out.float() + values))
    else:
        out.copy_(torch.where(is_corrupt, 0.0, values))


def quantize_statistical_reference(
    x: Tensor, bits: int, block_size: int, residual: Tensor | None, codes: Tensor, tables: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    numel, num_bins = x.numel(), 1 << bits
    acc = x.float() if residual is None else x.float() + residual.float()
    blocks = torch.nn.functional.pad(acc, (0, -numel % block_size)).view(-1, block_size)
    exists = torch.arange(blocks.numel(), device=x.device).view_as(blocks) < numel
    largest = blocks.abs().amax(dim=1, keepdim=True)
    is_finite = largest < float("inf")  # False for nan too
    is_live = is_finite & (largest >= _SMALLEST)
    # Sums of such units are exact, in any order. (As a number, torch would multiply by 1 / safe.)
    safe = torch.where(is_live, largest, 1.0)
    per_unit = torch.full_like(safe, _UNITS) / safe
    units = torch.where(is_live, blocks * per_unit, 0.0).round().double()
    counts = exists.sum(dim=1, keepdim=True)
    mean = units.sum(dim=1, keepdim=True) / counts
    variance = units.square().sum(dim=1, keepdim=True) / counts - mean.square()
    width = variance.clamp(min=0).sqrt() * (6 / num_bins)
    middle, per_width = mean.float(), torch.where(width > 0, 1 / width, 0.0).float()
    each = ((units.float() - middle) * per_width + num_bins / 2).clamp(0, num_bins - 1).long()
    empty = units.new_zeros((len(blocks), num_bins))
    sums, numbers = (empty.scatter_add(1, each, of) for of in (units, exists.double()))
    offsets = torch.arange(num_bins, dtype=torch.float64, device=x.device) - num_bins / 2 + 0.5
    width = torch.where(per_width > 0, 1 / per_width.double(), 0.0)
    centers = (middle.double() + offsets * width).clamp(-_UNITS, _UNITS)
    unit = torch.where(is_live, safe / _UNITS, 0.0)
    means = torch.where(numbers > 0, sums / numbers, centers).float() * unit
    tables.copy_(torch.where(is_finite, means, float("nan")).flatten())
    flat = torch.where(is_live, each, 0).flatten()[:numel]
    groups = torch.nn.functional.pad(flat, (0, -numel % (8 // bits))).view(-1, 8 // bits)
    codes.copy_((groups << torch.arange(0, 8, bits, device=x.device)).sum(dim=1))
    if residual is not None:
        rest = (blocks - means.gather(1, each)).nan_to_num(0.0, 0.0, 0.0).flatten()[:numel]
        keeps = is_finite.expand_as(blocks).flatten()[:numel]
        residual.copy_(torch.where(keeps, rest, residual.float()))


def dequantize_statistical_reference(
    codes: Tensor,
    tables: Tensor,
    bits: int,
    block_size: int,
    accumulate: bool,
    out: Tensor,
    corrupt: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    numel = out.numel()
    places = torch.arange(0, 8, bits, device=codes.device)
    each = (codes.long()[:, None] >> places & (1 << bits) - 1).flatten()[:numel]
    values = tables[(torch.arange(numel, device=codes.device) // block_size << bits) + each]
    rows = tables.view(-1, 1 << bits)
    is_sorted = rows.isfinite().all(dim=1) & (rows[:, :-1] <= rows[:, 1:]).all(dim=1)
    is_live = (rows.abs().amax(dim=1) >= 2.0**-110) | ~rows.any(dim=1)  # 1 / 100 of the largest
    is_table = (is_sorted & is_live) | rows.isnan().all(dim=1)
    is_corrupt = ~is_table.repeat_interleave(block_size)[:numel]
    refuse_or_count(is_corrupt, corrupt, _CORRUPT_TABLES)
    values = torch.where(is_corrupt, 0.0, values)
    out.copy_(out.float() + values if accumulate else values)


_PACK = (
    "pack_signs(Tensor x, int block_size, Tensor(a!)? residual, Tensor(b!) words, "
    "Tensor(c!) scales) -> ()"
)
_pack_signs_checked = checked(define(_PACK, pack_signs_reference))
_UNPACK = (
    "unpack_signs(Tensor words, Tensor scales, int block_size, bool accumulate, Tensor(a!) out, "
    "Tensor(b!) corrupt) -> ()"
)
_unpack_signs_checked = checked(define(_UNPACK, unpack_signs_reference))
_QUANTIZE = (
    "quantize_statistical(Tensor x, int bits, int block_size, Tensor(a!)? residual, "
    "Tensor(b!) codes, Tensor(c!) tables) -> ()"
)
_quantize_statistical_checked = checked(define(_QUANTIZE, quantize_statistical_reference))
_DEQUANTIZE = (
    "dequantize_statistical(Tensor codes, Tensor tables, int bits, int block_size, "
    "bool accumulate, Tensor(a!) out, Tensor(b!) corrupt) -> ()"
)
_dequantize_statistical_checked = checked(define(_DEQUANTIZE, dequantize_statistical_reference))


def pack_signs(
    x: Tensor, *, block_size: int = 1024, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Encode a buffer in one bit per entry, optionally with error feedback in the same pass.

    Each block of ``block_size`` entries of ``acc = x + residual`` becomes its signs and its mean
    magnitude, the scale: EF-signSGD (Karimireddy et al., ICML 2019, arXiv 1901.09847) by blocks,
    like 1-bit SGD by columns (Seide et al., Interspeech 2014). An entry decodes to plus or minus
    the scale; the residual becomes ``acc`` minus the decoded value.

    A block whose mean magnitude is below 2**-100 gets scale 0; its residual is ``acc``. A block
    whose magnitudes have no finite sum gets scale nan, decodes to nan everywhere, so that the error
    is visible, and keeps its old, finite residual.

    Args:
        x: (n,) float32, bfloat16 or float16.
        block_size: entries that share a scale, a power of two from 32 to 4096.
        residual: (n,) in one of these dtypes: the error of earlier messages. Written.

    Returns:
        The words and the scales. Words are (ceil(n / 8),) uint8, as
        ``numpy.packbits(acc >= 0, bitorder="little")`` gives them: entry i is bit ``i % 8`` of word
        ``i // 8``; the bits behind the last entry are 0. Scales are float32 of length
        ceil(n / block_size).
    """
    check_buffer("x", x)
    check_block_size(block_size)
    if residual is not None:
        check_like("residual", residual, "x", x)
    words = torch.empty(num_blocks(x.numel(), 8), dtype=torch.uint8, device=x.device)
    blocks = num_blocks(x.numel(), block_size)
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    _pack_signs_checked(x, block_size, residual, words, scales)
    return words, scales


def unpack_signs(
    words: Tensor,
    scales: Tensor,
    *,
    block_size: int = 1024,
    numel: int,
    out: Tensor | None = None,
    accumulate: bool = False,
    corrupt: Tensor | None = None,
) -> Tensor:
    """Decode messages of ``pack_signs``: plus the scale of its block if the bit is set, else minus.

    Messages are not trusted: a scale that is negative or infinite is corrupt. The CPU rejects the
    whole message before anything is written. Elsewhere, without a host synchronization, the entries
    of such a block are written as 0, or add nothing, and are counted.

    Args:
        words, scales: as returned by ``pack_signs``.
        block_size: as given to it.
        numel: n, the number of entries.
        out: (n,) float32, bfloat16 or float16, written and returned; None: a new float32 tensor.
        accumulate: add to ``out``, which must be given, instead of overwriting it.
        corrupt: 0-d int64 on words' device; the number of corrupt entries is added to it. Without
            it a later call of an op that decodes raises, on the same GPU; in a function compiled by
            ``torch.compile`` an assertion on the device fails.
    """
    check_block_size(block_size)
    out = output(out, numel, accumulate, words.device)
    check_tensor("words", words, torch.uint8, (num_blocks(numel, 8),), out.device)
    check_tensor("scales", scales, torch.float32, (num_blocks(numel, block_size),), out.device)
    counter = corrupt_counter(corrupt, out)
    _unpack_signs_checked(words, scales, block_size, accumulate, out, counter)
    stop_if_corrupt(corrupt, counter, _CORRUPT)
    return out


def quantize_statistical(
    x: Tensor, *, bits: int = 2, block_size: int = 4096, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Encode a buffer by bins around the mean of each block, with the mean of every bin.

    The 2**bits bins of a block of ``acc = x + residual`` have equal widths and cover six standard
    deviations, half of them on each side of the mean; what lies beyond goes to the outer ones. An
    entry decodes to the mean of its bin, to 2**-20 of the block's largest magnitude; an empty bin
    has its center for a mean. The residual becomes ``acc`` minus the decoded value. (MuLoCo, arXiv
    2505.23725; SparseLoCo, arXiv 2508.15706: their public code shifts the bins by half a width.)

    A block with an inf or a nan, or of magnitudes below 2**-100, is sent as by ``pack_signs``.

    Args:
        x: (n,) float32, bfloat16 or float16.
        bits: 2, 4 or 8.
        block_size: entries that share a table, a power of two from 32 to 4096.
        residual: (n,) in one of x's dtypes: the error of earlier messages. Written.

    Returns:
        codes, (ceil(n * bits / 8),) uint8, the first in the lowest bits, 0 after the last; and
        tables, float32, the 2**bits means of each of the ceil(n / block_size) blocks.
    """
    check_buffer("x", x)
    if residual is not None:
        check_like("residual", residual, "x", x)
    num_codes, num_means = sizes_of_bins(x.numel(), bits, block_size)
    codes = torch.empty(num_codes, dtype=torch.uint8, device=x.device)
    tables = torch.empty(num_means, dtype=torch.float32, device=x.device)
    _quantize_statistical_checked(x, bits, block_size, residual, codes, tables)
    return codes, tables


def dequantize_statistical(
    codes: Tensor,
    tables: Tensor,
    *,
    bits: int = 2,
    block_size: int = 4096,
    numel: int,
    out: Tensor | None = None,
    accumulate: bool = False,
    corrupt: Tensor | None = None,
) -> Tensor:
    """Decode messages of ``quantize_statistical``: the mean that each code stands for.

    Args:
        codes, tables: as returned by ``quantize_statistical``; bits, block_size: as given to it.
        numel, out, accumulate, corrupt: as for ``unpack_signs``; the means of a table ascend.
    """
    num_codes, num_means = sizes_of_bins(numel, bits, block_size)
    out = output(out, numel, accumulate, codes.device)
    check_tensor("codes", codes, torch.uint8, (num_codes,), out.device)
    check_tensor("tables", tables, torch.float32, (num_means,), out.device)
    counter = corrupt_counter(corrupt, out)
    _dequantize_statistical_checked(codes, tables, bits, block_size, accumulate, out, counter)
    stop_if_corrupt(corrupt, counter, _CORRUPT_TABLES)
    return out


def sizes_of_bins(numel: int, bits: int, block_size: int) -> tuple[int, int]:
    """Return the lengths of codes and tables; a ValueError of other bits or block sizes."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    check_block_size(block_size)
    return num_blocks(numel * bits, 8), num_blocks(numel, block_size) << bits
