"""Codecs of outer steps against the best of several formulations with torch's ops.

``python -m benchmarks --ops codecs --sizes 16 20 24``: what SparseLoCo, MuLoCo, streaming DiLoCo
and natural compression send, encoded without a residual and decoded, on one thread and on all. A
peer writes and reads messages of the same layout: codes packed in bytes, indices in 12 bits. It
sums entries of equal codes by comparisons, ``scatter_add_`` or ``bincount``, looks tables up by
``gather`` or ``index_select``, and puts values in place by ``scatter_``, ``index_put_`` or
``index_add_``. It checks nothing, and minds neither ties nor what is not finite.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness.measure import Case, Provider
from pyparallel import ops
from pyparallel.ops._formats import find_format

K, CHUNK, BLOCK = 64, 4096, 256  # BLOCK: of scales
NUM_RANKS = 8
Runs = dict[str, Callable[[], object]]
Made = tuple[Callable[[], object], Runs, float]  # ours, peers and the bytes of an element


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes, uint8, in as many bits; neighbors are read as words."""
    if bits == 8:
        return codes
    if bits == 4:
        words = codes.view(torch.int16)
        return (words | words >> 4).to(torch.uint8)
    words = codes.view(torch.int32)
    return (words | words >> 6 | words >> 12 | words >> 18).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes, uint8; neighbors are written as words."""
    if bits == 8:
        return packed
    if bits == 4:
        words = packed.to(torch.int16)
        return (words | words << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    words = packed.to(torch.int32)
    words = (words | words << 12).bitwise_and_(0x000F000F)
    return (words | words << 6).bitwise_and_(0x03030303).view(torch.uint8)


def unpack_places(indices: Tensor, rows: int) -> Tensor:
    """Return indices of 12 bits as (rows, values) int64."""
    triples = indices.view(-1, 3).long()
    words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    return torch.stack([words & 0xFFF, words >> 12], dim=1).view(rows, -1)


def encode_chunks(numel: int, device: str) -> Made:
    x = torch.randn(numel, device=device)
    rows = x.view(-1, CHUNK)

    def with_torch(*, ordered: bool) -> None:
        places = rows.abs().topk(K, dim=1, sorted=False).indices
        places = places.sort(dim=1).values if ordered else places
        rows.gather(1, places)
        pairs = places.int().view(-1, 2)
        words = pairs[:, 0] | pairs[:, 1] << 12
        torch.stack([words, words >> 8, words >> 16], dim=1).to(torch.uint8)

    peers = {"topk, in any order": lambda: with_torch(ordered=False)}
    return lambda: ops.top_k_chunks(x), peers, 4 + 5.5 / 64


def decode_chunks(numel: int, device: str, messages: int = 1) -> Made:
    sent = [ops.top_k_chunks(torch.randn(numel, device=device)) for _ in range(messages)]
    values, indices = (torch.stack(parts) for parts in zip(*sent, strict=True))
    out, count, whole = torch.zeros(numel, device=device), numel // CHUNK, values[0].numel()
    rows, begins = out.view(count, CHUNK), torch.arange(count, device=device)[:, None] * CHUNK

    def scatter() -> None:
        out.zero_()
        for value, index in zip(values, indices, strict=True):
            places = unpack_places(index, count)
            put = rows.scatter_ if messages == 1 else rows.scatter_add_
            put(1, places, value.view(count, K))

    def at_once() -> None:
        places = unpack_places(indices, messages * count).view(messages, count, K)
        places = places.transpose(0, 1).reshape(count, -1)
        own = values.view(messages, count, K).transpose(0, 1).reshape(count, -1)
        out.zero_()
        rows.scatter_add_(1, places, own)

    def put() -> None:
        out.zero_()
        for value, index in zip(values, indices, strict=True):
            places = (unpack_places(index, count) + begins).view(whole)
            out.index_put_((places,), value, accumulate=messages > 1)

    def add() -> None:
        out.zero_()
        for value, index in zip(values, indices, strict=True):
            out.index_add_(0, (unpack_places(index, count) + begins).view(whole), value)

    if messages == 1:
        peers: Runs = {"scatter_": scatter, "index_put_": put}
        sent_once = values[0], indices[0]
    else:
        peers = {"scatter_add_": scatter, "scatter_add_ of all": at_once, "index_add_": add}
        sent_once = values, indices
    bytes_each = 4 + messages * 5.5 / 64
    return lambda: ops.scatter_chunks(*sent_once, numel=numel, out=out), peers, bytes_each


def encode_bins(numel: int, device: str, bits: int) -> Made:
    x, bins = torch.randn(numel, device=device), 1 << bits
    rows, one = x.view(-1, CHUNK), torch.ones((), device=device)

    def codes_of() -> Tensor:
        std, mean = torch.std_mean(rows, dim=1, keepdim=True)
        per_width = bins / (6 * std)
        place = torch.addcmul(bins / 2 - mean * per_width, rows, per_width)
        return place.clamp_(0, bins - 1)

    def scatter() -> None:
        codes = codes_of().long()
        empty = torch.zeros((len(rows), bins), device=device)
        counts = empty.scatter_add(1, codes, one.expand_as(rows)).clamp_(min=1)
        empty.scatter_add_(1, codes, rows).div_(counts)
        pack(codes.to(torch.uint8).view(-1), bits)

    def bincount() -> None:
        codes = codes_of().to(torch.uint8)
        flat = (codes.long() + torch.arange(len(rows), device=device)[:, None] * bins).view(-1)
        sums = torch.bincount(flat, x, minlength=len(rows) * bins)
        sums / torch.bincount(flat, minlength=len(rows) * bins).clamp_(min=1)
        pack(codes.view(-1), bits)

    def compare() -> None:
        codes = codes_of().to(torch.uint8)
        for code in range(bins):
            is_in = codes == code
            torch.where(is_in, rows, 0.0).sum(dim=1) / is_in.sum(dim=1).clamp_(min=1)
        pack(codes.view(-1), bits)

    peers: Runs = {"scatter_add_": scatter, "bincount": bincount}
    if bits == 2:
        peers["comparisons"] = compare
    return lambda: ops.quantize_statistical(x, bits=bits), peers, 4 + bits / 8


def decode_bins(numel: int, device: str, bits: int) -> Made:
    codes, tables = ops.quantize_statistical(torch.randn(numel, device=device), bits=bits)
    out, of_torch, of_rows = torch.zeros(3, numel, device=device)
    rows = tables.view(-1, 1 << bits)
    begins = torch.arange(len(rows), dtype=torch.int32, device=device)[:, None] << bits

    def gather() -> None:
        each = unpack(codes, bits).long().view(-1, CHUNK)
        torch.gather(rows, 1, each, out=of_torch.view(-1, CHUNK))

    def select() -> None:
        each = unpack(codes, bits).int().view(-1, CHUNK).add_(begins).view(-1)
        torch.index_select(tables, 0, each, out=of_rows)

    def ours() -> None:
        ops.dequantize_statistical(codes, tables, bits=bits, numel=numel, out=out)

    return ours, {"gather": gather, "index_select": select}, 4 + bits / 8


def encode_powers(numel: int, device: str, bits: int, format: str) -> Made:
    x, kind = torch.randn(numel, device=device), find_format(bits, format)
    message = ops.quantize(x, bits=bits, format=format)

    def ours() -> None:
        ops.quantize(x, bits=bits, format=format, out=message)

    def scaled() -> Tensor:
        if not kind.has_scales:
            return x
        blocks = x.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).div_(kind.largest)
        return (blocks / scales).view(-1)

    def by_bits() -> None:  # of float32: a carry out of the mantissa raises the exponent
        own = scaled()
        words = own.view(torch.int32)
        power = (words & 0x7FFFFFFF).add_(0x400000).bitwise_right_shift_(23)
        lowest = 126 if bits == 4 else 46
        codes = power.sub_(lowest).clamp_(0, 7 if bits == 4 else 126)
        codes |= (words >> (32 - bits)) & (1 << (bits - 1))
        pack(codes.to(torch.uint8), bits)

    def by_frexp() -> None:
        mantissa, exponent = torch.frexp(scaled())
        exponent += mantissa.abs() > 0.75
        codes = exponent.clamp_(0, 7) if bits == 4 else exponent.add_(80).clamp_(0, 126)
        codes |= torch.signbit(mantissa).int() << (bits - 1)
        pack(codes.to(torch.uint8), bits)

    return ours, {"integer ops on bits": by_bits, "frexp": by_frexp}, 4 + bits / 8


def decode_powers(numel: int, device: str, bits: int, format: str) -> Made:
    x, kind = torch.randn(numel, device=device), find_format(bits, format)
    codes, scales = ops.quantize(x, bits=bits, format=format)
    out, of_torch = torch.zeros(2, numel, device=device)
    table = kind.decode(torch.arange(1 << bits, dtype=torch.uint8, device=device)).float()

    def ours() -> None:
        ops.dequantize(codes, scales, bits=bits, format=format, numel=numel, out=out)

    def scale_() -> None:
        if kind.has_scales:
            of_torch.view(-1, BLOCK).mul_(scales[:, None])

    def select() -> None:
        torch.index_select(table, 0, unpack(codes, bits).int(), out=of_torch)
        scale_()

    def by_bits() -> None:
        each = unpack(codes, bits).int()
        power = each & (1 << (bits - 1)) - 1
        words = (power + (126 if bits == 4 else 46)) << 23
        words = torch.where(power == 0, 0, words).bitwise_or_((each >> (bits - 1)) << 31)
        of_torch.copy_(words.view(torch.float32))
        scale_()

    return ours, {"index_select": select, "integer ops on bits": by_bits}, 4 + bits / 8


def fill(numel: int, device: str) -> Made:
    """Return what bounds a decoder: zeros written to its output, by torch."""
    return torch.zeros(numel, device=device).zero_, {}, 4


CODECS = {
    "zero_ of the output": fill,
    "encode top-k of chunks": encode_chunks,
    "decode top-k of chunks": decode_chunks,
    f"decode and add top-k of chunks of {NUM_RANKS}": lambda n, device: decode_chunks(
        n, device, NUM_RANKS
    ),
}
for _bits in (2, 4, 8):
    CODECS[f"encode statistical, {_bits} bits"] = lambda n, device, bits=_bits: encode_bins(
        n, device, bits
    )
    CODECS[f"decode statistical, {_bits} bits"] = lambda n, device, bits=_bits: decode_bins(
        n, device, bits
    )
for _kind in ((4, "e3m0"), (8, "natural")):
    CODECS[f"encode {_kind[1]}"] = lambda n, device, kind=_kind: encode_powers(n, device, *kind)
    CODECS[f"decode {_kind[1]}"] = lambda n, device, kind=_kind: decode_powers(n, device, *kind)


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    """Yield the cases: on the CPU with one thread and with all."""
    threads = sorted({1, torch.get_num_threads()}) if device == "cpu" else [None]
    for numel in sizes:
        for name, make in CODECS.items():
            ours, peers, bytes_each = make(numel, device)
            providers = [Provider("pyparallel" if peers else "torch", ours)]
            providers += [Provider(f"torch {peer}", run) for peer, run in peers.items()]
            for count in threads:
                of_threads = f", {count} thread{'s' * (count > 1)}" if count else ""
                num_bytes = int(bytes_each * numel)
                yield Case("codecs", name + of_threads, numel, num_bytes, providers, device, count)
