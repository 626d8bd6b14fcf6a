"""``python -m benchmarks.gossip.stationary [--out FILE.csv]``.

Where leaders and averages come to rest: the claim of Leader SGD (arXiv 1905.10395) that it keeps
stationary points, where EASGD (arXiv 1412.6651) moves them. The rules of both, for four ranks in
one process in float64, with exact gradients and an exchange after every step, until nothing moves.

* ``one loss, two minima``: ``(x^2 - 1)^2 / 4 + 0.15 x`` on all ranks, which begin in both basins:
  the losses of the ranks differ as they are at different points.
* ``quadratics``: each rank has a loss of its own.

A row for each problem, method and strength of the pull goes to ``benchmarks/results/leaders.csv``:
the gradient of the mean loss at what the paper evaluates, the center or the leader, the least
gradient of a rank's own loss at its point, and the mean loss there above the least.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, record, stamp
from benchmarks.subnets.compare_sketches import make_problem
from pyparallel.gossip.algorithms.pulls.easgd import easgd
from pyparallel.gossip.algorithms.pulls.leader import find_leader
from pyparallel.gossip.algorithms.pulls.leader_sgd import leader_sgd

FIELDS = [
    "problem", "method", "strength", "ranks", "steps", "gradient_evaluated", "gradient_of_a_rank",
    "loss_above_least", "torch", "commit",
]  # fmt: skip
LOSS = Callable[[Tensor], Tensor]  # from points (n, d) to the loss of each rank at its own (n,)
STRENGTHS = (0.05, 0.2, 1.0)  # lambda of LSGD, and alpha / lr of EASGD, its rho
RANKS = 4


def two_minima(x: Tensor) -> Tensor:
    return ((x.square() - 1).square() / 4 + 0.15 * x).sum(-1)


def problems() -> Iterator[tuple[str, LOSS, Tensor, float, float]]:
    """Yield name, losses, starting points (n, d), learning rate, and the least mean loss."""
    starts = torch.tensor([[-1.2], [-0.8], [0.9], [1.1]], dtype=torch.float64)
    grid = torch.linspace(-2, 2, 4_000_001, dtype=torch.float64)[:, None]
    yield "one loss, two minima", two_minima, starts, 0.1, float(two_minima(grid).min())
    quadratic = make_problem(RANKS, 3)

    def losses(x: Tensor) -> Tensor:
        curved = (quadratic.curvatures @ x[..., None])[..., 0]
        return (x * curved).sum(-1) / 2 - (quadratic.slopes * x).sum(-1)

    rate = 0.5 / float(torch.linalg.matrix_norm(quadratic.curvatures, 2).max())
    least = losses(quadratic.solution.expand(RANKS, RANKS)).mean()
    yield "quadratics", losses, torch.zeros(RANKS, RANKS).double(), rate, float(least)


def gradients(losses: LOSS, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(losses(leaf).sum(), leaf)[0]


def run(losses: LOSS, x: Tensor, rate: float, method: str, strength: float, steps: int) -> Row:
    """Step all ranks; return the columns of their points after the last step."""
    center = x.mean(0)
    for _ in range(steps):
        update = rate * gradients(losses, x)
        if method == "EASGD":
            x, center = easgd(x, center, update, rate * strength)
            continue
        best = find_leader(losses(x).tolist(), range(len(x)))
        assert best is not None
        leaders = [(x[best], strength)]
        x = torch.stack([leader_sgd(a, b, rate, leaders) for a, b in zip(x, update, strict=True)])
    if method == "LeaderSGD":
        center = x[int(losses(x).argmin())]
    everywhere = center.expand_as(x)
    own = gradients(losses, x).norm(dim=-1)
    return {
        "gradient_evaluated": float(gradients(losses, everywhere).mean(0).norm()),
        "gradient_of_a_rank": float(own.min()),
        "loss": float(losses(everywhere).mean()),
    }


def measure(steps: int) -> Iterator[list[Row]]:
    for problem, losses, starts, rate, least in problems():
        for method in ("EASGD", "LeaderSGD"):
            for strength in STRENGTHS:
                found = run(losses, starts, rate, method, strength, steps)
                above = max(0.0, found.pop("loss") - least)
                yield [
                    {
                        "problem": problem,
                        "method": method,
                        "strength": f"{strength:g}",
                        "ranks": RANKS,
                        "steps": steps,
                        **{name: f"{each:.3g}" for name, each in found.items()},
                        "loss_above_least": f"{above:.3g}",
                        **stamp(),
                    }
                ]


def main() -> None:
    parser = make_parser("gossip.stationary", __doc__, "leaders")
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record(measure(options.steps), options.out, FIELDS, FIELDS[:3])


if __name__ == "__main__":
    main()
