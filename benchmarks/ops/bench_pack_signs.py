"""Codes for means against chains of torch's ops, and of numpy's around packbits."""

import numpy as np
import torch

from benchmarks.harness.measure import Case, Provider, sweep
from pyparallel.ops import (
    dequantize_statistical,
    pack_signs,
    quantize_statistical,
    unpack_signs,
)

BLOCK_SIZE = 1024
BINS_BLOCK = 4096


def make_case(device: str, numel: int, has_residual: bool) -> Case:
    x, residual = (torch.randn(numel, device=device) for _ in range(2))
    accumulated = torch.empty_like(x)
    places = torch.arange(8, dtype=torch.uint8, device=device)

    def ours() -> None:
        pack_signs(x, residual=residual if has_residual else None)

    def torch_ops() -> None:
        own = torch.add(x, residual, out=accumulated) if has_residual else x
        scales = own.view(-1, BLOCK_SIZE).abs().mean(dim=1)
        is_set = own >= 0
        is_set.view(-1, 8).to(torch.uint8).bitwise_left_shift_(places).sum(dim=1, dtype=torch.uint8)
        if has_residual:
            sent = torch.where(is_set.view(-1, BLOCK_SIZE), scales[:, None], -scales[:, None])
            torch.sub(own, sent.flatten(), out=residual)

    def numpy_ops() -> None:
        own = x.numpy() + residual.numpy() if has_residual else x.numpy()
        blocks = own.reshape(-1, BLOCK_SIZE)
        scales = np.abs(blocks).mean(axis=1, keepdims=True)
        is_set = blocks >= 0
        np.packbits(is_set, bitorder="little")
        if has_residual:
            np.subtract(blocks, np.where(is_set, scales, -scales), out=blocks)
            residual.numpy()[:] = own

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    if device == "cpu":
        providers.append(Provider("numpy packbits chain", numpy_ops))
    num_bytes = numel * (12 if has_residual else 4) + numel // 8 + 4 * (numel // BLOCK_SIZE)
    name = f"pack, {'' if has_residual else 'no '}residual"
    return Case("pack_signs", name, numel, num_bytes, providers, device)


def make_case_of_inverse(device: str, numel: int, accumulate: bool) -> Case:
    words, scales = pack_signs(torch.randn(numel, device=device))
    out = torch.zeros(numel, device=device)
    places = torch.arange(8, dtype=torch.uint8, device=device)

    def ours() -> None:
        unpack_signs(words, scales, numel=numel, out=out, accumulate=accumulate)

    def finish(is_set: torch.Tensor) -> None:
        sent = torch.where(is_set.view(-1, BLOCK_SIZE), scales[:, None], -scales[:, None]).flatten()
        if accumulate:
            out.add_(sent)
        else:
            out.copy_(sent)

    def torch_ops() -> None:
        finish((words[:, None] >> places & 1).to(torch.bool))

    def numpy_ops() -> None:
        finish(torch.from_numpy(np.unpackbits(words.numpy(), bitorder="little").view(bool)))

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    if device == "cpu":
        providers.append(Provider("numpy unpackbits chain", numpy_ops))
    num_bytes = numel * (8 if accumulate else 4) + numel // 8 + 4 * (numel // BLOCK_SIZE)
    name = f"unpack, {'accumulate' if accumulate else 'overwrite'}"
    return Case("pack_signs", name, numel, num_bytes, providers, device)


def make_bins_case(device: str, numel: int, bits: int, has_residual: bool) -> Case:
    x, residual, accumulated = (torch.randn(numel, device=device) for _ in range(3))
    num_bins, places = 1 << bits, torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
    one = torch.ones((), device=device)

    def ours() -> None:
        quantize_statistical(x, bits=bits, residual=residual if has_residual else None)

    def torch_ops() -> None:
        own = torch.add(x, residual, out=accumulated) if has_residual else x
        rows = own.view(-1, BINS_BLOCK)
        std, mean = torch.std_mean(rows, dim=1, keepdim=True)
        place = (rows - mean).mul_(num_bins / (6 * std)).add_(num_bins / 2)
        codes = place.clamp_(0, num_bins - 1).long()
        empty = torch.zeros((len(rows), num_bins), device=device)
        counts = empty.scatter_add(1, codes, one.expand_as(rows)).clamp_(min=1)
        means = empty.scatter_add_(1, codes, rows).div_(counts)
        groups = codes.to(torch.uint8).view(-1, 8 // bits)
        groups.bitwise_left_shift_(places).sum(dim=1, dtype=torch.uint8)
        if has_residual:
            torch.sub(own, means.gather(1, codes).flatten(), out=residual)

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    num_bytes = numel * (12 if has_residual else 4) + numel * bits // 8
    name = f"{bits} bits, {'' if has_residual else 'no '}residual"
    return Case("quantize_statistical", name, numel, num_bytes, providers, device)


def make_case_of_bins_inverse(device: str, numel: int, bits: int, accumulate: bool) -> Case:
    codes, tables = quantize_statistical(torch.randn(numel, device=device), bits=bits)
    out, out_of_torch = torch.zeros((2, numel), device=device)
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=device)

    def ours() -> None:
        options = {"numel": numel, "out": out, "accumulate": accumulate}
        dequantize_statistical(codes, tables, bits=bits, **options)

    def torch_ops() -> None:
        each = (codes[:, None] >> places & (1 << bits) - 1).view(-1, BINS_BLOCK).long()
        entries = tables.view(-1, 1 << bits).gather(1, each).flatten()
        if accumulate:
            out_of_torch.add_(entries)
        else:
            out_of_torch.copy_(entries)

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    num_bytes = numel * (8 if accumulate else 4) + numel * bits // 8
    name = f"{bits} bits, {'accumulate' if accumulate else 'overwrite'}"
    return Case("dequantize_statistical", name, numel, num_bytes, providers, device)


BOTH = [(True,), (False,)]
BINS = [(2, True), (2, False), (4, True), (8, True)]
cases = sweep(
    (make_case, BOTH),
    (make_case_of_inverse, BOTH),
    (make_bins_case, BINS),
    (make_case_of_bins_inverse, BINS),
)
