"""``orthogonalize_`` against ``torch.linalg.qr`` and the Gram-Schmidt of torch's PowerSGD hook."""

from collections.abc import Iterator

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from benchmarks.harness.measure import Case, Provider
from pyparallel.ops import orthogonalize_

CASES = [
    # rows of a matrix (None: a single one), columns
    (1024, 4),
    (1024, 32),
    (None, 4),
]
MOST_FACTORED = 2**13  # torch.linalg.qr takes matrices one after the other: on GPUs 0.1 ms each


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    for numel in sizes:
        for rows, columns in CASES:
            if numel > (rows or 1) * columns:
                yield make_case(device, numel, rows, columns)


def make_case(device, numel, rows, columns) -> Case:
    rows_each = rows or numel // columns
    source = torch.randn(numel // (rows_each * columns), rows_each, columns, device=device)
    matrices = source.clone()

    # The same input each turn: an orthonormal one would be easy for some algorithms.
    def ours() -> None:
        matrices.copy_(source)
        orthogonalize_([matrices])

    def qr() -> None:
        matrices.copy_(torch.linalg.qr(source).Q)

    def gram_schmidt() -> None:
        matrices.copy_(source)
        _orthogonalize(matrices, 1e-8)

    providers = [Provider("pyparallel", ours), Provider("torch PowerSGD hook", gram_schmidt)]
    if len(source) <= MOST_FACTORED:
        providers.insert(1, Provider("torch.linalg.qr", qr, captured=False))
    name = f"{source.shape[0]} of {rows_each} x {columns}"
    # The first copy is timed and counted too.
    return Case("orthogonalize", name, numel, 16 * numel, providers, device)
