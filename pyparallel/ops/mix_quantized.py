"""``mix_quantized_``: PushSum's average with quantized messages, decoded in the same pass."""

import torch
from torch import Tensor

from ._checks import check_block_size, check_buffer, check_doubles, has_memory
from ._corrupt import corrupt_counter, refuse_or_count, stop_if_corrupt
from ._formats import CORRUPT, check_message, decode_message, find_format
from ._library import define
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
    corrupt: Tensor,
) -> None:
    """The op in plain PyTorch: what it means, and what every kernel is tested against."""
    kind, own = find_format(bits, format), z.float()
    messages = []
    for code, scale in zip(codes, scales, strict=True):
        values, is_corrupt = decode_message(code, scale, kind, block_size, z.numel())
        refuse_or_count(is_corrupt, corrupt, CORRUPT)
        messages.append(torch.where(is_corrupt, own, values))
    mix_reference(z, weight, messages, masses)


define(
    "mix_quantized_(Tensor(a!) z, Tensor(b!) weight, Tensor[] codes, Tensor[] scales, "
    "Tensor masses, int bits, str format, int block_size, Tensor(c!) corrupt) -> ()",
    mix_quantized_reference,
)


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
    corrupt: Tensor | None = None,
) -> None:
    """Average de-biased parameters with quantized messages, in place; else as ``mix_``.

    Equal, to the last bit, to ``mix_`` with what ``dequantize`` makes of the messages. They are not
    trusted: see there what is corrupt. On the CPU nothing is changed then, the weight included;
    elsewhere a corrupt entry counts as one equal to z, which it leaves as it is.

    Args:
        z: (n,) float32, bfloat16 or float16: the rank's de-biased parameters. Written.
        weight: 0-d float64 on z's device: the mass the rank kept for itself. Written.
        codes: of k messages, each as ``quantize`` returns it.
        scales: of the same k messages.
        masses: (k,) float64 on z's device: the mass that came with each message.
        bits: as given to ``quantize``.
        format: likewise.
        block_size: likewise.
        corrupt: 0-d int64 on z's device; the number of corrupt entries is added to it. Without it
            a corrupt entry stops the device at its next synchronization.

    Raises:
        ValueError: an argument of another shape, dtype, device or layout; bits and format that do
            not go together; on the CPU also negative masses or a total that is not positive
            (elsewhere looking would stall).
        RuntimeError: a corrupt message on the CPU.
    """
    check_buffer("z", z)
    kind = find_format(bits, format)
    check_block_size(block_size)
    check_doubles("weight", weight, (), z)
    check_doubles("masses", masses, (len(codes),), z)
    if len(scales) != len(codes):
        raise ValueError(f"scales must be as many as codes, {len(codes)}, got {len(scales)}")
    for j, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        names = f"codes[{j}]", f"scales[{j}]"
        check_message(names[0], code, names[1], scale, kind, block_size, z.numel(), z.device)
    if z.device.type == "cpu" and has_memory(weight):
        check_masses("weight", weight.item(), masses.tolist())
    counter = corrupt_counter(corrupt, z)
    torch.ops.pyparallel.mix_quantized_(
        z, weight, codes, scales, masses, bits, format, block_size, counter
    )
    stop_if_corrupt(corrupt, counter, CORRUPT)
