"""``mix_quantized_``: PushSum average with quantized messages, decoded in the same pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._formats import CORRUPT, check_message, decode_message, find_format
from ._library import checked, define
from .mix import check_masses, mix_reference


def mix_quantized_reference(
    z: Tensor,
    weight: Tensor,
    codes: list[Tensor],
    scales: list[Tensor],
    masses: Tensor,
    bits: int,
    format: str,
    block_size: int,
    replicas: list[Tensor],
    corrupt: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    kind, own = find_format(bits, format), z.float()
    decoded = []
    for code, scale in zip(codes, scales, strict=True):
        values, is_corrupt = decode_message(code, scale, kind, block_size, z.numel())
        refuse_or_count(is_corrupt, corrupt, CORRUPT)
        decoded.append((values, is_corrupt))
    if replicas:
        for replica, (values, is_corrupt) in zip(replicas, decoded, strict=True):
            replica.copy_(torch.where(is_corrupt, replica.float(), replica.float() + values))
        mix_reference(z, weight, replicas, masses)
    else:
        messages = [torch.where(is_corrupt, own, values) for values, is_corrupt in decoded]
        mix_reference(z, weight, messages, masses)


mix_quantized_unchecked = define(
    "mix_quantized_(Tensor(a!) z, Tensor(b!) weight, Tensor[] codes, Tensor[] scales, "
    "Tensor masses, int bits, str format, int block_size, Tensor(c!)[] replicas, "
    "Tensor(d!) corrupt) -> ()",
    mix_quantized_reference,
)
_mix_quantized_checked = checked(mix_quantized_unchecked)


def mix_quantized_(
    z: Tensor,
    weight: Tensor,
    codes: list[Tensor],
    scales: list[Tensor],
    masses: Tensor,
    *,
    bits: int,
    format: str = "int",
    block_size: int = 256,
    replicas: Sequence[Tensor] = (),
    corrupt: Tensor | None = None,
) -> None:
    """Average de-biased parameters with quantized messages, in place, as ``mix_`` does.

    Equal bit for bit to ``mix_`` with the messages decoded by ``dequantize``, which also defines
    corrupt entries. If there are any, the CPU changes nothing, not even the weight; elsewhere a
    corrupt entry is replaced by that of z, which leaves it unchanged.

    With replicas the messages are differences to them, from ``quantize_difference_`` (CHOCO-SGD,
    Koloskova et al., ICML 2019, arXiv 1902.00340): each is added to its replica as ``dequantize``
    does with ``accumulate``, and z is averaged with the replicas. A corrupt entry that is not on
    the CPU leaves its replica unchanged.

    Args:
        z: (n,) float32, bfloat16 or float16: the rank's de-biased parameters. Written.
        weight: 0-d float64 on z's device: the mass the rank kept for itself. Written.
        codes, scales: of k messages, each as returned by ``quantize``.
        masses: (k,) float64 on z's device: the mass of each message. One of 0 changes no bit of z;
            the message's replica is updated.
        bits, format, block_size: as given to ``quantize``.
        replicas: k tensors (n,) of z's dtype, which share no memory: the copies of the senders'
            parameters to which the messages are differences. Written. Empty: the messages are
            the parameters themselves.
        corrupt: 0-d int64 on z's device; the number of corrupt entries is added to it. Without it
            a later call of an op that decodes raises, on the same GPU; in a function compiled by
            ``torch.compile`` an assertion on the device fails.
    """
    _checks.check_buffer("z", z)
    kind = find_format(bits, format, block_size, of_differences=True)
    _checks.check_doubles("weight", weight, (), z)
    _checks.check_doubles("masses", masses, (len(codes),), z)
    if len(scales) != len(codes):
        raise ValueError(f"scales must be as many as codes, {len(codes)}, got {len(scales)}")
    for j, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        names = f"codes[{j}]", f"scales[{j}]"
        check_message(names[0], code, names[1], scale, kind, block_size, z.numel(), z.device)
    if replicas:
        if len(replicas) != len(codes):
            rule = f"none, or as many as codes, {len(codes)}"
            raise ValueError(f"replicas must be {rule}, got {len(replicas)}")
        _checks.check_replicas(replicas, lambda: list(_checks.by_index("replicas", replicas)), z)
    if z.is_cpu and _checks.has_memory(weight):
        check_masses("weight", weight.item(), masses.tolist())
    counter = corrupt_counter(corrupt, z)
    _mix_quantized_checked(
        z, weight, codes, scales, masses, bits, format, block_size, list(replicas), counter
    )
    stop_if_corrupt(corrupt, counter, CORRUPT)
