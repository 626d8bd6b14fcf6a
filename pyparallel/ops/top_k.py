"""The largest entries of a buffer, or of each of its chunks, and their way into another buffer."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._checks import check_block_size, check_buffer, check_like, check_tensor, describe, output
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._library import checked, define

_CORRUPT_RULE = "indices must be strictly ascending and in [0, {})"
_CORRUPT_CHUNKS = "indices must ascend strictly within each chunk, got a corrupt message"


def top_k_reference(
    x: Tensor, residual: Tensor | None, threshold: Tensor | None, values: Tensor, indices: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    Magnitudes are compared as the 31 bits below the sign of a float32, which order as the numbers
    do; all NaNs are equal, and larger than infinity.
    """
    acc, keys = _keys(x, residual)
    largest, order = keys.sort(descending=True, stable=True)
    chosen = order[: len(values)].sort().values
    _send(acc, chosen, residual, values)
    indices.copy_(chosen)
    if threshold is not None and len(values) > 0:
        threshold.copy_(largest[len(values) - 1].view(torch.float32))


def _keys(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return acc, and its magnitudes as int32 that order as they do."""
    acc = x.float() if residual is None else x.float() + residual.float()
    bits = acc.view(torch.int32) & 0x7FFFFFFF
    return acc, torch.where(bits > 0x7F800000, 0x7FC00000, bits)  # infinity, nan


def _send(acc: Tensor, chosen: Tensor, residual: Tensor | None, values: Tensor) -> None:
    """Write the chosen entries to the values, and what they leave to the residual."""
    sent = acc[chosen]
    values.copy_(sent)
    if residual is not None:
        kept = (sent - values.float()).to(residual.dtype)
        residual.copy_(torch.where(acc.isfinite(), acc, 0) if len(values) > 0 else acc)
        residual[chosen] = torch.where(kept.isfinite(), kept, 0)


def scatter_add_reference(dense: Tensor, values: Tensor, indices: Tensor, corrupt: Tensor) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    wrong = (indices < 0) | (indices >= len(dense))
    wrong[1:] |= indices[1:] <= indices[:-1]
    if dense.device.type == "cpu":
        _refuse_first(wrong, indices, len(dense))
    corrupt += wrong.sum()
    padded = torch.cat([dense, dense.new_zeros(1)])  # skipped entries are added to the last element
    places = torch.where(wrong, len(dense), indices.long())
    padded[places] = (padded[places].float() + values.float()).to(dense.dtype)
    dense.copy_(padded[:-1])


def _refuse_first(wrong: Tensor, indices: Tensor, numel: int) -> None:
    if not wrong.any():
        return
    position = int(wrong.int().argmax())
    after = f" after {indices[position - 1]}" if position > 0 else ""
    rule = _CORRUPT_RULE.format(numel)
    raise RuntimeError(f"{rule}, got {indices[position]}{after} at position {position}")


def top_k_chunks_reference(
    x: Tensor, k: int, chunk: int, residual: Tensor | None, values: Tensor, indices: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    acc, keys = _keys(x, residual)
    keys = pad(keys, (0, -len(keys) % chunk), value=-1).view(-1, chunk)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    places = order[:, :k].sort(dim=1).values  # those that are missing at the end of the last row
    begins = torch.arange(len(keys), device=x.device)[:, None] * chunk
    _send(acc, (places + begins).flatten()[: len(values)], residual, values)
    places = torch.where(places + begins < len(acc), places, 0)
    pairs = pad(places, (0, k % 2)).unflatten(1, (-1, 2))
    words = pairs[:, :, 0] | pairs[:, :, 1] << 12
    octets = torch.stack([words & 0xFF, words >> 8 & 0xFF, words >> 16], dim=2).flatten(1)
    indices.copy_(octets[:, : num_bytes_of_indices(k)].flatten()[: len(indices)])


def scatter_chunks_reference(
    values: Tensor,
    indices: Tensor,
    k: int,
    chunk: int,
    accumulate: bool,
    out: Tensor,
    corrupt: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    sums = pad(out if accumulate else torch.zeros_like(out), (0, 1))
    rows, messages = torch.atleast_2d(values), torch.atleast_2d(indices)
    places = [_places_in_chunks(message, rows.size(1), k, chunk, len(out)) for message in messages]
    refuse_or_count(torch.cat(places) == len(out), corrupt, _CORRUPT_CHUNKS)
    for each, row in zip(places, rows, strict=True):
        sums[each] = (sums[each].float() + row.float()).to(out.dtype)
    out.copy_(sums[:-1])


def _places_in_chunks(octets: Tensor, count: int, k: int, chunk: int, numel: int) -> Tensor:
    """Return the positions of a message's values; ``numel`` for those that are corrupt."""
    chunks, width = -(-numel // chunk), num_bytes_of_indices(k)
    octets = pad(octets, (0, chunks * width - len(octets))).view(-1, width)
    first, second, third = pad(octets, (0, -width % 3)).int().unflatten(1, (-1, 3)).unbind(2)
    words = first | second << 8 | third << 16
    places = torch.stack([words & 0xFFF, words >> 12], dim=2).flatten(1)[:, :k]
    begins = torch.arange(chunks, device=octets.device)[:, None] * chunk
    wrong = places >= (numel - begins).clamp(max=chunk)
    wrong[:, 1:] |= places[:, 1:] <= places[:, :-1]
    return (places + begins).masked_fill(wrong, numel).flatten()[:count]


def num_bytes_of_indices(k: int) -> int:
    """Return the length of k indices of 12 bits: two in three bytes."""
    return (3 * k + 1) // 2


top_k_unchecked = define(
    "top_k(Tensor x, Tensor(a!)? residual, Tensor(b!)? threshold, Tensor(c!) values, "
    "Tensor(d!) indices) -> ()",
    top_k_reference,
)
_top_k_checked = checked(top_k_unchecked)
_ADD = "scatter_add_(Tensor(a!) dense, Tensor values, Tensor indices, Tensor(b!) corrupt) -> ()"
scatter_add_unchecked = define(_ADD, scatter_add_reference)
_scatter_add_checked = checked(scatter_add_unchecked)

_SCHEMA_OF_CHUNKS = (
    "top_k_chunks(Tensor x, int k, int chunk, Tensor(a!)? residual, Tensor(b!) values, "
    "Tensor(c!) indices) -> ()"
)
_top_k_chunks_checked = checked(define(_SCHEMA_OF_CHUNKS, top_k_chunks_reference))
_SCHEMA_OF_SCATTER = (
    "scatter_chunks(Tensor values, Tensor indices, int k, int chunk, bool accumulate, "
    "Tensor(a!) out, Tensor(b!) corrupt) -> ()"
)
_scatter_chunks_checked = checked(define(_SCHEMA_OF_SCATTER, scatter_chunks_reference))


def top_k(
    x: Tensor, k: int, *, residual: Tensor | None = None, threshold: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return exactly the k entries of largest magnitude, and keep the rest in the residual.

    With ``acc = x + residual`` in float32: the entries with the k largest ``|acc|``, at ties those
    of lower index, are returned; ``residual`` becomes ``acc`` where nothing was sent, and elsewhere
    the error of rounding to x's dtype. This is top-k with error feedback (Stich et al., NeurIPS
    2018, arXiv 1809.07599; Lin et al., ICLR 2018, arXiv 1712.01887). A NaN is larger than infinity,
    so it is sent and thus visible, and leaves residual 0, as does every entry whose error would not
    be finite. If more than k > 0 entries are infinite or NaN, those not sent leave residual 0 too.

    Args:
        x: (n,) float32, bfloat16 or float16.
        k: how many entries, in [0, n].
        residual: (n,) in one of these dtypes. Written. float32 is the fastest: it can hold ``acc``.
        threshold: 0-d float32 on x's device: the k-th magnitude of the previous step, which
            preselects candidates in this one; any value gives the exact result, a close one (or 0:
            unknown) in one pass. Written, unless k is 0.

    Returns:
        values (k,) in x's dtype and indices (k,), ascending, int32 (int64 from n = 2**31 on).
    """
    check_buffer("x", x)
    if not 0 <= k <= len(x):
        raise ValueError(f"k must be in [0, {len(x)}], got {k}")
    if residual is not None:
        check_like("residual", residual, "x", x)
    if threshold is not None:
        check_tensor("threshold", threshold, torch.float32, (), x.device)
    index_dtype = torch.int32 if len(x) < 2**31 else torch.int64
    values, indices = x.new_empty(k), x.new_empty(k, dtype=index_dtype)
    _top_k_checked(x, residual, threshold, values, indices)
    return values, indices


def scatter_add_(
    dense: Tensor, values: Tensor, indices: Tensor, *, corrupt: Tensor | None = None
) -> Tensor:
    """Add the result of ``top_k`` (of any rank) to a buffer: ``dense[indices] += values``.

    Sums are rounded once, from float32 to dense's dtype. Indices that are not strictly ascending in
    [0, n) are corrupt: ``top_k`` never returns them. The CPU rejects them before anything is
    written; elsewhere an entry whose index is out of range or not above the one before it is
    skipped and counted.

    Args:
        dense: (n,) float32, bfloat16 or float16. Written.
        values: (k,) in one of these dtypes, on dense's device.
        indices: (k,) int32 or int64, on dense's device, strictly ascending and in [0, n).
        corrupt: 0-d int64 on dense's device, to which the number of skipped entries is added;
            None: a later call of an op that decodes raises, on the same GPU; in a function compiled
            by ``torch.compile`` an assertion on the device fails.

    Returns:
        dense.
    """
    check_buffer("dense", dense)
    check_buffer("values", values)
    if values.device != dense.device:
        raise ValueError(f"values must be on dense's device, got {describe(values)}")
    _check_indices(indices, values)
    counter = corrupt_counter(corrupt, dense)
    _scatter_add_checked(dense, values, indices, counter)
    stop_if_corrupt(corrupt, counter, _CORRUPT_RULE.format(len(dense)))
    return dense


def top_k_chunks(
    x: Tensor, k: int = 64, *, chunk: int = 4096, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k entries of largest magnitude of each chunk, and keep the rest in the residual.

    A chunk is ``chunk`` neighbors of ``acc = x + residual``; a last, shorter one sends ``min(k, its
    length)``. Ties, nan, inf and the residual are as for ``top_k``. (SparseLoCo, arXiv 2508.15706.)

    Args:
        x: (n,) float32, bfloat16 or float16.
        k: entries of a chunk, in [1, chunk].
        chunk: a power of two from 32 to 4096.
        residual: (n,) in one of these dtypes. Written.

    Returns:
        values, in x's dtype, by ascending index, and their indices within the chunk, uint8: two in
        three bytes, the first in the low 12 of 24 bits. Every chunk begins with a byte.
    """
    check_buffer("x", x)
    _check_chunks(k, chunk)
    if residual is not None:
        check_like("residual", residual, "x", x)
    num_values, num_bytes = sizes_of_chunks(x.numel(), k, chunk)
    values, indices = x.new_empty(num_values), x.new_empty(num_bytes, dtype=torch.uint8)
    _top_k_chunks_checked(x, k, chunk, residual, values, indices)
    return values, indices


def scatter_chunks(
    values: Tensor,
    indices: Tensor,
    k: int = 64,
    *,
    chunk: int = 4096,
    numel: int,
    out: Tensor | None = None,
    accumulate: bool = False,
    corrupt: Tensor | None = None,
) -> Tensor:
    """Decode messages of ``top_k_chunks``: values at their indices, 0 elsewhere.

    Several are added one after the other, to the bit as by as many calls, in one pass over ``out``.
    Indices of a chunk that do not ascend strictly, or lie behind its end, are corrupt. The CPU
    rejects the message before anything is written; elsewhere they are skipped and counted.

    Args:
        values, indices: as returned by ``top_k_chunks``, values in any of its dtypes; of several
            messages (messages, values) and (messages, bytes), contiguous.
        k, chunk: as given to it; numel: n, the number of entries.
        out: (n,) float32, bfloat16 or float16, written and returned; None: a new float32 tensor.
        accumulate: add to ``out``, which must be given, instead of overwriting it.
        corrupt: 0-d int64 on values' device, as for ``scatter_add_``.
    """
    _check_chunks(k, chunk)
    check_buffer("values", values.flatten())
    rows = values.shape[:-1][:1]
    out = output(out, numel, accumulate, values.device)
    num_values, num_bytes = sizes_of_chunks(numel, k, chunk)
    check_tensor("values", values, values.dtype, (*rows, num_values), out.device)
    check_tensor("indices", indices, torch.uint8, (*rows, num_bytes), out.device)
    counter = corrupt_counter(corrupt, out)
    _scatter_chunks_checked(values, indices, k, chunk, accumulate, out, counter)
    stop_if_corrupt(corrupt, counter, _CORRUPT_CHUNKS)
    return out


def sizes_of_chunks(numel: int, k: int, chunk: int) -> tuple[int, int]:
    """Return the number of values, and of bytes of indices, of a message of ``top_k_chunks``."""
    whole, last = numel // chunk, min(k, numel % chunk)
    return whole * k + last, whole * num_bytes_of_indices(k) + num_bytes_of_indices(last)


def _check_chunks(k: int, chunk: int) -> None:
    check_block_size(chunk, "chunk")
    if not 1 <= k <= chunk:
        raise ValueError(f"k must be in [1, {chunk}], got {k}")


def _check_indices(indices: Tensor, values: Tensor) -> None:
    fits = indices.dtype in (torch.int32, torch.int64) and indices.shape == values.shape
    if not (fits and indices.is_contiguous() and indices.device == values.device):
        raise ValueError(
            "indices must be a contiguous 1-d tensor of int32 or int64 with values's length and "
            f"device ({describe(values)}), got {describe(indices)}"
        )
