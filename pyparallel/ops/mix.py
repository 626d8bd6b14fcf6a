"""``mix_``: PushSum average of a buffer with received messages, in place."""

import math

import torch
from torch import Tensor

from ._checks import check_all_like, check_buffer, check_doubles, has_memory
from ._library import checked, define


def mix_reference(z: Tensor, weight: Tensor, messages: list[Tensor], masses: Tensor) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against.

    fp32 results of all implementations are equal bit for bit, because each evaluates
    ``z + sum_j c_j * (messages[j] - z)`` in this order, rounding after every operation. The sum
    starts at -0.0, which changes no z, and leaves messages out whose ``c_j`` is 0.
    """
    total = sum(masses.unbind(), start=weight)
    own = z.float()
    delta = torch.full_like(own, -0.0)
    for message, mass in zip(messages, masses.unbind(), strict=True):
        share = (mass / total).float()
        delta = torch.where(share == 0, delta, delta + share * (message.float() - own))
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
