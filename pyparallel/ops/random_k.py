"""``random_k`` and ``random_k_indices``: entries chosen by a seed, so that no indices are sent."""

import torch
from torch import Tensor

from ._checks import check_buffer, check_like
from ._library import checked, define
from ._philox import as_offset, as_seed, philox

_ROUNDS = 8
_MIN_HALF_BITS = 4
_LOW = 0xFFFFFFFF


def random_k_indices_reference(
    numel: int, seed: int, offset: Tensor, run_length: int, indices: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    The order of the runs is a Feistel network of eight rounds over the next power of two,
    cycle-walked until it falls below the number of runs. Its round functions, the upper half of
    ``a * x + b`` with random ``a`` and ``b``, are strongly universal.
    """
    if indices.numel() == 0 or indices.is_meta:  # meta tensors have no values to cycle-walk
        return
    multipliers, addends = _keys(seed, offset.to(indices.device))
    num_runs = numel // run_length
    numbers = torch.arange(-(-indices.numel() // run_length), device=indices.device)
    numbers = _permute(numbers, num_runs, multipliers, addends)
    while (outside := numbers >= num_runs).any():
        walked = _permute(numbers[outside], num_runs, multipliers, addends)
        numbers[outside] = walked
    runs = numbers.sort().values
    elements = torch.arange(run_length, device=indices.device)
    unturned = (run_length * runs[:, None] + elements).flatten()[: indices.numel()]
    rotation = (multipliers[_ROUNDS] >> 1 & 2**63 - 1) % numel
    indices.copy_(((unturned + rotation) % numel).sort().values)


def _keys(seed: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return random 64-bit multipliers and addends of each round and of the rotation."""
    index = torch.arange(_ROUNDS + 1, device=offset.device)
    offset = offset + torch.zeros_like(index)
    # No buffer element's counter has a full upper word: other ops draw different numbers.
    tag = torch.full_like(index, _LOW)
    words = philox((index, tag, offset & _LOW, offset >> 32 & _LOW), seed)
    return words[0] | words[1] << 32, words[2] | words[3] << 32


def _permute(numbers: Tensor, num_runs: int, multipliers: Tensor, addends: Tensor) -> Tensor:
    bits = max(2 * _MIN_HALF_BITS, (num_runs - 1).bit_length())
    low_bits, high_bits = (bits + 1) // 2, bits // 2
    high, low = numbers >> low_bits, numbers & (1 << low_bits) - 1
    for index in range(0, _ROUNDS, 2):
        hashed = (low * multipliers[index] + addends[index]) >> 32
        high = high ^ hashed & (1 << high_bits) - 1
        hashed = (high * multipliers[index + 1] + addends[index + 1]) >> 32
        low = low ^ hashed & (1 << low_bits) - 1
    return high << low_bits | low


random_k_indices_unchecked = define(
    "random_k_indices(int numel, int seed, Tensor offset, int run_length, Tensor(a!) indices)"
    " -> ()",
    random_k_indices_reference,
)
_random_k_indices_checked = checked(random_k_indices_unchecked)


def random_k_indices(
    numel: int,
    k: int,
    *,
    seed: int,
    offset: int | Tensor = 0,
    run_length: int = 1,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw k of numel positions without replacement: the same on every rank and device.

    Every position is drawn with probability ``k / numel``. Runs of 32 touch a quarter of the
    memory that single entries do: positions then come in runs of neighbors, on a grid that starts
    at a random position and wraps around the end of the buffer (the last run is cut to make k).

    Args:
        numel: the length of the buffer, at most 2**62.
        k: how many positions, at most the whole runs in the buffer: ``numel // run_length *
            run_length``.
        seed: in [0, 2**64), the same on all ranks.
        offset: index of the draw of this seed, such as the step; a number, or a 0-d int64 tensor on
            the cpu or on ``device``.
        run_length: how many neighbors are drawn together, at least 1.

    Returns:
        (k,) int32, int64 if numel is 2**31 or more, strictly ascending: fit for ``scatter_add_``.
    """
    _require_within("numel", numel, 0, 2**62, "2**62")
    _require_within("run_length", run_length, 1, 2**62, "2**62")
    most = numel // run_length * run_length
    if not 0 <= k <= most:
        raise ValueError(
            f"k must be in [0, {most}], the whole runs of {run_length} in {numel} elements, got {k}"
        )
    dtype = torch.int32 if numel < 2**31 else torch.int64
    indices = torch.empty(k, dtype=dtype, device=device or "cpu")
    offset = as_offset(offset, indices)
    _random_k_indices_checked(numel, as_seed(seed), offset, run_length, indices)
    return indices


def _require_within(name: str, number: int, low: int, high: int, high_name: str) -> None:
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low}, {high_name}], got {number}")


def random_k_reference(x: Tensor, indices: Tensor, residual: Tensor | None, values: Tensor) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    at = indices.long()
    if residual is None:
        values.copy_(x[at])
        return
    accumulated = x.float() + residual.float()
    sent = accumulated[at]
    values.copy_(sent)
    rest = sent - values.float()
    accumulated[at] = torch.where(rest.isfinite(), rest, 0.0)
    residual.copy_(accumulated)


random_k_unchecked = define(
    "random_k(Tensor x, Tensor indices, Tensor(a!)? residual, Tensor(b!) values) -> ()",
    random_k_reference,
)
_random_k_checked = checked(random_k_unchecked)


def random_k(
    x: Tensor,
    k: int,
    *,
    seed: int,
    offset: int | Tensor = 0,
    residual: Tensor | None = None,
    run_length: int = 1,
) -> Tensor:
    """Return the entries of a buffer that a seed chooses: RandK (Stich et al., arXiv 1809.07599).

    The values lie at ``random_k_indices(n, k, seed=seed, offset=offset, run_length=run_length)``,
    which the receiver computes for itself. Scaled by ``n / k``, which is left to the caller, they
    are an unbiased estimate of x; with a residual they need no scaling, since entries that are not
    sent now are sent later.

    Args:
        x: (n,) float32, bfloat16 or float16.
        k: how many entries, at most ``n // run_length * run_length``.
        seed: in [0, 2**64), the same on all ranks.
        offset: index of the draw of this seed, such as the step; a number, or a 0-d int64 tensor on
            the cpu or x's device.
        residual: (n,) in one of these dtypes: the error of earlier messages. Written. The entries
            are taken from ``x + residual``; the residual becomes the sum where it was not sent, and
            the error of rounding to x's dtype where it was.
        run_length: how many neighbors are drawn together, at least 1; 32 floats are a cache line of
            a GPU.

    Returns:
        (k,) in x's dtype: the entries in ascending order of their positions.
    """
    check_buffer("x", x)
    if residual is not None:
        check_like("residual", residual, "x", x)
    indices = random_k_indices(
        x.numel(), k, seed=seed, offset=offset, run_length=run_length, device=x.device
    )
    values = x.new_empty(k)
    _random_k_checked(x, indices, residual, values)
    return values
