"""Entries, chunks and bins of every length and dtype. Run by test_address_sanitizer.py."""

import contextlib
from itertools import product

import torch

from pyparallel import ops

for numel, kept in product((1, 7, 31, 32, 33, 4095, 4097, 70_001), (None, *ops.FLOAT_DTYPES)):
    for k, hint in product({0, 1, numel // 3, numel}, (0.0, 1.0, 1e30)):
        x = torch.randn(numel)
        residual = None if kept is None else torch.zeros(numel, dtype=kept)
        values, indices = ops.top_k(x, k, residual=residual, threshold=torch.tensor(hint))
        ops.scatter_add_(torch.zeros(numel), values, indices)
    for k, chunk in ((1, 32), (32, 32), (64, 4096), (4095, 4096)):
        x, residual = torch.randn(numel), None if kept is None else torch.zeros(numel, dtype=kept)
        values, indices = ops.top_k_chunks(x, k, chunk=chunk, residual=residual)
        for accumulate in (False, True):
            out = torch.zeros(numel)
            options = {"numel": numel, "out": out, "accumulate": accumulate}
            ops.scatter_chunks(values, indices, k, chunk=chunk, **options)
            several = values.expand(3, -1).contiguous(), indices.expand(3, -1).contiguous()
            ops.scatter_chunks(*several, k, chunk=chunk, **options)
            indices.random_(256)
            with contextlib.suppress(RuntimeError):
                ops.scatter_chunks(values, indices, k, chunk=chunk, **options)
            values, indices = ops.top_k_chunks(x, k, chunk=chunk)
    for bits, block_size in ((2, 32), (4, 1024), (8, 4096)):
        x, residual = torch.randn(numel), None if kept is None else torch.zeros(numel, dtype=kept)
        options = {"bits": bits, "block_size": block_size}
        codes, tables = ops.quantize_statistical(x, **options, residual=residual)
        for dtype in ops.FLOAT_DTYPES:
            out = torch.zeros(numel, dtype=dtype)
            ops.dequantize_statistical(codes.random_(256), tables, **options, numel=numel, out=out)
