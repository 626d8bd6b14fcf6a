"""``python -m benchmarks.subnets.compare_gradients [--tasks quadratic network] [--seeds 3 4 5]``.

Compares independent subnetwork training with compressed gradients, the subject of "Towards a Better
Theoretical Understanding of Independent Subnetwork Training" (arXiv 2306.16484): with the same
draws of permutations, subnetworks take ``mean_i C_i grad f_i(C_i x)``, compressed gradients
``mean_i C_i grad f_i(x)``, and EF21 sends differences to the gradients that it knows.

On quadratics all is computable, the limit too; a network with one hidden layer, on digits, is cut
by hidden units. Ranks are rows of a tensor in one process. A row for each number of ranks, method,
step size and seed, of the problem or of the network, goes to ``subnets-gradients.csv`` in
``benchmarks/results``, with what a rank sends, receives and computes in an update.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, as_text, record, stamp
from benchmarks.pipeline.tasks import load_images
from benchmarks.subnets.compare_sketches import CPU, make_problem, sample
from benchmarks.theory.quadratic import Quadratic, drawn_sketches, ef21
from pyparallel.compression import BufferLayout, PermK
from pyparallel.subnets.partition.unit_assignment import draw_units

FIELDS = [
    "task", "ranks", "method", "relative_step", "seed", "step_size", "draws", "updates",
    "limit_to_solution", "average_to_limit", "to_solution", "average_to_solution",
    "accuracy", "loss", "sent_numbers", "received_numbers", "computed_share", "torch", "commit",
    "rounds", "to_solution_at", "loss_at",
]  # fmt: skip
KEY = FIELDS[:5]
STEPS = (1.0, 0.3, 0.1)  # of the largest step size
RATES = (0.03, 0.1, 0.3, 1.0)  # of the network
WHOLE, SUBNETS, LOCAL = "gradient descent", "subnetworks", "subnetworks, 10 local steps"
COMPRESSED, EF21 = "compressed gradients", "EF21"


@functools.cache
def draw_diagonals(num_ranks: int, rounds: int, draw: int) -> Tensor:
    """Return the diagonals of `PermK`'s sketches, (rounds, n, n) float32: n for a rank's share."""
    sketch = PermK(draw, num_ranks)
    states = [sketch.init(BufferLayout.flat(num_ranks), CPU, rank) for rank in range(num_ranks)]
    drawn = [drawn_sketches(sketch, states).diagonal(dim1=1, dim2=2) for _ in range(rounds)]
    return torch.stack(drawn).float()


def descend_quadratic(
    problem: Quadratic, method: str, step_sizes: Sequence[float], diagonals: Tensor
) -> Tensor:
    """Return x from zero on, with each step size and draw: (draws, step sizes, rounds + 1, d).

    Args:
        diagonals: (draws, rounds, n, d) of the sketches.
    """
    n, d = problem.slopes.shape
    sizes = torch.tensor(step_sizes, dtype=torch.float64)[:, None]
    x = torch.zeros(len(diagonals), len(sizes), d, dtype=torch.float64)
    estimates = torch.zeros(*x.shape[:-1], n, d, dtype=torch.float64)
    points = [x]
    for drawn in diagonals.double().unbind(1):
        factors = drawn[:, None]  # (draws, 1, n, d): the same for all step sizes
        if method == SUBNETS:
            gradient = problem.sketched_gradient(x, torch.diag_embed(factors))
        elif method == COMPRESSED:
            gradient = problem.compressed_gradient(x, torch.diag_embed(factors))
        else:
            exact = problem.gradients(x[..., None, :].expand_as(estimates))
            estimates = ef21(estimates, exact, factors / n)
            gradient = estimates.mean(-2)
        x = x - sizes * gradient
        points.append(x)
    return torch.stack(points, 2)


def measure_quadratic(num_ranks: int, seed: int, rounds: int, draws: int) -> Iterator[Row]:
    """Yield the rows of a problem: distances are root mean squares over the draws.

    The largest step size is one over the largest curvature of any draw; for EF21, whose estimates
    are as many updates old as there are shares, that of gradient descent divided by the ranks. The
    average is of the second half of the updates.
    """
    problem = make_problem(num_ranks, seed)
    solution, n = problem.solution, num_ranks
    scales = torch.full_like(problem.slopes, n)
    limit = problem.expected_limit(scales)
    sketched = n / float((scales.square() * problem.diagonals).max())
    whole = 1 / float(torch.linalg.matrix_norm(problem.mean_curvature, 2))
    diagonals = torch.stack([draw_diagonals(n, rounds, draw) for draw in range(draws)])
    at = sample(rounds)
    for method in (SUBNETS, COMPRESSED, EF21):
        target = limit if method == SUBNETS else solution
        sizes = [step * (whole / n if method == EF21 else sketched) for step in STEPS]
        points = descend_quadratic(problem, method, sizes, diagonals)
        averages = points[:, :, rounds // 2 :].mean(2)
        for index, (step, size) in enumerate(zip(STEPS, sizes, strict=True)):
            along = _relative(points[:, index], solution)
            average = averages[:, index]
            yield {
                "task": "quadratic", "ranks": n, "method": method, "seed": seed,
                "relative_step": f"{step:g}", "step_size": f"{size:.6g}", "draws": draws,
                "updates": rounds,
                "limit_to_solution": f"{float((target - solution).norm() / solution.norm()):.4g}",
                "average_to_limit": f"{float(_relative(average, target)):.4g}",
                "average_to_solution": f"{float(_relative(average, solution)):.4g}",
                "to_solution": f"{float(along[-1]):.4g}",
                **_costs(method, n, own=1, shared=0, size=n),
                **stamp(),
                "rounds": " ".join(map(str, at)),
                "to_solution_at": as_text(along[at].tolist()),
            }  # fmt: skip


def _relative(points: Tensor, target: Tensor) -> Tensor:
    return (points - target).square().sum(-1).mean(0).sqrt() / target.norm()


def _costs(method: str, num_ranks: int, *, own: int, shared: int, size: int) -> Row:
    """Return what a rank sends and receives in an update, in numbers, and its share of computing.

    Args:
        own: numbers in a rank's share of what is cut.
        shared: numbers that are not cut, which all ranks send.
        size: numbers in the model.
    """
    steps = 10 if method == LOCAL else 1
    sent = size if method == WHOLE else own + shared
    received = own + shared if method in (SUBNETS, LOCAL) else size
    computed = 1 / num_ranks if method in (SUBNETS, LOCAL) else 1
    return {
        "sent_numbers": f"{sent / steps:g}",
        "received_numbers": f"{received / steps:g}",
        "computed_share": f"{computed:g}",
    }


@dataclass(frozen=True)
class Network:
    """A network with one hidden layer on scikit-learn's digits, sharded over the ranks."""

    num_ranks: int
    units: int = 120
    batch_size: int = 32  # images per rank and update

    def initial(self, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        layers = nn.Linear(64, self.units), nn.Linear(self.units, 10)
        return [each.detach() for layer in layers for each in layer.parameters()]

    def draw(self, draw: int, update: int) -> Tensor:
        """Return which units each rank has, (n, units): the trainer's draws."""
        pieces = draw_units("hidden", self.units, self.num_ranks, seed=draw, round_index=update)
        kept = torch.zeros(self.num_ranks, self.units)
        for row, piece in zip(kept, pieces, strict=True):
            row[piece] = 1
        return kept

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (n, batch size, 64) and labels (n, batch size), of disjoint data."""
        images, labels, _, _ = load_images()
        images, generator = images.flatten(1), torch.Generator().manual_seed(seed)
        size = len(labels) // self.num_ranks
        while True:
            chosen = torch.randint(size, (self.num_ranks, self.batch_size), generator=generator)
            chosen = chosen * self.num_ranks + torch.arange(self.num_ranks)[:, None]
            yield images[chosen], labels[chosen]

    def test(self, weights: Sequence[Tensor]) -> tuple[float, float]:
        """Return test accuracy and loss of the whole network."""
        _, _, images, labels = load_images()
        in_weight, in_bias, out_weight, out_bias = weights
        hidden = torch.relu(images.flatten(1) @ in_weight.T + in_bias)
        outputs = hidden @ out_weight.T + out_bias
        loss = nn.functional.cross_entropy(outputs, labels)
        return float((outputs.argmax(1) == labels).float().mean()), float(loss)


def gradients_of(
    copies: Sequence[Tensor], images: Tensor, labels: Tensor, factors: Tensor
) -> list[Tensor]:
    """Return each rank's gradient of its mean loss, (n, ...) like ``copies``.

    Args:
        copies: (n, ...) the ranks' weights.
        factors: (n, units) of the hidden units' outputs: n and 0 in subnetworks, 1 otherwise.
    """
    leaves = [each.detach().requires_grad_() for each in copies]
    in_weight, in_bias, out_weight, out_bias = leaves
    hidden = torch.relu(torch.baddbmm(in_bias[:, None], images, in_weight.mT)) * factors[:, None]
    outputs = torch.baddbmm(out_bias[:, None], hidden, out_weight.mT)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    return list(torch.autograd.grad(loss * len(labels), leaves))


def shares_of(kept: Tensor) -> list[Tensor]:
    """Return the shares of each rank in the weights, which add up to 1: of units, and 1/n."""
    n = len(kept)
    return [kept[:, :, None], kept, kept[:, None, :], torch.full((n, 1), 1 / n)]


def train(network: Network, method: str, rate: float, seed: int, updates: int) -> list[float]:
    """Train with plain SGD; return test losses after 0, 10, 20, ... updates, and the accuracy."""
    n = network.num_ranks
    weights, batches = network.initial(seed), network.batches(seed)
    whole = torch.ones(n, network.units)
    estimates = [torch.zeros(n, *each.shape) for each in weights]
    interval = 10 if method == LOCAL else 1
    losses = [network.test(weights)[1]]
    for update in range(0, updates, interval):
        shares = shares_of(network.draw(seed, update))
        copies = [each.expand(n, *each.shape) for each in weights]
        if method in (SUBNETS, LOCAL):
            for _ in range(interval):
                grads = gradients_of(copies, *next(batches), n * shares[1])
                copies = [x - rate * g for x, g in zip(copies, grads, strict=True)]
            weights = [(s * x).sum(0) for s, x in zip(shares, copies, strict=True)]
        else:
            grads = gradients_of(copies, *next(batches), whole)
            if method == WHOLE:
                found = [each.mean(0) for each in grads]
            elif method == COMPRESSED:
                found = [(s * g).sum(0) for s, g in zip(shares, grads, strict=True)]
            else:
                kept = [*shares[:3], torch.ones(n, 1)]
                estimates = list(map(ef21, estimates, grads, kept))
                found = [each.mean(0) for each in estimates]
            weights = [x - rate * g for x, g in zip(weights, found, strict=True)]
        if (update + interval) % 10 == 0:
            losses.append(network.test(weights)[1])
    return [*losses, network.test(weights)[0]]


def measure_network(num_ranks: int, seed: int, updates: int) -> Iterator[Row]:
    """Yield the rows of a network, each method with every learning rate."""
    network = Network(num_ranks)
    size = network.units * (64 + 1 + 10) + 10
    at = [10 * each for each in sample(updates // 10)]
    for method in (WHOLE, SUBNETS, LOCAL, COMPRESSED, EF21):
        for rate in RATES:
            *losses, accuracy = train(network, method, rate, seed, updates)
            yield {
                "task": "network", "ranks": num_ranks, "method": method, "seed": seed,
                "relative_step": "", "step_size": f"{rate:g}", "draws": 1, "updates": updates,
                "accuracy": f"{accuracy:.4f}", "loss": f"{losses[-1]:.4f}",
                **_costs(method, num_ranks, own=size // num_ranks, shared=10, size=size),
                **stamp(),
                "rounds": " ".join(map(str, at)),
                "loss_at": as_text(losses[each // 10] for each in at),
            }  # fmt: skip


def main() -> None:
    parser = make_parser("subnets.compare_gradients", __doc__, "subnets-gradients")
    parser.add_argument("--tasks", nargs="+", default=["quadratic", "network"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 10])
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--rounds", type=int, default=20000, help="updates on quadratics")
    parser.add_argument("--draws", type=int, default=3, help="of the permutations, on quadratics")
    parser.add_argument("--updates", type=int, default=1500, help="of the network")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def batches() -> Iterator[list[Row]]:
        for task in options.tasks:
            for num_ranks in options.ranks:
                for seed in options.seeds:
                    if task == "quadratic":
                        found = measure_quadratic(num_ranks, seed, options.rounds, options.draws)
                    else:
                        found = measure_network(num_ranks, seed, options.updates)
                    yield list(found)

    record(batches(), options.out, FIELDS, [*KEY, "step_size"])


if __name__ == "__main__":
    main()
