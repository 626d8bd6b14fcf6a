"""``quantize_difference_`` against separate ops, and a round of compressed gossip, both ends.

The round is encoding on a sender, then decoding and averaging on a receiver, without a network. Two
senders take turns, so that the difference to the replica does not vanish.
"""

from collections.abc import Iterator
from itertools import cycle

import torch

from benchmarks.harness.measure import Case, Provider, beside, compile_reference, format_name
from pyparallel.ops import dequantize, mix_, mix_quantized_, quantize, quantize_difference_
from pyparallel.ops.quantize_difference import quantize_difference_reference

BLOCK_SIZE = 256
SHARE = 0.5  # of the mass, which is sent; the rest is kept
SEED = 1
ENCODINGS = [
    # bits, format, rounded stochastically
    (8, "int", False),
    (8, "int", True),
    (4, "int", False),
    (8, "e4m3", False),
]


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    for numel in sizes:
        for encoding in ENCODINGS:
            yield make_encoding(device, numel, *encoding)
        for threads in (None, 1) if device == "cpu" else (None,):
            yield make_round(device, numel, threads)


def make_encoding(device, numel, bits, format, stochastic) -> Case:
    kind = {"bits": bits, "format": format, "block_size": BLOCK_SIZE}
    seed = SEED if stochastic else None
    replica, *senders = (torch.randn(numel, device=device) for _ in range(3))
    turns = cycle(senders)
    ratio, offset = as_double(1.0, device), torch.tensor(0)
    codes, scales = message = quantize(replica, **kind)
    compiled = compile_reference(quantize_difference_reference, device)

    def ours() -> None:
        quantize_difference_(next(turns), replica, ratio, **kind, seed=seed, out=message)

    def separate_ops() -> None:
        send_in_passes(next(turns), replica, ratio, kind, seed)

    def compiled_reference() -> None:
        z = next(turns)
        compiled(z, replica, ratio, bits, format, BLOCK_SIZE, seed, offset, codes, scales)

    providers = beside(ours, separate_ops, compiled_reference, "pyparallel, separate ops")
    name = f"{format_name(bits, format)}{' stochastic' * stochastic}"
    num_bytes = 16 * numel + codes.nbytes + scales.nbytes
    return Case("quantize_difference", name, numel, num_bytes, providers, device)


def make_round(device, numel, threads) -> Case:
    kind = {"bits": 8, "format": "int", "block_size": BLOCK_SIZE}
    sent, mine, received, *senders = (torch.randn(numel, device=device) for _ in range(5))
    turns = cycle(senders)
    ratio, weight = as_double(SHARE / (1 - SHARE), device), as_double(1 - SHARE, device)
    kept, masses = weight.clone(), torch.full_like(weight.view(1), SHARE)
    corrupt = torch.zeros((), dtype=torch.int64, device=device)

    def ours() -> None:
        weight.copy_(kept)
        codes, scales = quantize_difference_(next(turns), sent, ratio, **kind)
        mix_quantized_(
            mine, weight, [codes], [scales], masses, **kind, replicas=[received], corrupt=corrupt
        )

    def separate_ops() -> None:
        weight.copy_(kept)
        message = send_in_passes(next(turns), sent, ratio, kind, None)
        decoding = {"numel": numel, "out": received, "accumulate": True, "corrupt": corrupt}
        dequantize(*message, **kind, **decoding)
        mix_(mine, weight, [received], masses)

    providers = [Provider("pyparallel", ours), Provider("pyparallel, separate ops", separate_ops)]
    name = "round of int8, both ends" + (f", {threads} thread" if threads else "")
    num_bytes = 2 * (17 * numel + 4 * (numel // BLOCK_SIZE))
    return Case("quantize_difference", name, numel, num_bytes, providers, device, threads)


def send_in_passes(z, replica, ratio, kind, seed) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute difference, message, replica and residual one after the other."""
    message = quantize(z - replica, **kind, seed=seed)
    dequantize(*message, **kind, numel=z.numel(), out=replica, accumulate=True)
    own = z.float()
    z.copy_(own + (own - replica.float()) * ratio.float())
    return message


def as_double(number, device) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device=device)
