"""The quadratic model: the theory of subnetworks, checked by enumeration and by iteration."""

import itertools

import pytest
import torch

from benchmarks.theory.quadratic import Quadratic, drawn_sketches
from pyparallel.compression import BufferLayout, PermK

CPU = torch.device("cpu")
SIZES = [(1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (4, 4)]  # n, d
every_size = pytest.mark.parametrize(("num_ranks", "d"), SIZES)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(num_ranks, d, seed=0):
    """Curvatures and slopes that differ from rank to rank."""
    root = random(num_ranks, d, d, seed=seed)
    curvatures = root @ root.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)
    return Quadratic(curvatures, random(num_ranks, d, seed=seed + 1))


def make_homogeneous(num_ranks, seed=0):
    """All ranks alike, and shares of single entries."""
    one = make(1, num_ranks, seed)
    return Quadratic(one.curvatures.repeat(num_ranks, 1, 1), one.slopes.repeat(num_ranks, 1))


def plain(quadratic):
    return torch.full_like(quadratic.slopes, float(quadratic.num_ranks))


def heterogeneous(quadratic):
    return quadratic.num_ranks**0.5 * quadratic.diagonals.rsqrt()


def permutation_sketches(order, scales):
    """Return (n, d, d) sketches that keep each rank's part of a permutation, scaled."""
    kept = torch.zeros_like(scales)
    kept[torch.arange(len(scales))[:, None], torch.tensor(order).view(len(scales), -1)] = 1
    return torch.diag_embed(scales * kept)


def enumerate_sketches(scales):
    orders = itertools.permutations(range(scales.shape[1]))
    return [permutation_sketches(order, scales) for order in orders]


def take_round(quadratic, x, sketches, step_size):
    """Return ``mean_i [C_i x - step_size C_i grad f_i(C_i x)]``: one round with one local step."""
    return sketches.mean(0) @ x - step_size * quadratic.sketched_gradient(x, sketches)


def limit_of_the_paper(quadratic):
    """Return ``sum_i D_i^(-1/2) b_i / (n sqrt(n))``, of the heterogeneous sketch."""
    return (quadratic.diagonals.rsqrt() * quadratic.slopes).mean(0) / quadratic.num_ranks**0.5


def start(sketch, num_ranks, d):
    return [sketch.init(BufferLayout.flat(d), CPU, rank) for rank in range(num_ranks)]


def drawn_by_diagonals(quadratic):
    """Yield draws of the sketch that is scaled by each rank's own diagonal."""
    num_ranks, d = quadratic.slopes.shape
    sketch = PermK(num_ranks=num_ranks)
    states = start(sketch, num_ranks, d)
    while True:
        yield drawn_sketches(sketch, states, heterogeneous(quadratic))


def estimate(quadratic, sketches):
    """The mean of C_i L_i C_i."""
    return (sketches @ quadratic.curvatures @ sketches).mean(0)


def test_a_draw_is_one_of_the_enumerated():
    quadratic = make(3, 3)
    known = torch.stack(enumerate_sketches(heterogeneous(quadratic)))
    seen = set()
    for drawn in itertools.islice(drawn_by_diagonals(quadratic), 60):
        apart = (drawn - known).abs().amax((1, 2, 3))
        assert apart.min() < 1e-12
        seen.add(int(apart.argmin()))
    assert len(seen) == len(known) == 6


@every_size
def test_a_round_descends_where_sketches_add_up(num_ranks, d):
    quadratic, x = make(num_ranks, d), random(d, seed=5)
    for sketches in enumerate_sketches(plain(quadratic)):
        stepped = take_round(quadratic, x, sketches, 0.1)
        torch.testing.assert_close(stepped, quadratic.descend(x, sketches, 0.1))
    if num_ranks == 1:
        gradient = quadratic.curvatures[0] @ x - quadratic.slopes[0]
        torch.testing.assert_close(stepped, x - 0.1 * gradient)


def test_a_round_equals_the_ranks_steps_in_sequence():
    quadratic, x = make(2, 4), random(4, seed=5)
    sketches = permutation_sketches([2, 0, 3, 1], heterogeneous(quadratic))
    found = []
    for rank, sketch in enumerate(sketches):
        own = (sketch @ x).requires_grad_()
        loss = own @ quadratic.curvatures[rank] @ own / 2 - quadratic.slopes[rank] @ own
        loss.backward()
        found.append(sketch @ x - 0.3 * sketch @ own.grad)
    torch.testing.assert_close(
        take_round(quadratic, x, sketches, 0.3), torch.stack(found).mean(0).detach()
    )


def test_the_gradient_of_the_mean_is_zero_at_the_solution():
    quadratic = make(3, 3)
    torch.testing.assert_close(
        quadratic.gradients(quadratic.solution.expand(3, 3)).mean(0), torch.zeros(3).double()
    )


@every_size
@pytest.mark.parametrize("scales_of", [plain, heterogeneous])
def test_the_expected_limit_is_that_of_the_mean_over_permutations(num_ranks, d, scales_of):
    quadratic = make(num_ranks, d)
    scales = scales_of(quadratic)
    all_of_them, x = enumerate_sketches(scales), quadratic.expected_limit(scales)
    moved = torch.stack([quadratic.descend(x, each, 1.0) for each in all_of_them]).mean(0)
    torch.testing.assert_close(moved, x)
    if scales_of is heterogeneous and d == num_ranks:
        torch.testing.assert_close(x, limit_of_the_paper(quadratic))
    if num_ranks == 1 and scales_of is plain:
        torch.testing.assert_close(x, quadratic.solution)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_preconditioning_makes_the_estimate_n_times_the_identity(num_ranks):
    quadratic = make_homogeneous(num_ranks)
    diagonal = quadratic.diagonals[0]
    sketch = PermK(num_ranks=num_ranks)
    sketches = drawn_sketches(sketch, start(sketch, num_ranks, num_ranks))
    fixed = quadratic.preconditioned(diagonal)
    torch.testing.assert_close(estimate(fixed, sketches), num_ranks * torch.eye(num_ranks).double())
    y = take_round(fixed, random(num_ranks, seed=5), sketches, 1 / num_ranks)
    torch.testing.assert_close(y, diagonal.rsqrt() * quadratic.slopes[0] / num_ranks)
    torch.testing.assert_close(fixed.solution, diagonal.sqrt() * quadratic.solution)


def test_bad_arguments_are_refused():
    fine = make(2, 4)
    for curvatures, slopes, error_text in [
        (fine.curvatures[0], fine.slopes, r"curvatures must be \(n, d, d\), got \[4, 4\]"),
        (fine.curvatures, fine.slopes[:1], r"slopes must be \[2, 4\].*got \[1, 4\]"),
        (fine.curvatures, fine.slopes.float(), r"must be float64, got .* torch\.float32"),
        (fine.curvatures.triu(), fine.slopes, "must be symmetric"),
    ]:
        with pytest.raises(ValueError, match=error_text):
            Quadratic(curvatures, slopes)
    with pytest.raises(ValueError, match="d must be a multiple of the 3 ranks, got 4"):
        make(3, 4).expected_limit(torch.ones(3, 4, dtype=torch.float64))
