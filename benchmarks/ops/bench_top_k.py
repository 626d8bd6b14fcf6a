"""``top_k`` against torch's topk of magnitudes, and the inverses against ``scatter_add_``.

Every provider takes the next step of a stream of gradients, with its own residual: how close to the
threshold most of its entries are depends on the steps before. So none is captured in a CUDA graph,
which would take the same step again and again.
"""

from collections.abc import Iterator
from itertools import cycle

import torch

from benchmarks.harness.measure import Case, Provider
from pyparallel.ops import scatter_add_, scatter_chunks, top_k, top_k_chunks

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
        for choice in (True, False):
            yield make_chunks_case(device, gradients, has_residual=choice)
            yield make_scatter_chunks_case(device, gradients[0], accumulate=choice)


def heavy_tailed(numel: int, device: str) -> torch.Tensor:
    """Return Student's t with three degrees of freedom, with tails like those of gradients."""
    squares = sum(torch.randn(numel, device=device).square_() for _ in range(3))
    return torch.randn(numel, device=device).div_((squares / 3).sqrt_().add_(1e-6))


def of_stream(name: str, ours, torch_ops) -> list[Provider]:
    runs = {name: ours, "torch topk and its kin": torch_ops}
    return [Provider(each, run, captured=False) for each, run in runs.items()]


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

    providers = of_stream("pyparallel top_k", ours, torch_ops)
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


K, CHUNK = 64, 4096


def make_chunks_case(device, gradients, *, has_residual) -> Case:
    numel = len(gradients[0])
    of_ours, of_torch = cycle(gradients), cycle(gradients)
    residual = torch.zeros(numel, device=device)
    for gradient, _ in zip(cycle(gradients), range(WARM_UP_STEPS), strict=False):
        top_k_chunks(gradient, K, chunk=CHUNK, residual=residual)
    residual_of_torch = residual.clone()

    def ours() -> None:
        top_k_chunks(next(of_ours), K, chunk=CHUNK, residual=residual if has_residual else None)

    def torch_ops() -> None:
        acc = residual_of_torch.add_(next(of_torch)) if has_residual else next(of_torch)
        rows = acc.view(-1, CHUNK)
        indices = rows.abs().topk(K, dim=1, sorted=False).indices
        rows.gather(1, indices)
        if has_residual:
            rows.scatter_(1, indices, 0.0)
        pairs = indices.int().view(-1, 2)
        words = pairs[:, 0] | pairs[:, 1] << 12
        torch.stack([words & 0xFF, words >> 8 & 0xFF, words >> 16], dim=1).to(torch.uint8)

    providers = of_stream("pyparallel", ours, torch_ops)
    num_bytes = (12 if has_residual else 4) * numel + 11 * K * (numel // CHUNK) // 2
    name = f"{K} of {CHUNK}{', residual' * has_residual}"
    return Case("top_k_chunks", name, numel, num_bytes, providers, device)


def make_scatter_chunks_case(device, gradient, *, accumulate) -> Case:
    numel = len(gradient)
    values, indices = top_k_chunks(gradient, K, chunk=CHUNK)
    out, out_of_torch = (torch.zeros(numel, device=device) for _ in range(2))

    def ours() -> None:
        scatter_chunks(values, indices, K, chunk=CHUNK, numel=numel, out=out, accumulate=accumulate)

    def torch_ops() -> None:
        triples = indices.view(-1, 3).int()
        words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
        places = torch.stack([words & 0xFFF, words >> 12], dim=1).view(-1, K).long()
        target = out_of_torch if accumulate else out_of_torch.zero_()
        target.view(-1, CHUNK).scatter_add_(1, places, values.view(-1, K))

    providers = [Provider("pyparallel", ours), Provider("torch scatter_add_", torch_ops)]
    num_bytes = (12 * len(values) if accumulate else 4 * numel) + 11 * len(values) // 2
    name = f"{K} of {CHUNK}, {'accumulate' if accumulate else 'overwrite'}"
    return Case("scatter_chunks", name, numel, num_bytes, providers, device)
