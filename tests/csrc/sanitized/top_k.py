"""Every length, dtype of the residual and hint. Run by test_address_sanitizer.py."""

from itertools import product

import torch

from pyparallel import ops

for numel, kept in product((1, 7, 31, 32, 33, 4095, 4097, 70_001), (None, *ops.FLOAT_DTYPES)):
    for k, hint in product({0, 1, numel // 3, numel}, (0.0, 1.0, 1e30)):
        x = torch.randn(numel)
        residual = None if kept is None else torch.zeros(numel, dtype=kept)
        values, indices = ops.top_k(x, k, residual=residual, threshold=torch.tensor(hint))
        ops.scatter_add_(torch.zeros(numel), values, indices)
