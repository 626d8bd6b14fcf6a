"""``mix_quantized_`` against decoding into memory first, and torch.compile of the reference."""

import torch

from benchmarks.harness.measure import Case, Provider, compile_reference, format_name, sweep
from pyparallel.ops import dequantize, mix_, mix_quantized_, quantize
from pyparallel.ops._formats import find_format
from pyparallel.ops.mix_quantized import mix_quantized_reference

BLOCK_SIZE = 256
CASES = [
    # bits and format of the messages, how many, added to replicas
    (8, "int", 1, False),
    (8, "int", 2, False),
    (4, "int", 1, False),
    (8, "e4m3", 1, False),
    (8, "int", 1, True),
    (8, "int", 2, True),
]


def make_case(device, numel, bits, format, num_messages, adds) -> Case:
    kind = {"bits": bits, "format": format, "block_size": BLOCK_SIZE}
    z = torch.randn(numel, device=device)
    messages = [quantize(torch.randn(numel, device=device), **kind) for _ in range(num_messages)]
    codes, scales = [code for code, _ in messages], [scale for _, scale in messages]
    share = 1 / (num_messages + 1)
    kept = torch.tensor(share, dtype=torch.float64, device=device)
    weight = kept.clone()
    masses = torch.full((num_messages,), share, dtype=torch.float64, device=device)
    corrupt = torch.zeros((), dtype=torch.int64, device=device)
    decoded = [torch.zeros(numel, device=device) for _ in range(num_messages)]
    replicas = decoded if adds else []
    compiled = compile_reference(mix_quantized_reference, device)

    def ours() -> None:
        weight.copy_(kept)
        mix_quantized_(z, weight, codes, scales, masses, **kind, replicas=replicas, corrupt=corrupt)

    def two_passes() -> None:
        weight.copy_(kept)
        for code, scale, out in zip(codes, scales, decoded, strict=True):
            target = {"numel": numel, "out": out, "accumulate": adds, "corrupt": corrupt}
            dequantize(code, scale, **kind, **target)
        mix_(z, weight, decoded, masses)

    def separate_ops() -> None:
        z.mul_(share)
        for (code, scale), replica in zip(messages, decoded, strict=True):
            values = find_format(bits, format).unpack(code, numel)
            values = find_format(bits, format).decode(values).view(-1, BLOCK_SIZE)
            if adds:
                replica.view(-1, BLOCK_SIZE).addcmul_(values, scale[:, None])
                z.add_(replica, alpha=share)
            else:
                z.view(-1, BLOCK_SIZE).addcmul_(values, scale[:, None], value=share)

    def compiled_reference() -> None:
        weight.copy_(kept)
        compiled(z, weight, codes, scales, masses, bits, format, BLOCK_SIZE, replicas, corrupt)

    providers = [
        Provider("pyparallel mix_quantized_", ours),
        Provider("pyparallel dequantize, mix_", two_passes),
        Provider("torch ops", separate_ops),
        Provider("torch.compile of reference", compiled_reference),
    ]
    num_bytes = 8 * numel * (1 + len(replicas))
    num_bytes += sum(part.nbytes for message in messages for part in message)
    name = f"{num_messages} {format_name(bits, format)}{' to replicas' * adds}"
    return Case("mix_quantized", name, numel, num_bytes, providers, device)


cases = sweep((make_case, CASES))
