"""``top_k`` against torch's topk of magnitudes, and ``scatter_add_`` against ``index_add_``.

Every provider takes the next step of a stream of gradients, with its own residual: how close to the
threshold most of its entries are depends on the steps before.
"""

from collections.abc import Iterator
from itertools import cycle

import torch

from benchmarks.harness.measure import Case, Provider
from pyparallel.ops import scatter_add_, top_k

NUM_GRADIENTS = 4
WARM_UP_STEPS = 100  # afterwards the threshold changes little
WRONG = 1e30

CASES = [
    # share of entries, with a residual, and which threshold
    (0.01, True, "kept"),
    (0.001, True, "kept"),
    (0.01, True, "none"),
    (0.01, True, "wrong"),
    (0.01, False, "kept"),
    (0.01, False, "none"),
]


def cases(device: str, sizes: list[int]) -> Iterator[Case]:
    for numel in sizes:
        gradients = [heavy_tailed(numel, device) for _ in range(NUM_GRADIENTS)]
        for share, has_residual, threshold in CASES:
            yield make_case(device, gradients, share, has_residual, threshold)
        yield make_scatter_case(device, gradients[0])


def heavy_tailed(numel: int, device: str) -> torch.Tensor:
    """Return Student's t with three degrees of freedom, with tails like those of gradients."""
    squares = sum(torch.randn(numel, device=device).square_() for _ in range(3))
    return torch.randn(numel, device=device).div_((squares / 3).sqrt_().add_(1e-6))


def make_case(device, gradients, share, has_residual, threshold) -> Case:
    numel = len(gradients[0])
    k = int(share * numel)
    of_ours, of_torch = cycle(gradients), cycle(gradients)
    hint = torch.zeros((), device=device)
    residual = None
    if has_residual:
        residual, learned = torch.zeros(numel, device=device), torch.zeros((), device=device)
        for gradient, _ in zip(cycle(gradients), range(WARM_UP_STEPS), strict=False):
            top_k(gradient, k, residual=residual, threshold=learned)
        residual_of_torch = residual.clone()

    def ours() -> None:
        if threshold == "wrong":
            hint.fill_(WRONG)
        given = None if threshold == "none" else hint
        top_k(next(of_ours), k, residual=residual, threshold=given)

    def torch_ops() -> None:
        if not has_residual:
            gradient = next(of_torch)
            gradient.gather(0, gradient.abs().topk(k, sorted=False).indices)
            return
        residual_of_torch.add_(next(of_torch))
        indices = residual_of_torch.abs().topk(k, sorted=False).indices
        residual_of_torch.gather(0, indices)
        residual_of_torch.index_fill_(0, indices, 0.0)

    providers = [Provider("pyparallel top_k", ours), Provider("torch topk and its kin", torch_ops)]
    name = f"{share:.1%}{', residual' * has_residual}, threshold {threshold}"
    num_bytes = 12 * numel + 20 * k if has_residual else 4 * numel + 8 * k
    return Case("top_k", name, numel, num_bytes, providers, device)


def make_scatter_case(device, gradient) -> Case:
    numel = len(gradient)
    values, indices = top_k(gradient, numel // 100)
    dense = torch.zeros(numel, device=device)
    providers = [
        Provider("pyparallel scatter_add_", lambda: scatter_add_(dense, values, indices)),
        Provider("torch index_add_", lambda: dense.index_add_(0, indices, values)),
    ]
    return Case("scatter_add", "1.0%", numel, 16 * len(values), providers, device)
