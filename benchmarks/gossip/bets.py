"""``python -m benchmarks.gossip.bets [predict] [check] [--ranks 2 4] [--dry-run]``.

Bets of the simulator on real runs of gloo processes. ``predict`` measures a profile (computing, the
link, encoding, and what 20 steps of the algorithm take beside these and waiting), one for all
stragglers, and writes the seconds a step that the simulator predicts from it; ``check`` trains, and
writes what a step took beside that. So predictions may be committed before the runs that check
them. Links of limited rate are network namespaces, which need root. Rows:
``benchmarks/results/bets.csv``.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gossip.models import Compute, RealCompute, SleepingCompute
from benchmarks.gossip.trainers import ALONE, Method, Training, by_gossip
from benchmarks.harness.link import LOOPBACK, Rendezvous, limited_links, loopback
from benchmarks.harness.program import make_parser, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import Key, Row, RunRows, read_rows
from benchmarks.harness.turns import largest, timed
from pyparallel.compression import BufferLayout, Compressor, Int8
from pyparallel.gossip import DPSGD, OSGP, SGP, Algorithm, AllReduce, LocalSGD, NoLoCo, SlowMo
from pyparallel.gossip.topology import Ring
from pyparallel.planning.simulate import Links, Profile, Stragglers, simulate_run

FIELDS = [
    "ranks", "link", "compute", "stragglers", "algorithm", "predicted_ms", "measured_ms", "error",
    "predicted_waiting_ms", "measured_waiting_ms", "computing_ms", "stepping_ms", "encoding_ms",
    "rate_mbit", "latency_ms", "torch", "commit",
]  # fmt: skip
NUM_KEYS = 5
SECONDS = 600  # a run's limit
SEED, OTHER_SEED = 0, 1  # of the stragglers predicted, and of those that come

ALGORITHMS: dict[str, Algorithm] = {
    "AllReduce": AllReduce(),
    "SGP": SGP(),
    "SGP, overlap=1": SGP(overlap=1),
    "SGP, overlap=2": SGP(overlap=2),
    "SGP, int8": SGP(compressor=Int8()),
    "OSGP": OSGP(),
    "DPSGD, ring": DPSGD(Ring),
    "LocalSGD(4)": LocalSGD(4),
    "LocalSGD(4, delay=2)": LocalSGD(4, delay=2),
    "NoLoCo(4)": NoLoCo(interval=4),
    "SlowMo(SGP, 4)": SlowMo(SGP(), 4),
}
COMPUTES: dict[str, Compute] = {
    "sleep 100 ms": SleepingCompute(10, 1024, 0.1),
    "real": RealCompute(10, 1024, 64),
}
DRY: dict[str, Compute] = {
    "sleep 100 ms": SleepingCompute(2, 64, 0.01),
    "real": RealCompute(2, 64, 8),
}
LINKS = [LOOPBACK, "1000 Mbit/s", "500 Mbit/s"]
STRAGGLERS = ["none", "lognormal:0.3", "slow:0=2"]


@dataclass(frozen=True)
class Bet:
    """One run, predicted and then performed."""

    ranks: int
    link: str
    compute: str
    stragglers: str
    algorithm: str
    is_dry: bool = False

    @property
    def key(self) -> Key:
        return str(self.ranks), self.link, self.compute, self.stragglers, self.algorithm

    @property
    def steps(self) -> int:
        return 8 if self.is_dry else 24

    @property
    def model(self) -> Compute:
        return (DRY if self.is_dry else COMPUTES)[self.compute]

    @property
    def law(self) -> Stragglers:
        return Stragglers.parse("" if self.stragglers == "none" else self.stragglers)

    def connect(self) -> AbstractContextManager[Rendezvous]:
        if self.link == LOOPBACK:
            return loopback()
        return limited_links(self.ranks, int(self.link.split()[0]))


def measure_profile(rank: int, bet: Bet) -> tuple[Profile, float]:
    """Return the profile, its times those of the mean rank, and the bytes of the model."""
    training = Training(bet.model, ALONE)
    training.step()
    alone = mean_over_ranks(repeated(training.step, 2 if bet.is_dry else 10))
    parameters = list(bet.model.build().parameters())
    flat = torch.zeros(sum(each.numel() for each in parameters))
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    stepping = mean_over_ranks(repeated(optimizer.step, 3))
    algorithm = ALGORITHMS[bet.algorithm]
    # What real steps take beside computing and waiting: the trainer's passes, merges and copies.
    taken = Training(bet.model, Method(bet.algorithm, by_gossip(algorithm)))
    own = []
    for _ in range(2 + (4 if bet.is_dry else 20)):
        own.append(timed(taken.step) - taken.waiting_seconds())
    taken.finish()
    beside = mean_over_ranks(statistics.fmean(own[2:])) - alone
    encoding, compressor = 0.0, getattr(algorithm, "compressor", None)
    if compressor is not None:
        encoding = mean_over_ranks(repeated(coding_of(compressor, flat), 3))
    whole, latency = (mean_over_ranks(repeated(shift(numel), 5)) for numel in (flat.numel(), 1))
    rate = 4 * flat.numel() / max(whole - latency, 1e-9)
    computing, stepping = max(alone - stepping, 0.0), max(stepping + beside - encoding, 0.0)
    profile = Profile(computing, 1 / 3, encoding, stepping, rate, latency)
    return profile, 4.0 * flat.numel()


def repeated(function: Callable[[], object], count: int) -> float:
    """Return the median seconds of a call, which all ranks begin together."""
    times = []
    for _ in range(count + 1):  # the first warms up
        dist.barrier()
        times.append(timed(function))
    return statistics.median(times[1:])


def coding_of(compressor: Compressor, x: Tensor) -> Callable[[], object]:
    layout = BufferLayout.flat(x.numel())
    state, out = compressor.init(layout, x.device), torch.zeros_like(x)

    def code() -> None:
        compressor.decompress(compressor.compress(x, state), layout, out)

    return code


def shift(numel: int) -> Callable[[], None]:
    """Return a function that sends to the next rank and receives from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(numel), torch.zeros(numel)

    def send() -> None:
        # As trainers do. The other way about, two ranks may send one after the other.
        works = [dist.irecv(received, (rank - 1) % size), dist.isend(sent, (rank + 1) % size)]
        for work in filter(None, works):
            work.wait()

    return send


def mean_over_ranks(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@cache
def profile_of(bet: Bet) -> tuple[Profile, float]:
    with bet.connect() as place:
        profile, num_bytes = run_ranks(bet.ranks, place, SECONDS, measure_profile, bet)[0]
    return profile, num_bytes


def predict(bet: Bet) -> Row:
    profile, num_bytes = profile_of(replace(bet, stragglers="none"))  # whatever stragglers come
    assert profile.rate is not None
    assert profile.latency is not None
    links = Links.uniform(profile.rate, profile.latency, "ring")
    algorithm = ALGORITHMS[bet.algorithm]
    run = simulate_run(
        algorithm, bet.ranks, links, profile, num_bytes,
        num_steps=10 * bet.steps, stragglers=bet.law, seed=SEED,
    )  # fmt: skip
    parts = {"predicted": run.seconds, "predicted_waiting": run.waiting, "latency": profile.latency}
    parts |= {name: getattr(profile, name) for name in ("computing", "stepping", "encoding")}
    rate = {"rate_mbit": f"{profile.rate * 8e-6:.0f}"}
    return {f"{name}_ms": f"{1e3 * value:.3f}" for name, value in parts.items()} | rate


def train(rank: int, bet: Bet) -> tuple[float, float]:
    """Return the seconds of a step and those of them that this rank waits, means over ranks."""
    method = Method(bet.algorithm, by_gossip(ALGORITHMS[bet.algorithm]))
    training = Training(bet.model, method)
    base = largest([repeated(Training(bet.model, ALONE).step, 3)])[0]
    added = [bet.law.draw(factors_of(bet), OTHER_SEED, step)[rank] - 1 for step in range(bet.steps)]
    for _ in range(2):  # connects, and warms up
        training.step()
    dist.barrier()
    waited, begin = 0.0, time.perf_counter()
    for slower in added:
        time.sleep(max(0.0, slower * base))
        training.step()
        waited += training.waiting_seconds()
    training.finish()
    seconds = (time.perf_counter() - begin) / bet.steps
    return mean_over_ranks(seconds), mean_over_ranks(waited / bet.steps)


def factors_of(bet: Bet) -> np.ndarray:
    factors = np.ones(bet.ranks)
    for rank, factor in bet.law.slow.items():
        factors[rank] *= factor
    return factors


def check(bet: Bet, row: Row) -> Row:
    with bet.connect() as place:
        seconds, waited = run_ranks(bet.ranks, place, SECONDS, train, bet)[0]
    error = float(row["predicted_ms"]) / (1e3 * seconds) - 1
    return row | {
        "measured_ms": f"{1e3 * seconds:.3f}",
        "measured_waiting_ms": f"{1e3 * waited:.3f}",
        "error": f"{error:.4f}",
    }


def find_bets(ranks: Sequence[int], is_dry: bool, **chosen: Sequence[str]) -> Iterator[Bet]:
    names = ("links", "computes", "stragglers", "algorithms")
    for each in product(ranks, *(chosen[name] for name in names)):
        yield Bet(*each, is_dry)


def summarize(rows: Sequence[Row]) -> str:
    errors = [abs(float(row["error"])) for row in rows if row["error"]]
    if not errors:
        return f"{len(rows)} predictions, none of them checked"
    median, most = np.quantile(errors, (0.5, 0.9))
    return f"{len(errors)} runs: error of seconds a step {median:.1%} median, {most:.1%} at 90 %"


if __name__ == "__main__":
    prepare_for_ranks()
    parser = make_parser("gossip.bets", __doc__, "bets")
    parser.add_argument("what", nargs="*", choices=["predict", "check", []], default=[])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, as a test")
    choices = {"links": LINKS, "computes": list(COMPUTES), "stragglers": STRAGGLERS}
    for name, values in (choices | {"algorithms": list(ALGORITHMS)}).items():
        parser.add_argument(f"--{name}", nargs="*", choices=values, default=values)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = RunRows(options.out, FIELDS, NUM_KEYS)
    chosen = {name: getattr(options, name) for name in (*choices, "algorithms")}
    bets = list(find_bets(options.ranks, options.dry_run, **chosen))
    if not options.what or "predict" in options.what:
        rows.complete(bets, predict)
    if not options.what or "check" in options.what:
        for bet in bets:
            known = rows.read()
            if bet.key in known and not known[bet.key]["error"]:
                print("check", *bet.key, file=sys.stderr, flush=True)
                rows.add(bet.key, check(bet, known[bet.key]))
    print(summarize(read_rows(options.out)))
