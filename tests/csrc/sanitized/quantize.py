"""Quantized messages of every length and corruption. Run by test_address_sanitizer.py."""

from collections import Counter
from itertools import product

import torch

from pyparallel import ops

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = (0, 1, 2, 7, 31, 33, 63, 65, 100, 255, 257, 1025, 4097, 9001)
FORMATS = ((8, "int"), (4, "int"), (8, "e4m3"), (8, "e5m2"), (2, "ternary"), (4, "e3m0"),
           (8, "natural"))  # fmt: skip
outcomes: Counter[str] = Counter()


def attempt(call, *arguments, **options):
    try:
        call(*arguments, **options)
        outcomes["accepted"] += 1
    except (RuntimeError, ValueError):
        outcomes["refused"] += 1


def encode(numel, kind):
    x = torch.randn(numel, generator=GENERATOR).to(ops.FLOAT_DTYPES[numel % 3])
    residual = torch.zeros(numel, dtype=ops.FLOAT_DTYPES[numel % 2])
    for seed in (None, 1):
        codes, scales = ops.quantize(x, **kind, residual=residual, seed=seed)
        ops.quantize(x, **kind, seed=seed)
        attempt(ops.quantize_difference_, x, torch.zeros_like(x), 0.5, **kind, seed=seed)
    return codes, scales


def decode(codes, scales, numel, kind):
    weight, masses = torch.tensor(1.0).double(), torch.ones(1).double()
    z = torch.zeros(numel)
    attempt(ops.dequantize, codes, scales, **kind, numel=numel)
    attempt(ops.dequantize, codes, scales, **kind, numel=numel, out=z, accumulate=True)
    message = [codes], [scales], masses
    attempt(ops.mix_quantized_, z, weight, *message, **kind)
    attempt(ops.mix_quantized_, z, weight, *message, **kind, replicas=[torch.zeros(numel)])


def decode_what_does_not_fit(codes, scales, numel, kind):
    """Call the op itself with wrong lengths."""
    options = (kind["bits"], kind["format"], kind["block_size"], False)
    out, longer = torch.zeros(numel), torch.zeros(numel + kind["block_size"] + 1)
    for wrong in ((codes[1:], scales, out), (codes, scales[1:], out), (codes, scales, longer)):
        attempt(torch.ops.pyparallel.dequantize, *wrong[:2], *options, wrong[2], torch.tensor(0))


for numel, (bits, form), block_size in product(LENGTHS, FORMATS, (32, 256, 4096)):
    kind = {"bits": bits, "format": form, "block_size": block_size}
    codes, scales = encode(numel, kind)
    noise = torch.randint(-128, 128, codes.shape, generator=GENERATOR)
    noise = noise.to(torch.int8).view(codes.dtype)
    wrong_scales = scales.clone()
    wrong_scales[-1:] = float("inf")
    for parts in product((codes, noise), (scales, wrong_scales)):
        decode(*parts, numel, kind)
    decode_what_does_not_fit(codes, scales, numel, kind)
assert min(outcomes.values()) > 500, outcomes
