"""Averages in two shots, where the second one loses much: the long run, and the largest numbers."""

import pytest
import torch
import torch.distributed as dist

from pyparallel.compression import ErrorFeedback, Layout, Natural, Ranks, Sign, Ternary
from pyparallel.compression.block_coder import Parts
from tests.workers import run_ranks

CPU = torch.device("cpu")
RANKS, STEPS = 4, 300
ENTRIES = 256
COMPRESSORS = [Sign(block_size=64), Ternary(block_size=64), Natural()]


@pytest.mark.parametrize("numel", [0, 1, 64, 65, 200, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_parts_begin_at_blocks_and_leave_nothing_out(numel, num_ranks):
    parts = Parts.of(Sign(block_size=64), numel, num_ranks)
    places = [range(numel)[where] for where in parts.slices]
    assert [len(place) for place in places] == parts.lengths
    assert [entry for place in places for entry in place] == list(range(numel))
    assert all(place.start % 64 == 0 for place in places if place)
    blocks = -(-numel // 64)
    assert max(parts.lengths) <= 64 * -(-blocks // num_ranks)


def descend(compressor, ranks, apart):
    """Gradient descent on the mean of as many quadratics: how far from its minimum, and residuals.

    Args:
        apart: how far the minima of the ranks are.
    """
    generator = torch.Generator().manual_seed(0)
    curvatures = 0.5 + torch.rand(ranks.size, ENTRIES, generator=generator)
    minima = torch.randn(ENTRIES, generator=generator)
    minima = minima + apart * torch.randn(ranks.size, ENTRIES, generator=generator)
    minimum = (curvatures * minima).sum(0) / curvatures.sum(0)

    state = ErrorFeedback(compressor).init(Layout.flat(ENTRIES), CPU, ranks.rank)
    point, residuals = torch.zeros(ENTRIES), []
    for _ in range(STEPS):
        gradient = curvatures[ranks.rank] * (point - minima[ranks.rank])
        ErrorFeedback(compressor).mean_(gradient, state, ranks)
        point -= 0.05 * gradient
        residuals.append(float(state.entries["residual"].norm()))
    return float((point - minimum).norm() / minimum.norm()), residuals


def descend_with_all(rank):
    ranks = Ranks()
    return [descend(each, ranks, apart) for each in COMPRESSORS for apart in (0.0, 0.3)]


def test_descent_with_error_feedback_arrives_and_residuals_stay_bounded():
    for together, apart in zip(*[iter(zip(*run_ranks(RANKS, descend_with_all), strict=True))] * 2):
        print(
            [x for x, _ in together],
            [x for x, _ in apart],
            [[round(y, 2) for y in r[::40]] for _, r in apart],
        )
    assert 0
