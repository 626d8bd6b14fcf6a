"""``top_k`` against torch's topk of magnitudes, and ``scatter_add_`` against ``index_add_``.

Every provider takes the next step of a stream of gradients, with its own residual: how close to the
threshold most of its entries are depends on the steps before.
"""

from collections.abc import Callable, Iterator
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
    ours, torch_step = our_step, torch_step_alone
    residuals = None, None
    if has_residual:
        residual = torch.zeros(numel, device=device)
        hint = torch.zeros((), device=device)
        for gradient, _ in zip(cycle(gradients), range(WARM_UP_STEPS), strict=False):
            top_k(gradient, k, residual=residual, threshold=hint)
        residuals = residual, residual.clone()
        torch_step = torch_step_with
    providers = [
        Provider("pyparallel top_k", ours(gradients, k, residuals[0], threshold)),
        Provider("torch topk and its kin", torch_step(gradients, k, residuals[1])),
    ]
    name = f"{share:.1%}{', residual' * has_residual}, threshold {threshold}"
    num_bytes = 12 * numel + 20 * k if has_residual else 4 * numel + 8 * k
    return Case("top_k", name, numel, num_bytes, providers, device)


def our_step(gradients, k, residual, threshold) -> Callable[[], object]:
    stream = cycle(gradients)
    hint = torch.zeros((), device=gradients[0].device)

    def step() -> None:
        if threshold == "wrong":
            hint.fill_(WRONG)
        given = None if threshold == "none" else hint
        top_k(next(stream), k, residual=residual, threshold=given)

    return step


def torch_step_with(gradients, k, residual) -> Callable[[], object]:
    stream = cycle(gradients)

    def step() -> None:
        residual.add_(next(stream))
        indices = residual.abs().topk(k, sorted=False).indices
        residual.gather(0, indices)
        residual.index_fill_(0, indices, 0.0)

    return step


def torch_step_alone(gradients, k, _) -> Callable[[], object]:
    stream = cycle(gradients)

    def step() -> None:
        gradient = next(stream)
        gradient.gather(0, gradient.abs().topk(k, sorted=False).indices)

    return step


def make_scatter_case(device, gradient) -> Case:
    numel = len(gradient)
    values, indices = top_k(gradient, numel // 100)
    dense = torch.zeros(numel, device=device)
    providers = [
        Provider("pyparallel scatter_add_", lambda: scatter_add_(dense, values, indices)),
        Provider("torch index_add_", lambda: dense.index_add_(0, indices, values)),
    ]
    return Case("scatter_add", "1.0%", numel, 16 * len(values), providers, device)
