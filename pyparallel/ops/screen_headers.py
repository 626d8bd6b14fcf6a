"""``screen_headers``: compare the headers of received messages where the host does not wait."""

import torch
from torch import Tensor

from ._checks import check_doubles, check_tensor, describe
from ._library import checked, define

NUM_COLUMNS = 8
ANY = -1.0
NONFINITE_UNIT, FORWARDS_UNIT = 1 << 21, 1 << 42  # of what a counter counts at once


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
