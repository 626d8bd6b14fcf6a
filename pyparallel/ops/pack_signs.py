"""``pack_signs`` and ``unpack_signs``: messages with one bit per entry and a scale per block."""

import torch
from torch import Tensor

from ._checks import check_block_size, check_buffer, check_like, check_tensor, num_blocks, output
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._library import checked, define

_SMALLEST = 2.0**-100
_PARTIAL_SUMS = 256
_CORRUPT = "scales must be what pack_signs emits, got a corrupt message"


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


pack_signs_unchecked = define(
    "pack_signs(Tensor x, int block_size, Tensor(a!)? residual, Tensor(b!) words, "
    "Tensor(c!) scales) -> ()",
    pack_signs_reference,
)
_pack_signs_checked = checked(pack_signs_unchecked)
unpack_signs_unchecked = define(
    "unpack_signs(Tensor words, Tensor scales, int block_size, bool accumulate, Tensor(a!) out, "
    "Tensor(b!) corrupt) -> ()",
    unpack_signs_reference,
)
_unpack_signs_checked = checked(unpack_signs_unchecked)


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
