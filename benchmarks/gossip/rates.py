"""``python -m benchmarks.gossip.rates [--parts orders hybrids biased scaling]``.

Trains at several learning rates on gloo processes, one thread each, and writes a row for every run
that has none yet to ``benchmarks/results/gossip-rates.csv``:

* ``orders``: combine-while-adapt and the order of the paper's OSGP, with delays of 1, 2 and 4
  steps, on four ranks: five seeds at the best rate of all-reduce, and at each one's own, which is
  the best of ``RATES`` by two seeds;
* ``hybrids``: all-reduce or two peers in the first tenth, then one peer;
* ``biased``: OSGP on a star, with and without push-sum weights;
* ``scaling``: 1, 2, 4 and 8 ranks with the rate of one rank, or that times the number of ranks,
  with and without warm-up.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch

from benchmarks.gossip.table import ALL_REDUCE
from benchmarks.gossip.tasks import TASKS, Digits, columns_of
from benchmarks.gossip.tasks import train as train_task
from benchmarks.harness.program import make_parser
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import Key, Row, RunRows
from pyparallel.gossip import OSGP, SGP, Algorithm, AllReduce
from pyparallel.gossip.topology import Complete, OnePeerExponential, Phases, Star, Topology

FIELDS = [
    "part", "data", "algorithm", "ranks", "rate", "warm_up", "seed", "options", "steps", "measure",
    "score", "worst_rank", "consensus_distance", "step_bytes", "torch", "commit",
]  # fmt: skip
PARTS = ["orders", "hybrids", "biased", "scaling"]
RATES = [0.5, 1.0, 2.0, 4.0]  # of the task's own
NUM_STEPS = {"digits": 460, "text": 500}  # of four ranks
SEEDS = range(5)
SEARCHED, CONFIRMED = SEEDS[:2], SEEDS[2:]  # to find the best rate, and the others
SCALED_RATE = 0.4  # of the task's own, for one rank
WARM_UP = 4  # epochs of 20
SECONDS = 600  # a run's limit

Make = Callable[[int, int], Algorithm]  # from the numbers of ranks and steps


def sgp(num_ranks: int, num_steps: int, overlap: int = 0) -> Algorithm:
    return SGP(OnePeerExponential(num_ranks), overlap=overlap)


def osgp(num_ranks: int, num_steps: int, delay: int = 1) -> Algorithm:
    return OSGP(OnePeerExponential(num_ranks), delay)


def star(num_ranks: int, num_steps: int, *, biased: bool) -> Algorithm:
    return OSGP(Star(num_ranks), biased=biased)


def hybrid(
    dense: Callable[[int], Topology], num_ranks: int, num_steps: int, fraction: float = 0.1
) -> Algorithm:
    """Return SGP whose first steps, or last ones for a negative fraction, are denser."""
    first, rest = dense(num_ranks), OnePeerExponential(num_ranks)
    if fraction < 0:
        first, rest = rest, first
    return SGP(Phases([(first, int(fraction % 1 * num_steps)), (rest, None)]))


ORDERS: dict[str, Make] = {
    **{f"SGP, overlap={tau}": partial(sgp, overlap=tau) for tau in (1, 2, 4)},
    **{f"OSGP, delay={tau}": partial(osgp, delay=tau) for tau in (1, 2, 4)},
}
HYBRIDS: dict[str, Make] = {
    "all-reduce, then one peer": partial(hybrid, Complete),
    "two peers, then one": partial(hybrid, partial(OnePeerExponential, peers=2)),
    "all-reduce for a third, then one peer": partial(hybrid, Complete, fraction=1 / 3),
    "one peer, then all-reduce for a tenth": partial(hybrid, Complete, fraction=-0.1),
    "two peers": lambda n, steps: SGP(OnePeerExponential(n, peers=2)),
    "one peer": sgp,
}
BIASED: dict[str, Make] = {
    "OSGP on a star": partial(star, biased=False),
    "biased OSGP on a star": partial(star, biased=True),
}
MAKERS: dict[str, Make] = {
    ALL_REDUCE: lambda n, steps: AllReduce(),
    "SGP": sgp,
    **ORDERS,
    **HYBRIDS,
    **BIASED,
}


@dataclass(frozen=True)
class Run:
    """One training run; ``rate`` is a factor of the task's own, ``warm_up`` a number of epochs."""

    part: str
    data: str
    algorithm: str
    ranks: int = 4
    rate: float = 1.0
    warm_up: int = 0
    seed: int = 0

    @property
    def key(self) -> Key:
        return tuple(map(str, astuple(self)))

    @property
    def steps(self) -> int:
        """Steps that see as many samples as those of four ranks."""
        return NUM_STEPS[self.data] * 4 // self.ranks


def main() -> None:
    parser = make_parser("gossip.rates", __doc__, "gossip-rates")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    rows = RunRows(options.out, FIELDS, num_keys=7)
    for part in options.parts:
        for data in TASKS:
            rows.complete(runs_of(part, data, rows), perform)


def runs_of(part: str, data: str, rows: RunRows) -> Iterator[Run]:
    """Yield the runs of a part; rows of earlier ones must be written before the next is taken."""
    if part == "orders":
        yield from _orders(data, rows)
    elif part == "hybrids":
        yield from _orders(data, rows, [])
        rate = best_rate(rows, data, ALL_REDUCE)
        for seed in SEEDS:
            for name in HYBRIDS:
                yield Run(part, data, name, rate=rate, seed=seed)
    elif part == "biased":
        for seed in SEEDS:
            for name in BIASED:
                yield Run(part, data, name, seed=seed)
    elif data == "digits" and part == "scaling":
        for seed in range(3):
            yield Run(part, data, ALL_REDUCE, 1, SCALED_RATE, 0, seed)
            for ranks in (2, 4, 8):
                for name in (ALL_REDUCE, "SGP"):
                    for factor, warm_up in ((1, 0), (ranks, 0), (ranks, WARM_UP)):
                        yield Run(part, data, name, ranks, SCALED_RATE * factor, warm_up, seed)


def _orders(data: str, rows: RunRows, names: Sequence[str] = tuple(ORDERS)) -> Iterator[Run]:
    for name in (ALL_REDUCE, *names):
        for rate in RATES:
            for seed in SEARCHED:
                yield Run("orders", data, name, rate=rate, seed=seed)
    common = best_rate(rows, data, ALL_REDUCE)
    for seed in CONFIRMED:
        for name in (ALL_REDUCE, *names):
            for rate in {common, best_rate(rows, data, name)}:
                yield Run("orders", data, name, rate=rate, seed=seed)


def best_rate(rows: RunRows, data: str, algorithm: str) -> float:
    """Return the rate with the best mean score of the seeds that all rates have."""
    known, sign = rows.read(), 1 if data == "digits" else -1

    def mean_score(rate: float) -> float:
        runs = [Run("orders", data, algorithm, rate=rate, seed=each) for each in SEARCHED]
        return statistics.fmean(float(known[run.key]["score"]) for run in runs)

    return max(RATES, key=lambda rate: sign * mean_score(rate))


def perform(run: Run) -> Row:
    return columns_of(run.data, run_on_loopback(run.ranks, SECONDS, train, run))


def train(rank: int, run: Run) -> Row:
    """Train on this rank; a run that diverges has a score as well."""
    torch.manual_seed(run.seed)
    task = TASKS[run.data](run.seed, run.steps)
    if isinstance(task, Digits):
        task.warm_up = run.warm_up
    algorithm = MAKERS[run.algorithm](run.ranks, run.steps)
    return train_task(task, lambda: algorithm, run.rate, nonfinite="allow")


if __name__ == "__main__":
    main()
