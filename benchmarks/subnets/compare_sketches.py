"""``python -m benchmarks.subnets.compare_sketches [--ranks 2 4] [--rounds 300] [--runs 10]``.

Trains subnetworks of a quadratic with every sketch of the theory (arXiv 2306.16484), and writes a
row for each number of ranks, sketch and step size to ``subnets-theory.csv`` in
``benchmarks/results``. ``python -m benchmarks.subnets.picture FILE.csv`` draws them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, as_text, record, stamp
from benchmarks.theory.quadratic import Quadratic, drawn_sketches
from pyparallel.compression import BufferLayout, PermK

FIELDS = [
    "ranks", "seed", "sketch", "relative_step", "step_size", "runs", "to_solution", "to_limit",
    "limit_to_solution", "torch", "commit", "rounds", "to_solution_at", "to_limit_at",
]  # fmt: skip
CPU = torch.device("cpu")
STEPS = (1.0, 0.3, 0.1)  # of the largest step size
SEED = 3  # of the problem


@dataclass(frozen=True, eq=False)
class SketchMethod:
    """An iteration on a quadratic with sketches."""

    name: str
    quadratic: Quadratic  # the problem in the coordinates of the iteration
    root: Tensor  # (d,), factors from these coordinates to the problem's
    # From a seed and the number of rounds to (rounds, n, d, d), those of all ranks
    sketches: Callable[[int, int], Tensor]
    largest_step: float  # one over the largest curvature of any draw of the sketches
    limit: Tensor  # limit in expectation, in the problem's coordinates


@dataclass(frozen=True)
class Curves:
    """Relative distances over rounds, starting before the first; root mean squares over the runs.

    In units of the norm of the target, so the first is 1.
    """

    to_solution: Sequence[float]
    to_limit: Sequence[float]


def make_problem(num_ranks: int, seed: int) -> Quadratic:
    """Return a problem with different ranks and coordinate scales; as many coordinates as ranks."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(num_ranks, num_ranks, num_ranks, generator=generator, dtype=torch.float64)
    curvatures = root @ root.mT / num_ranks + torch.eye(num_ranks, dtype=torch.float64)
    scale = torch.logspace(-0.5, 0.5, num_ranks, dtype=torch.float64)
    curvatures = scale[:, None] * curvatures * scale
    own = torch.randn(num_ranks, num_ranks, generator=generator, dtype=torch.float64)
    shared = torch.randn(num_ranks, generator=generator, dtype=torch.float64)
    return Quadratic(curvatures, (curvatures @ (shared + own / 4)[..., None])[..., 0])


def sketch_methods(problem: Quadratic) -> list[SketchMethod]:
    """Return gradient descent, `PermK` plain and preconditioned, and the heterogeneous sketch.

    Preconditioned means in the coordinates where the mean curvature's diagonal is all ones. The
    heterogeneous sketch is ``sqrt(n) D_i^(-1/2)`` on the i-th share, D_i the diagonal of rank i's
    curvature (arXiv 2306.16484, section 4).
    """
    n, d = problem.slopes.shape
    mean_diagonal = problem.mean_curvature.diagonal()
    ones, identity = torch.ones(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64)

    @cache
    def of_perm_k(seed: int, rounds: int) -> Tensor:
        return _draw(seed, n, rounds)

    def of_heterogeneous(seed: int, rounds: int) -> Tensor:
        return _draw(seed, n, rounds, own_scales)

    def identity_sketches(seed: int, rounds: int) -> Tensor:
        return identity.expand(rounds, n, d, d)

    def sketched(
        name: str, quadratic: Quadratic, scales: Tensor, root: Tensor, sketches: Callable
    ) -> SketchMethod:
        """Return a method whose sketch i has factors (n, d) for its share, of single entries."""
        largest = n / float((scales.square() * quadratic.diagonals).max())
        limit = root * quadratic.expected_limit(scales)
        return SketchMethod(name, quadratic, root, sketches, largest, limit)

    largest = 1 / float(torch.linalg.matrix_norm(problem.mean_curvature, 2))
    whole = (problem, ones, identity_sketches, largest, problem.solution)
    inside, plain = problem.preconditioned(mean_diagonal), torch.full_like(problem.slopes, n)
    own_scales = n**0.5 * problem.diagonals.rsqrt()
    return [
        SketchMethod("whole", *whole),
        sketched("plain", problem, plain, ones, of_perm_k),
        sketched("preconditioned", inside, plain, mean_diagonal.rsqrt(), of_perm_k),
        sketched("heterogeneous", problem, own_scales, ones, of_heterogeneous),
    ]


def _draw(seed: int, num_ranks: int, rounds: int, scales: Tensor | None = None) -> Tensor:
    sketch = PermK(seed, num_ranks)
    states = [sketch.init(BufferLayout.flat(num_ranks), CPU, rank) for rank in range(num_ranks)]
    return torch.stack([drawn_sketches(sketch, states, scales) for _ in range(rounds)])


def run(
    method: SketchMethod, solution: Tensor, step_sizes: Sequence[float], rounds: int, runs: int
) -> list[Curves]:
    """Run from zero with every step size, several times; all step sizes use the same draws."""
    sketches = torch.stack([method.sketches(seed, rounds) for seed in range(runs)])
    sizes = torch.tensor(step_sizes, dtype=torch.float64)[:, None]
    points = [torch.zeros(runs, len(step_sizes), len(method.root), dtype=torch.float64)]
    for drawn in sketches.unbind(1):
        points.append(method.quadratic.descend(points[-1], drawn[:, None], sizes))
    by_step = (method.root * torch.stack(points, 1)).unbind(2)  # (runs, rounds + 1, d) each
    return [Curves(_distances(each, solution), _distances(each, method.limit)) for each in by_step]


def _distances(points: Tensor, target: Tensor) -> list[float]:
    squares = (points - target).square().sum(-1)
    return (squares.mean(0).sqrt() / target.norm()).tolist()


def main() -> None:
    parser = make_parser("subnets.compare_sketches", __doc__, "subnets-theory")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 10])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--runs", type=int, default=10, help="seeds of the permutations")
    options = parser.parse_args()

    def rows_of(num_ranks: int) -> list[Row]:
        problem = make_problem(num_ranks, SEED)
        found = measure(problem, STEPS, options.rounds, options.runs)
        return [{"ranks": num_ranks, "seed": SEED, **row} for row in found]

    record(map(rows_of, options.ranks), options.out, FIELDS)


def measure(problem: Quadratic, steps: Sequence[float], rounds: int, runs: int) -> list[Row]:
    """Measure all methods: gradient descent with its largest step size, the sketches with all."""
    exact, *sketched = sketch_methods(problem)
    rows = []
    for method in (exact, *sketched):
        own_steps, own_runs = ([1.0], 1) if method is exact else (steps, runs)
        sizes = [step * method.largest_step for step in own_steps]
        found = run(method, problem.solution, sizes, rounds, own_runs)
        away = (method.limit - problem.solution).norm() / problem.solution.norm()
        for step, size, curves in zip(own_steps, sizes, found, strict=True):
            own = {"runs": own_runs, "sketch": method.name, "limit_to_solution": f"{away:.4g}"}
            own |= {"relative_step": f"{step:g}", "step_size": f"{size:.6g}"}
            at = sample(rounds)
            for name in ("to_solution", "to_limit"):
                distances = getattr(curves, name)
                own |= {name: f"{distances[-1]:.4g}"}
                own[f"{name}_at"] = as_text(distances[each] for each in at)
            rows.append({**own, "rounds": " ".join(map(str, at)), **stamp()})
    return rows


def sample(last: int, count: int = 60) -> list[int]:
    """Return rounds from 0 to the last, denser at first."""
    ratio = (last + 1) ** (1 / count)
    return sorted({0, last, *(round(ratio**index) - 1 for index in range(count))})


if __name__ == "__main__":
    main()
