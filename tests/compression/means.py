"""What every mean over ranks must do, whichever the compressor: run on each rank of a group."""

import hashlib

import torch
import torch.distributed as dist

from pyparallel.compression import Compressor, ErrorFeedback, Layout, Piece, Ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [0, 1, 5, 1037]


def check_means(rank, rows):
    """By row: the bits of all means of this rank, for the parent to compare."""
    pair = dist.new_group([0, 2])
    digests = {}
    for name, compressor in rows.items():
        digest = hashlib.sha256()
        for numel in SIZES:
            for dtype in DTYPES:
                case = f"{name} of {numel} {dtype}"
                check_telescoping(case, compressor, Ranks(), numel, dtype, digest)
        digests[name] = digest.hexdigest()
        if rank != 1:
            ranks = Ranks(pair)
            check_telescoping(f"{name} in a pair", compressor, ranks, 300, torch.float32, digest)
    return digests


def check_telescoping(case, compressor, ranks, numel, dtype, digest, num_steps=5):
    """Means and residuals add up to the true means, step by step."""
    compressor = feeding_back(compressor)
    layout = layout_of(numel)
    state = compressor.init(layout, CPU, ranks.rank)
    sent, true = torch.zeros(numel), torch.zeros(numel)
    for step in range(num_steps):
        x = gradient(ranks.rank, step, numel).to(dtype)
        true += mean_of_all(x.float(), ranks)
        compressor.mean_(x, state, ranks)
        digest.update(x.float().numpy().tobytes())
        sent += x.float()
    left = mean_of_all(residual_of(state), ranks)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02 * num_steps
    torch.testing.assert_close(sent + left, true, rtol=0, atol=tolerance, msg=lambda m: case + m)


def feeding_back(compressor: Compressor) -> Compressor:
    return compressor if compressor.feeds_back else ErrorFeedback(compressor)


def layout_of(numel):
    """Of a weight and a bias, or of one of them."""
    bias = min(numel, 7)
    return Layout((Piece("fc.weight", (numel - bias,)), Piece("fc.bias", (bias,))))


def gradient(rank, step, numel):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(numel, generator=generator)


def mean_of_all(x, ranks):
    total = x.clone()
    if x.numel():
        dist.all_reduce(total, group=ranks.group)
    return total / ranks.size


def residual_of(state):
    """What is owed in all, flat."""
    owed = torch.zeros(state.layout.numel)
    parts = state.layout.split(owed)
    for part, tensors in zip(parts, state.by_name().values(), strict=True):
        for key, tensor in tensors.items():
            if key.rpartition(".")[2] == "residual":
                part.add_(tensor)
    return owed


def assert_same_bits(digests_by_rank):
    first = digests_by_rank[0]
    assert first
    for rank, digests in enumerate(digests_by_rank):
        assert digests == first, f"rank {rank} has other means than rank 0"
