"""Subnetworks of a quadratic: where each sketch leads, and how far that is from the solution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pyparallel.compression import BufferLayout, Diagonal, HeterogeneousPermK, PermK
from pyparallel.compression.sparsifiers.permutation_sketch import PermutationSketch
from pyparallel.subnets import Quadratic, drawn_sketches

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to go on from round to round.

    Args:
        name: in tables.
        quadratic: in the coordinates in which it is run.
        scales: (n, d), what sketch i multiplies its share by; shares are single entries.
        root: (d,), by which those coordinates are multiplied to be the problem's.
        sketches: (rounds, n, d, d), those of all ranks, from a seed and the number of rounds.
    """

    name: str
    quadratic: Quadratic
    scales: Tensor
    root: Tensor
    sketches: Callable[[int, int], Tensor]

    @property
    def largest_step(self) -> float:
        """One over the largest curvature that any draw of the sketches shows."""
        return self.quadratic.num_ranks / float(
            (self.scales.square() * self.quadratic.diagonals).max()
        )

    @property
    def limit(self) -> Tensor:
        """Where it leads in expectation, in the problem's coordinates."""
        return self.root * self.quadratic.expected_limit(self.scales)


@dataclass(frozen=True, eq=False)
class WholeModel(Contender):
    """Every rank has all of the model: gradient descent."""

    @property
    def largest_step(self) -> float:
        """One over the largest curvature."""
        return 1 / float(torch.linalg.matrix_norm(self.quadratic.mean_curvature, 2))

    @property
    def limit(self) -> Tensor:
        """The solution."""
        return self.quadratic.solution


@dataclass(frozen=True)
class Curves:
    """Distances over rounds, the first before any; root mean squares over the runs.

    In units of the norm of what they are distances to, in which the first is 1.
    """

    to_solution: Sequence[float]
    to_limit: Sequence[float]


def make_problem(num_ranks: int, seed: int) -> Quadratic:
    """Ranks that differ, in coordinates of several scales; as many of these as ranks."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(num_ranks, num_ranks, num_ranks, generator=generator, dtype=torch.float64)
    curvatures = root @ root.mT / num_ranks + torch.eye(num_ranks, dtype=torch.float64)
    scale = torch.logspace(-0.5, 0.5, num_ranks, dtype=torch.float64)
    curvatures = scale[:, None] * curvatures * scale
    own = torch.randn(num_ranks, num_ranks, generator=generator, dtype=torch.float64)
    shared = torch.randn(num_ranks, generator=generator, dtype=torch.float64)
    return Quadratic(curvatures, (curvatures @ (shared + own / 4)[..., None])[..., 0])


def contenders(problem: Quadratic) -> list[Contender]:
    """Gradient descent, `PermK` as it is and preconditioned, and `HeterogeneousPermK`.

    Preconditioned means run in the coordinates in which the mean curvature's diagonal is of ones.
    """
    n, d = problem.slopes.shape
    ones = torch.ones_like(problem.slopes)
    identity = torch.eye(d, dtype=torch.float64)
    mean_diagonal = problem.mean_curvature.diagonal()
    inside, root = problem.preconditioned(mean_diagonal), mean_diagonal.rsqrt()
    own = tuple(Diagonal({"*": each}) for each in problem.diagonals)
    own_scales = n**0.5 * problem.diagonals.rsqrt()

    @cache
    def of_perm_k(seed: int, rounds: int) -> Tensor:
        return _draw(PermK(seed, n), n, rounds)

    def of_heterogeneous(seed: int, rounds: int) -> Tensor:
        return _draw(HeterogeneousPermK(own, seed), n, rounds)

    def of_nobody(seed: int, rounds: int) -> Tensor:
        return identity.expand(rounds, n, d, d)

    return [
        WholeModel("whole", problem, ones, ones[0], of_nobody),
        Contender("plain", problem, n * ones, ones[0], of_perm_k),
        Contender("preconditioned", inside, n * ones, root, of_perm_k),
        Contender("heterogeneous", problem, own_scales, ones[0], of_heterogeneous),
    ]


def _draw(sketch: PermutationSketch, num_ranks: int, rounds: int) -> Tensor:
    states = [sketch.init(BufferLayout.flat(num_ranks), CPU, rank) for rank in range(num_ranks)]
    return torch.stack([drawn_sketches(sketch, states) for _ in range(rounds)])


def run(
    contender: Contender, solution: Tensor, step_sizes: Sequence[float], rounds: int, runs: int
) -> list[Curves]:
    """Start from zero with every step size, several times; the step sizes see the same draws.

    Args:
        contender: what is run.
        solution: of the problem, in its own coordinates.
        step_sizes: of `Quadratic.descend`.
        rounds: the number of steps.
        runs: how many seeds.
    """
    sketches = torch.stack([contender.sketches(seed, rounds) for seed in range(runs)])
    sizes = torch.tensor(step_sizes, dtype=torch.float64)[:, None]
    points = [torch.zeros(runs, len(step_sizes), len(contender.root), dtype=torch.float64)]
    for drawn in sketches.unbind(1):
        points.append(contender.quadratic.descend(points[-1], drawn[:, None], sizes))
    by_step = (contender.root * torch.stack(points, 1)).unbind(2)  # (runs, rounds + 1, d) each
    return [
        Curves(_distances(each, solution), _distances(each, contender.limit)) for each in by_step
    ]


def _distances(points: Tensor, target: Tensor) -> list[float]:
    squares = (points - target).square().sum(-1)
    return (squares.mean(0).sqrt() / target.norm()).tolist()
