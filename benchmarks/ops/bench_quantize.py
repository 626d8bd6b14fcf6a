"""``quantize`` and its inverses against torch's separate ops, and torch.compile of references."""

import torch

from benchmarks.harness.measure import (
    Case,
    Provider,
    beside,
    compile_reference,
    format_name,
    name_of,
    sweep,
)
from pyparallel.ops import dequantize, dequantize_sum, quantize
from pyparallel.ops._formats import find_format
from pyparallel.ops.quantize import (
    SMALLEST,
    dequantize_reference,
    dequantize_sum_reference,
    quantize_reference,
)

BLOCK_SIZE = 256
SEED = 1
ENCODINGS = [
    # bits, format, with a residual, rounded stochastically, dtype of x if not float32
    (8, "int", True, False),
    (8, "int", True, True),
    (8, "int", False, False),
    (8, "int", False, True),
    (8, "int", False, False, torch.bfloat16),
    (8, "int", False, True, torch.bfloat16),
    (4, "int", True, True),
    (8, "e4m3", True, True),
    (8, "e4m3", False, False),
    (2, "ternary", True, True),
    (2, "ternary", False, True),
    (8, "natural", True, True),
    (8, "natural", False, True),
]
DECODINGS = [
    (8, "int", False),
    (8, "int", True),
    (4, "int", False),
    (8, "e4m3", True),
    (2, "ternary", True),
    (8, "natural", True),
]


def make_encoding(device, numel, bits, format, feeds_back, stochastic, dtype=torch.float32) -> Case:
    x = torch.randn(numel, device=device).to(dtype)
    residual = torch.randn(numel, device=device) / 100 if feeds_back else None
    seed = SEED if stochastic else None
    kind = {"bits": bits, "format": format, "block_size": BLOCK_SIZE}
    message = codes, scales = quantize(x, **kind)
    arguments = x, bits, format, BLOCK_SIZE, residual, seed, torch.tensor(0), codes, scales
    compiled = compile_reference(quantize_reference, device, *arguments)

    def ours() -> None:
        quantize(x, **kind, residual=residual, seed=seed, out=message)

    def separate_ops() -> None:
        torch_quantize(x, bits, format, residual, stochastic)

    providers = beside(ours, separate_ops, compiled)
    if find_format(bits, format).has_scales and format not in ("ternary", "natural"):
        # Without the reference's care for ties, for nan and inf, and for bits that agree.
        arguments = x, bits, format, residual, stochastic
        fused = compile_reference(torch_quantize, device, *arguments)
        providers.append(Provider("torch.compile of torch ops", fused))
    name = format_name(bits, format)
    name += (" + residual" if feeds_back else "") + (" stochastic" if stochastic else "")
    name += f" from {name_of(dtype)[0]}" if dtype != torch.float32 else ""
    num_bytes = x.nbytes + codes.nbytes + scales.nbytes + (8 * numel if feeds_back else 0)
    return Case("quantize", name, numel, num_bytes, providers, device)


def torch_quantize(x, bits, format, residual, stochastic) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with plain torch ops; floats are rounded to nearest, the only way in torch."""
    kind = find_format(bits, format)
    blocks = (x if residual is None else x + residual).float().view(-1, BLOCK_SIZE)
    if format in ("ternary", "natural"):
        return torch_draw(blocks, kind, residual)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST).div_(kind.largest)
    scaled = blocks / scales
    if format != "int":
        rounded = scaled.to(torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2)
    elif stochastic:
        rounded = scaled.add_(torch.rand_like(scaled)).floor_().clamp_(-kind.largest, kind.largest)
    else:
        rounded = scaled.round_()
    if residual is not None:
        torch.addcmul(blocks, rounded.float(), scales, value=-1, out=residual.view_as(blocks))
    if format != "int":
        return rounded.view(torch.uint8), scales
    whole = rounded.to(torch.int8).flatten()
    return (whole if bits == 8 else (whole[::2] & 15) | (whole[1::2] << 4)), scales


def torch_draw(blocks, kind, residual) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize stochastically with plain torch ops; the scale is the largest magnitude."""
    scales = blocks.abs().amax(dim=1, keepdim=True) if kind.has_scales else blocks.new_ones(1, 1)
    random = torch.randint(2**16, blocks.shape, device=blocks.device)
    codes = kind.encode(blocks / scales, random)
    if residual is not None:
        torch.sub(blocks, kind.decode(codes) * scales, out=residual.view_as(blocks))
    return kind.pack(codes.flatten()), scales


def make_decoding(device, numel, bits, format, accumulate) -> Case:
    kind = {"bits": bits, "format": format, "block_size": BLOCK_SIZE}
    codes, scales = quantize(torch.randn(numel, device=device), **kind)
    out = torch.zeros(numel, device=device)
    corrupt = torch.zeros((), dtype=torch.int64, device=device)
    arguments = codes, scales, bits, format, BLOCK_SIZE, accumulate, out, corrupt
    compiled = compile_reference(dequantize_reference, device, *arguments)

    def ours() -> None:
        kept = {"out": out, "accumulate": accumulate, "corrupt": corrupt}
        dequantize(codes, scales, **kind, numel=numel, **kept)

    def separate_ops() -> None:
        values = find_format(bits, format).unpack(codes, numel)
        values = find_format(bits, format).decode(values).view(-1, BLOCK_SIZE)
        factors = scales[:, None] if scales.numel() else out.new_ones(1, 1)
        if accumulate:
            out.view(-1, BLOCK_SIZE).addcmul_(values, factors)
        else:
            torch.mul(values, factors, out=out.view(-1, BLOCK_SIZE))

    providers = beside(ours, separate_ops, compiled)
    name = f"from {format_name(bits, format)}{', accumulate' * accumulate}"
    num_bytes = codes.nbytes + scales.nbytes + numel * (8 if accumulate else 4)
    return Case("quantize", name, numel, num_bytes, providers, device)


def make_sum(device, numel, bits, format, count) -> Case:
    """Return the mean of messages of as many ranks."""
    kind = {"bits": bits, "format": format, "block_size": BLOCK_SIZE}
    messages = [quantize(torch.randn(numel, device=device), **kind) for _ in range(count)]
    codes, scales = (torch.stack(parts) for parts in zip(*messages, strict=True))
    out, values = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    corrupt = torch.zeros((), dtype=torch.int64, device=device)
    arguments = codes, scales, bits, format, BLOCK_SIZE, float(count), out, corrupt
    compiled = compile_reference(dequantize_sum_reference, device, *arguments)
    options = {**kind, "numel": numel, "corrupt": corrupt, "out": out}

    def ours() -> None:
        dequantize_sum(codes, scales, divisor=count, **options)

    def one_by_one() -> None:
        out.zero_()
        for message in messages:
            dequantize(*message, accumulate=True, **options)
        out.div_(count)

    def separate_ops() -> None:
        blocks = find_format(bits, format).decode(codes.view(torch.uint8))
        blocks = blocks.view(count, -1, BLOCK_SIZE) * scales[..., None]
        torch.sum(blocks, dim=0, out=values.view(-1, BLOCK_SIZE)).div_(count)

    providers = beside(ours, separate_ops, compiled)
    providers.insert(1, Provider("pyparallel dequantize, one by one", one_by_one))
    num_bytes = codes.nbytes + scales.nbytes + out.nbytes
    return Case("quantize", f"sum of {count} {format}{bits}", numel, num_bytes, providers, device)


cases = sweep((make_encoding, ENCODINGS), (make_decoding, DECODINGS), (make_sum, [(8, "int", 8)]))
