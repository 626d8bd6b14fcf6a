"""Averages whose second encoding loses much: many steps, and the largest numbers."""

from functools import partial
from itertools import product

import pytest
import torch

from pyparallel.compression import BufferLayout, ErrorFeedback, Sign, Ternary
from pyparallel.compression.quantizers.blockwise import divide
from tests.compression.local_collectives import run_locally

CPU = torch.device("cpu")
ENTRIES = 256


def test_parts_begin_at_blocks_and_cover_the_buffer(subtests):
    for numel, num_ranks in product([0, 1, 64, 65, 200, 1000], [1, 2, 3, 7]):
        with subtests.test(f"{numel} {num_ranks}"):
            parts = divide(numel, 64, num_ranks)
            places = [range(numel)[where] for where in parts.slices]
            assert tuple(map(len, places)) == parts.lengths
            assert [entry for place in places for entry in place] == list(range(numel))
            assert all(place.start % 64 == 0 for place in places if place)
            blocks = -(-numel // 64)
            assert max(parts.lengths) <= 64 * -(-blocks // num_ranks)


def descend(compressor, steps, collectives):
    """Descend on a mean of quadratics; return the distance to its minimum, and residuals.

    The minima of the ranks differ, so that their gradients do not vanish.
    """
    generator = torch.Generator().manual_seed(0)
    curvatures = 0.5 + torch.rand(collectives.size, ENTRIES, generator=generator)
    minima = torch.randn(ENTRIES, generator=generator)
    minima = minima + 0.3 * torch.randn(collectives.size, ENTRIES, generator=generator)
    minimum = (curvatures * minima).sum(0) / curvatures.sum(0)

    state = ErrorFeedback(compressor).init(BufferLayout.flat(ENTRIES), CPU, collectives.rank)
    point, residuals = torch.zeros(ENTRIES), []
    for _ in range(steps):
        gradient = curvatures[collectives.rank] * (point - minima[collectives.rank])
        ErrorFeedback(compressor).mean_(gradient, state, collectives)
        point -= 0.05 * gradient
        residuals.append(float(state.entries["residual"].norm()))
    return float((point - minimum).norm() / minimum.norm()), residuals


@pytest.mark.parametrize(
    ("compressor", "steps"), [(Sign(block_size=64), 150), (Ternary(block_size=64), 80)]
)
def test_descent_converges_and_residuals_stay_bounded(compressor, steps):
    half = steps // 2
    for distance, residuals in run_locally(4, partial(descend, compressor, steps)):
        assert distance < 0.03
        assert max(residuals[half:]) <= max(residuals[:half])


def add_up(compressor, gradients, steps, collectives):
    """Return the sum of the means of constant gradients, and this rank's residual."""
    state = ErrorFeedback(compressor).init(BufferLayout.flat(ENTRIES), CPU, collectives.rank)
    total = torch.zeros(ENTRIES, dtype=torch.float64)
    for _ in range(steps):
        x = gradients[collectives.rank].clone()
        ErrorFeedback(compressor).mean_(x, state, collectives)
        total += x
    return total, state.entries["residual"]


def test_signs_of_constant_gradients_lag_by_less_than_time():
    """Sign has the largest residuals: large entries are sent too rarely, small ones too often."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(ENTRIES, generator=generator).repeat(4, 1)
    gradients += 0.1 * torch.randn(4, ENTRIES, generator=generator)
    results = run_locally(4, partial(add_up, Sign(block_size=64), gradients, 100))
    truth = 100 * gradients.double().mean(0)
    left = torch.stack([residual for _, residual in results]).double().mean(0)
    for total, _ in results:
        assert (truth - total - left).norm() <= 1e-5 * truth.norm()
    assert left.norm() <= 0.15 * truth.norm()


def test_the_largest_numbers_leave_no_infinite_residual():
    """The second encoding's error times the ranks can overflow float32."""
    generator = torch.Generator().manual_seed(0)
    gradients = 1e38 * torch.rand(4, ENTRIES, generator=generator) ** 2
    for _, residual in run_locally(4, partial(add_up, Ternary(block_size=64), gradients, 3)):
        assert residual.isfinite().all()
