"""``python -m benchmarks.subnets.compare_sketches [--ranks 2 4] [--steps 1 0.3] [--seed 3]``.

Trains subnetworks of a quadratic with every sketch of the theory (arXiv 2306.16484), and writes a
row for each number of ranks, sketch and step size to ``subnets-theory.csv`` in
``benchmarks/results``. ``python -m benchmarks.subnets.picture FILE.csv`` draws them.
"""

from collections.abc import Sequence

import torch

from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import RESULTS, Row, as_text, stamp, write_rows
from benchmarks.subnets.theory import Curves, SketchMethod, make_problem, run, sketch_methods
from benchmarks.theory.quadratic import Quadratic

FIELDS = [
    "ranks", "seed", "sketch", "relative_step", "step_size", "runs", "to_solution", "to_limit",
    "limit_to_solution", "torch", "commit", "rounds", "to_solution_at", "to_limit_at",
]  # fmt: skip


def main() -> None:
    parser = make_parser("subnets.compare_sketches", __doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 10])
    parser.add_argument(
        "--steps", nargs="+", type=float, default=[1.0, 0.3, 0.1], help="of the largest step size"
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--runs", type=int, default=10, help="seeds of the permutations")
    parser.add_argument("--seed", type=int, default=3, help="of the problem")
    parser.set_defaults(out=RESULTS / "subnets-theory.csv")
    options = parser.parse_args()
    rows: list[Row] = []
    for num_ranks in options.ranks:
        problem = make_problem(num_ranks, options.seed)
        found = measure(problem, options.steps, options.rounds, options.runs)
        rows += [{"ranks": str(num_ranks), "seed": str(options.seed), **row} for row in found]
        print(*map(describe, rows[-len(found) :]), "", sep="\n")
    write_rows(rows, options.out, FIELDS)
    print(f"rows: {options.out}")


def measure(problem: Quadratic, steps: Sequence[float], rounds: int, runs: int) -> list[Row]:
    """Measure all methods: gradient descent with its largest step size, the sketches with all."""
    exact, *sketched = sketch_methods(problem)
    rows = []
    for method in (exact, *sketched):
        own_steps, own_runs = ([1.0], 1) if method is exact else (steps, runs)
        sizes = [step * method.largest_step for step in own_steps]
        found = run(method, problem.solution, sizes, rounds, own_runs)
        for step, curves in zip(own_steps, found, strict=True):
            row = as_row(method, problem.solution, step, curves)
            rows.append({"runs": str(own_runs), **row})
    return rows


def as_row(method: SketchMethod, solution: torch.Tensor, step: float, curves: Curves) -> Row:
    rounds = sample(len(curves.to_limit) - 1)
    away = (method.limit - solution).norm() / solution.norm()
    return {
        "sketch": method.name,
        "relative_step": f"{step:g}",
        "step_size": f"{step * method.largest_step:.6g}",
        "to_solution": f"{curves.to_solution[-1]:.4g}",
        "to_limit": f"{curves.to_limit[-1]:.4g}",
        "limit_to_solution": f"{away:.4g}",
        **stamp(),
        "rounds": " ".join(map(str, rounds)),
        "to_solution_at": as_text(curves.to_solution[r] for r in rounds),
        "to_limit_at": as_text(curves.to_limit[r] for r in rounds),
    }


def sample(last: int, count: int = 60) -> list[int]:
    """Return rounds from 0 to the last, denser at first."""
    ratio = (last + 1) ** (1 / count)
    return sorted({0, last, *(round(ratio**index) - 1 for index in range(count))})


def describe(row: Row) -> str:
    return (
        f"{row['ranks']:>3} ranks, {row['sketch']:<15} step {row['step_size']:<9} "
        f"from x*: {row['to_solution']:<10} from its limit: {row['to_limit']:<10} "
        f"limit from x*: {row['limit_to_solution']}"
    )


if __name__ == "__main__":
    main()
