"""``quantize_difference_``: quantized difference to a replica; updates replica and parameters."""

import torch
from torch import Tensor

from . import _checks
from ._formats import check_message, decode_message, find_format
from ._library import checked, define
from ._philox import as_offset, as_seed
from .quantize import quantize_reference


def quantize_difference_reference(
    z: Tensor,
    replica: Tensor,
    ratio: Tensor,
    bits: int,
    format: str,
    block_size: int,
    seed: int | None,
    offset: Tensor,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    own, copy = z.float(), replica.float()
    quantize_reference(own - copy, bits, format, block_size, None, seed, offset, codes, scales)
    kind = find_format(bits, format)
    decoded, _ = decode_message(codes, scales, kind, block_size, z.numel())
    replica.copy_(copy + decoded)
    z.copy_(own + (own - replica.float()) * ratio.float())


quantize_difference_unchecked = define(
    "quantize_difference_(Tensor(a!) z, Tensor(b!) replica, Tensor ratio, int bits, str format, "
    "int block_size, int? seed, Tensor offset, Tensor(c!) codes, Tensor(d!) scales) -> ()",
    quantize_difference_reference,
)
_quantize_difference_checked = checked(quantize_difference_unchecked)


def quantize_difference_(
    z: Tensor,
    replica: Tensor,
    ratio: _checks.Number,
    *,
    bits: int = 8,
    format: str = "int",
    block_size: int = 256,
    seed: int | None = None,
    offset: int | Tensor = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode the difference of parameters and replica, and update both, in one pass.

    The message is ``z - replica``, computed in float32 and encoded as ``quantize`` does without a
    residual: the compressed difference of DIANA (Mishchenko et al., 2019, arXiv 1901.09269) and
    CHOCO-SGD (Koloskova et al., ICML 2019, arXiv 1902.00340). Then ``replica += decoded message``,
    as ``dequantize`` does on the receivers, and ``z += (z - replica) * ratio``: a sender of PushSum
    whose receivers average with the replica keeps the mass of the difference that is left.

    A block of differences with an inf or a nan sends nan, and becomes nan in replica and z.

    Args:
        z: (n,) float32, bfloat16 or float16: the rank's de-biased parameters. Written.
        replica: (n,) of z's dtype: the receivers' copy of z. Written.
        ratio: the mass sent over the mass kept, at least 0; a number, or a 0-d tensor on the cpu
            or z's device.
        bits: 8 or 4.
        format: "int", "e4m3" or "e5m2".
        block_size: entries that share a scale, a power of two from 32 to 4096.
        seed, offset: as for ``quantize``.
        out: codes and scales of an earlier call, written and returned. None: new tensors.

    Returns:
        The codes and the scales, as ``quantize`` returns them.
    """
    _checks.check_buffer("z", z)
    _checks.check_replicas((replica,), lambda: ("replica",), z)
    kind = find_format(bits, format, block_size, of_differences=True)
    holds = isinstance(ratio, Tensor) or 0 <= ratio < float("inf")
    _checks.require("ratio", "finite and at least 0", ratio, holds)
    ratio = _checks.as_scalar("ratio", ratio, z)
    seed, offset = as_seed(seed), as_offset(offset, z)
    if out is None:
        codes = torch.empty(kind.num_codes(z.numel()), dtype=kind.dtype, device=z.device)
        blocks = _checks.num_blocks(z.numel(), block_size)
        scales = torch.empty(blocks, dtype=torch.float32, device=z.device)
    else:
        codes, scales = out
        check_message("codes", codes, "scales", scales, kind, block_size, z.numel(), z.device)
    _quantize_difference_checked(
        z, replica, ratio, bits, format, block_size, seed, offset, codes, scales
    )
    return codes, scales
