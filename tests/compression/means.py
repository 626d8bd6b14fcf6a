"""Contract of every mean over ranks, run on each rank of a group."""

import hashlib

import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.compression import BufferLayout, Collectives, Compressor, ErrorFeedback, Piece

CPU = torch.device("cpu")
BUFFERS = [
    (0, torch.float32),
    (1, torch.float32),
    (5, torch.bfloat16),
    (1037, torch.float32),
    (1037, torch.bfloat16),
]


def check_means(rank, rows):
    """Return a digest of the bits of all means of this rank by row, for the parent to compare."""
    pair = dist.new_group([0, 2])
    digests = {}
    for name, compressor in rows.items():
        digest = hashlib.sha256()
        for numel, dtype in BUFFERS:
            case = f"{name} of {numel} {dtype}: "
            check_telescoping(case, compressor, Collectives(), numel, dtype, digest, range(3))
        digests[name] = digest.hexdigest()
        if rank != 1:
            case, collectives = f"{name} in a pair: ", Collectives(Run(pair))
            check_telescoping(case, compressor, collectives, 300, torch.float32, digest, [0, 2])
    return digests


def check_telescoping(case, compressor, collectives, numel, dtype, digest, members, num_steps=4):
    """Check that means and residuals add up to the true means, step by step."""
    compressor = feeding_back(compressor)
    layout = layout_of(numel)
    state = compressor.init(layout, CPU, collectives.rank)
    sent, true = torch.zeros(numel), torch.zeros(numel)
    for step in range(num_steps):
        given = [gradient(rank, step, numel).to(dtype) for rank in members]
        true += torch.stack(given).float().mean(0)
        x = given[collectives.rank]
        compressor.mean_(x, state, collectives)
        digest.update(x.float().numpy().tobytes())
        sent += x.float()
    left = residual_of(state)
    if numel:
        dist.all_reduce(left, group=collectives.group)
    left /= collectives.size
    tolerance = 1e-5 if dtype == torch.float32 else 0.02 * num_steps
    torch.testing.assert_close(sent + left, true, rtol=0, atol=tolerance, msg=lambda m: case + m)


def feeding_back(compressor: Compressor) -> Compressor:
    return compressor if compressor.feeds_back else ErrorFeedback(compressor)


def layout_of(numel):
    """Return the layout of a weight and a bias, or of one of them."""
    bias = min(numel, 7)
    return BufferLayout((Piece("fc.weight", (numel - bias,)), Piece("fc.bias", (bias,))))


def gradient(rank, step, numel):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(numel, generator=generator)


def residual_of(state):
    """Return the sum of all residuals, flat."""
    flat = torch.zeros(state.layout.numel)
    parts = state.layout.split(flat)
    for part, tensors in zip(parts, state.parameter_state().values(), strict=True):
        for key, tensor in tensors.items():
            if key.rpartition(".")[2] == "residual":
                part.add_(tensor)
    return flat


def assert_same_bits(digests_by_rank):
    first = digests_by_rank[0]
    assert first
    for rank, digests in enumerate(digests_by_rank):
        assert digests == first, f"rank {rank} has different means than rank 0"
