"""Corrupt indices: refused before anything is written. Run by test_address_sanitizer.py."""

from itertools import product

import torch

from pyparallel import ops

LOWEST, HIGHEST = -(2**31), 2**31 - 1
ENTRIES = (LOWEST, -100_000, -2, -1, 0, 3, 9, 10, 11, 100_000, HIGHEST)


def outcome(dense, indices):
    try:
        ops.scatter_add_(dense, torch.ones(2), indices)
    except RuntimeError as error:
        return str(error)
    return "added"


for index_dtype, dtype in product((torch.int32, torch.int64), ops.FLOAT_DTYPES):
    for indices in product(ENTRIES, repeat=2):
        dense = torch.zeros(10, dtype=dtype)
        answer = outcome(dense, torch.tensor(indices, dtype=index_dtype))
        if 0 <= indices[0] < indices[1] < 10:
            assert answer == "added", indices
        else:
            assert "indices must be" in answer, indices
            assert not dense.any()
