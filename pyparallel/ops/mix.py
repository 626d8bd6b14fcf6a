"""``mix_``: PushSum average of a buffer with received messages, in place.

And what surrounds messages: ``screen_headers``, which finds their masses, and ``add_or_clear_``.
"""

import math

import torch
from torch import Tensor

from ._checks import (
    check_all_like,
    check_buffer,
    check_doubles,
    check_like,
    check_tensor,
    describe,
    has_memory,
)
from ._library import checked, define

NUM_COLUMNS = 8
ANY = -1.0
NONFINITE_UNIT, FORWARDS_UNIT = 1 << 21, 1 << 42  # of what a counter counts at once


def mix_reference(z: Tensor, weight: Tensor, messages: list[Tensor], masses: Tensor) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    fp32 results of all implementations are equal bit for bit, because each evaluates
    ``z + sum_j c_j * (messages[j] - z)`` in this order, rounding after every operation. The sum
    starts at -0.0, which changes no z, and leaves messages out whose ``c_j`` is 0. Here alone z may
    be float64.
    """
    total = sum(masses.unbind(), start=weight)
    own = z.to(torch.promote_types(z.dtype, torch.float32))
    delta = torch.full_like(own, -0.0)
    for message, mass in zip(messages, masses.unbind(), strict=True):
        share = (mass / total).to(own.dtype)
        delta = torch.where(share == 0, delta, delta + share * (message.to(own.dtype) - own))
    z.copy_(own + delta)
    weight.copy_(total)


mix_unchecked = define(
    "mix_(Tensor(a!) z, Tensor(b!) weight, Tensor[] messages, Tensor masses) -> ()", mix_reference
)
_mix_checked = checked(mix_unchecked)


def mix_(z: Tensor, weight: Tensor, messages: list[Tensor], masses: Tensor) -> None:
    """Average de-biased parameters with messages, in place, and add the messages' mass.

    ``z = (weight * z + sum_j masses[j] * messages[j]) / (weight + sum(masses))``, then
    ``weight += sum(masses)``; this is PushSum (Kempe et al., FOCS 2003) as Stochastic Gradient
    Push uses it (Assran et al., ICML 2019, arXiv 1811.10792), kept in de-biased form.

    Args:
        z: (n,) float32, bfloat16 or float16: the rank's de-biased parameters. Written.
        weight: 0-d float64 on z's device: the mass the rank kept for itself. Written.
        messages: k tensors (n,), all of one of these dtypes: the senders' de-biased parameters.
        masses: (k,) float64 on z's device: the mass of each message. One of 0 changes no bit of z,
            whatever the message holds.
    """
    check_buffer("z", z)
    check_doubles("weight", weight, (), z)
    check_doubles("masses", masses, (len(messages),), z)
    check_all_like({}, messages, "z", z)
    if z.is_cpu and has_memory(weight):
        check_masses("weight", weight.item(), masses.tolist())
    _mix_checked(z, weight, messages, masses)


def check_masses(name: str, weight: float, masses: list[float]) -> None:
    """Raise unless the masses have a positive finite sum; ``name`` is that of the own mass."""
    if not 0 < sum(masses, weight) < math.inf or weight < 0 or min(masses, default=0) < 0:
        raise ValueError(
            f"{name} and masses must be at least 0 with a positive finite sum, "
            f"got {weight} and {masses}"
        )


def screen_headers_reference(
    rows: Tensor, expected: Tensor, masses: Tensor, counter: Tensor
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    wanted = expected.to(rows.device)
    mass, theirs, ours = rows[:, 0], rows[:, 1:7], wanted[:, 1:7]
    differs = (theirs != ours) & (theirs != ANY) & (ours != ANY)
    fits = ~differs[:, :-1].any(1) & (mass > wanted[:, 0]) & (mass <= wanted[:, 7])
    found = (~fits).long() + (rows[:, 7] != 0) * NONFINITE_UNIT + differs[:, -1] * FORWARDS_UNIT
    counter.add_(found.sum())
    masses.copy_(torch.where(fits, mass, torch.zeros_like(mass)))


screen_headers_unchecked = define(
    "screen_headers(Tensor rows, Tensor expected, Tensor(a!) masses, Tensor(b!) counter) -> ()",
    screen_headers_reference,
)
_screen_headers_checked = checked(screen_headers_unchecked)


def screen_headers(rows: Tensor, expected: Tensor, *, counter: Tensor) -> Tensor:
    """Return the masses of messages by their headers, 0 for those that are not as expected.

    A header is eight numbers: the mass, five fields, the number of forwards, and how many entries
    of the sender's gradient were not finite. It fits if each field equals the expected one, or one
    of the two is -1, and if the mass is above the expected row's first number and at most its last.
    Forwards are compared likewise, but only counted. No host waits, nothing is copied to the
    device: what is expected goes into the arguments of the kernel, of one for 32 headers.

    Args:
        rows: (k, 8) float64: the received headers.
        expected: (k, 8) float64 on the CPU: the lower bound of the mass, which is not allowed,
            the fields, the forwards, and the upper bound.
        counter: 0-d int64 on rows' device. Added to it are 1 for each header that does not fit,
            2**21 for each sender with entries that are not finite, and 2**42 for each with another
            number of forwards.

    Returns:
        (k,) float64, on rows' device.
    """
    if rows.dim() != 2:
        raise ValueError(f"rows must be (k, 8) float64, got {describe(rows)}")
    shape = (rows.shape[0], NUM_COLUMNS)
    check_doubles("rows", rows, shape, rows, "rows")
    check_tensor("expected", expected, torch.float64, shape, torch.device("cpu"))
    check_tensor("counter", counter, torch.int64, (), rows.device, "rows's device")
    masses = torch.empty(shape[0], dtype=torch.float64, device=rows.device)
    _screen_headers_checked(rows, expected, masses, counter)
    return masses


def add_or_clear_reference(x: Tensor, y: Tensor | None, times: float, clear: Tensor | None) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    if y is not None:
        total = torch.add(x.float(), y.float(), alpha=times).to(x.dtype)
        x.copy_(torch.where(total.isfinite(), total, x))
    if clear is not None:
        x.masked_fill_(clear, 0.0)


add_or_clear_unchecked = define(
    "add_or_clear_(Tensor(a!) x, Tensor? y, float times, Tensor? clear) -> ()",
    add_or_clear_reference,
)
_add_or_clear_checked = checked(add_or_clear_unchecked)


def add_or_clear_(
    x: Tensor, y: Tensor | None = None, *, times: float = 1.0, clear: Tensor | None = None
) -> Tensor:
    """Add ``times * y`` to a buffer, in place; or, if the flag is set, make it 0.

    Each sum is rounded once, in float32, then to x's dtype; an entry whose sum is not finite stays
    as it is. The host does not read the flag: a kernel that has nothing to add reads it and is over
    if it is not set.

    Args:
        x: (n,) float32, bfloat16 or float16. Written.
        y: (n,) in one of these dtypes; None: nothing is added.
        times: factor of y.
        clear: 0-d bool on x's device: whether x becomes 0; None: it does not.

    Returns:
        x.
    """
    check_buffer("x", x)
    if y is not None:
        check_like("y", y, "x", x)
    if clear is not None:
        check_tensor("clear", clear, torch.bool, (), x.device, "x's device")
    _add_or_clear_checked(x, y, float(times), clear)
    return x
