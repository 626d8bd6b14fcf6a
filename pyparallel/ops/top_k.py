"""``top_k`` and ``scatter_add_``: extract a buffer's largest entries, and add them to another."""

import torch
from torch import Tensor

from ._checks import check_buffer, check_like, check_tensor, describe
from ._corrupt import corrupt_counter, stop_if_corrupt
from ._library import checked, define

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_INDEX_DTYPES = (torch.int32, torch.int64)
_CORRUPT_RULE = "indices must be strictly ascending and in [0, {})"


def top_k_reference(
    x: Tensor, residual: Tensor | None, threshold: Tensor | None, values: Tensor, indices: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    Magnitudes are compared as the 31 bits below the sign of a float32, which order as the numbers
    do; all NaNs are equal, and larger than infinity.
    """
    acc = x.float() if residual is None else x.float() + residual.float()
    bits = acc.view(torch.int32) & 0x7FFFFFFF
    keys = torch.where(bits > _INFINITY, _NAN, bits)
    largest, order = keys.sort(descending=True, stable=True)
    chosen = order[: len(values)].sort().values
    sent = acc[chosen]
    values.copy_(sent)
    indices.copy_(chosen)
    if residual is not None:
        kept = (sent - values.float()).to(residual.dtype)
        residual.copy_(torch.where(acc.isfinite(), acc, 0) if len(values) > 0 else acc)
        residual[chosen] = torch.where(kept.isfinite(), kept, 0)
    if threshold is not None and len(values) > 0:
        threshold.copy_(largest[len(values) - 1].view(torch.float32))


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


top_k_unchecked = define(
    "top_k(Tensor x, Tensor(a!)? residual, Tensor(b!)? threshold, Tensor(c!) values, "
    "Tensor(d!) indices) -> ()",
    top_k_reference,
)
_top_k_checked = checked(top_k_unchecked)
scatter_add_unchecked = define(
    "scatter_add_(Tensor(a!) dense, Tensor values, Tensor indices, Tensor(b!) corrupt) -> ()",
    scatter_add_reference,
)
_scatter_add_checked = checked(scatter_add_unchecked)


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
    values = torch.empty(k, dtype=x.dtype, device=x.device)
    index_dtype = torch.int32 if len(x) < 2**31 else torch.int64
    indices = torch.empty(k, dtype=index_dtype, device=x.device)
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


def _check_indices(indices: Tensor, values: Tensor) -> None:
    fits = indices.dtype in _INDEX_DTYPES and indices.shape == values.shape
    if not (fits and indices.is_contiguous() and indices.device == values.device):
        raise ValueError(
            "indices must be a contiguous 1-d tensor of int32 or int64 with values's length and "
            f"device ({describe(values)}), got {describe(indices)}"
        )
