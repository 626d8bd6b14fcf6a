"""``python -m benchmarks.subnets.compare [--tasks digits bytes] [--seeds 0 1 2] [--updates 300]``.

Four gloo processes on the CPU, one thread each, each behind a link of limited rate (network
namespaces, which need root), train for the same time: DistributedDataParallel, with torch's hook
for bfloat16 too, LocalSGD and SubnetTrainer. Ranks have disjoint parts of the data. Evaluations,
which do not count as time, record the full model's score over seconds and bytes.

A row for each method and seed is written to ``benchmarks/results/subnets-<machine>.csv``, replacing
the previous one, and the tables of all rows are printed. ``python -m benchmarks.subnets.picture
FILE.csv`` draws them. ``--dry-run`` runs a little of everything on the loopback, as a test.

With ``--updates`` all methods take so many steps on the loopback, and rows go to
``subnets-updates.csv``: DDP on bytes, and subnets of which each unit has 1, 2 or 4 ranks. Bytes
sent are then those of all processes that use the loopback.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.link import LOOPBACK, Rendezvous, limited_links, loopback, read_sent
from benchmarks.harness.program import make_parser, prepare_for_ranks
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import RESULTS, Key, Row, RunRows, machine, read_rows
from benchmarks.harness.turns import largest
from benchmarks.subnets.methods import BYTES, COPIES, DIGITS, Entry, MakeOptimizer, Method, Training
from benchmarks.subnets.table import markdown
from benchmarks.subnets.tasks import Batch, Bytes, Digits, Task
from pyparallel.subnets import recalibrate

RANKS = 4
FIELDS = [
    "task", "method", "seed", "options", "ranks", "link", "measure", "score", "seconds", "steps",
    "sent_bytes_of_rank", "sent_bytes_of_all", "held_bytes_of_rank", "torch", "commit",
    "at_seconds", "at_steps", "at_sent_bytes_of_rank", "at_score",
]  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """How long a run trains: seconds, of which evaluations are none, or updates."""

    amount: float
    every: float  # between two evaluations, fewer at first
    in_updates: bool = False


@dataclass(frozen=True)
class Point:
    """One evaluation, on one rank."""

    seconds: float  # seconds of training so far, the same on all ranks
    steps: int
    sent: int  # bytes sent over this rank's link so far, including headers
    score: float  # score of the full model, on rank 0; 0 elsewhere


@dataclass(frozen=True)
class Run:
    """The result of one rank."""

    points: list[Point]
    held_bytes: int  # weights, running statistics and optimizer state between two steps, at the end


def race(
    rank: int,
    task: Task,
    method: Method,
    make_optimizer: MakeOptimizer,
    seed: int,
    budget: Budget,
) -> Run:
    """Train with a method until the time is over; all ranks take equally many steps."""
    torch.manual_seed(seed)
    training = method.start(task, make_optimizer)
    batches = task.batches(seed)
    points = [Point(0.0, 0, 0, score_of(task, training))]
    due = 1
    while due:
        elapsed, sent = advance(task, training, batches, due)
        last = points[-1]
        seconds, steps = last.seconds + elapsed, last.steps + due
        points.append(Point(seconds, steps, last.sent + sent, score_of(task, training)))
        spent, total = (due, steps) if budget.in_updates else (elapsed, seconds)
        due = steps_due(due, spent, budget.amount - total, budget.every)
    return Run(points, count_bytes(training.held()))


def steps_due(done: int, elapsed: float, left: float, every: float) -> int:
    """Return the steps until the next evaluation: at most three times as many; 0 at the end.

    Args:
        done: steps since the last evaluation.
        elapsed: seconds that they took, or their number where the budget is one of updates.
        left: of the budget.
        every: of the budget.
    """
    per_step = elapsed / done
    last = round(left / per_step)
    if left < 0.01 * every or last < 1:
        return 0
    return min(last, max(1, min(3 * done, round(every / per_step))))


def advance(
    task: Task, training: Training, batches: Iterator[Batch], steps: int
) -> tuple[float, int]:
    """Take this many steps; return the slowest rank's seconds and this rank's bytes sent."""
    dist.barrier()
    before, begin = read_sent(), time.perf_counter()
    for _ in range(steps):
        inputs, target = next(batches)
        training.optimizer.zero_grad()
        task.loss(training.forward(inputs), target).backward()
        training.optimizer.step()
    elapsed, sent = time.perf_counter() - begin, read_sent() - before
    return largest([elapsed])[0], sent


@torch.no_grad()
def score_of(task: Task, training: Training) -> float:
    """Return the score of the full model with recalibrated running statistics."""
    with training.full_model() as module:
        recalibrate(module, task.calibration())
        was_training = module.training
        module.eval()
        score = task.score(module) if dist.get_rank() == 0 else 0.0
        module.train(was_training)
    return score


def count_bytes(held: Any) -> int:
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        held = list(held.values())
    return sum(map(count_bytes, held)) if isinstance(held, list | tuple) else 0


class Sizes:
    """The extent of the measurements."""

    entries: Sequence[Entry] = (*DIGITS, *BYTES)
    budget = Budget(30.0, every=3.0)
    link_name = "100 Mbit/s"

    def link(self) -> AbstractContextManager[Rendezvous]:
        return limited_links(RANKS, 100)


TINY = {"digits": Digits(width=16), "bytes": Bytes(width=16, context=8)}


class Dry(Sizes):
    """That of a dry run, on the loopback."""

    entries = tuple(replace(each, task=TINY[each.task.name]) for each in Sizes.entries)
    budget = Budget(0.1, every=0.1)
    link_name = LOOPBACK

    def link(self) -> AbstractContextManager[Rendezvous]:
        return loopback()


class Updates(Sizes):
    """That of so many updates, on the loopback."""

    entries = COPIES
    link_name = LOOPBACK

    def __init__(self, updates: int) -> None:
        self.budget = Budget(updates, every=updates / 12, in_updates=True)

    def link(self) -> AbstractContextManager[Rendezvous]:
        return loopback()


def main() -> None:
    parser = make_parser("subnets.compare", __doc__)
    parser.add_argument("--updates", type=int, help="so many instead of 30 s, on the loopback")
    parser.add_argument("--tasks", nargs="*", default=["digits", "bytes"], help="none: print only")
    parser.add_argument("--methods", nargs="+", help="only these, by name")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    prepare_for_ranks()
    name = "updates" if options.updates else machine()
    rows = RunRows(options.out or RESULTS / f"subnets-{name}.csv", FIELDS, num_keys=3)
    sizes = Dry() if options.dry_run else Updates(options.updates) if options.updates else Sizes()
    for seed in options.seeds:
        for entry in sizes.entries:
            name = entry.method.name
            if entry.task.name in options.tasks and name in (options.methods or [name]):
                key: Key = (entry.task.name, name, str(seed))
                row = rows.add(key, measure(entry, seed, sizes))
                found = f"{row['measure']} {row['score']} after {row['seconds']} s"
                print(f"{', '.join(key)}: {found}, {row['steps']} steps", flush=True)
    print(f"\n{markdown(read_rows(rows.path))}\nrows: {rows.path}")


def measure(entry: Entry, seed: int, sizes: Sizes) -> Row:
    limit = 120 + 4 * sizes.budget.amount
    arguments = (entry.task, entry.method, entry.make_optimizer, seed, sizes.budget)
    with sizes.link() as place:
        runs: list[Run] = run_ranks(RANKS, place, limit, race, *arguments)
    points = runs[0].points
    of_ranks = ([point.sent for point in run.points] for run in runs)
    sent = list(map(statistics.fmean, zip(*of_ranks, strict=True)))
    return {
        "options": entry.options,
        "ranks": str(len(runs)),
        "link": sizes.link_name,
        "measure": entry.task.measure,
        "score": f"{points[-1].score:.5f}",
        "seconds": f"{points[-1].seconds:.2f}",
        "steps": str(points[-1].steps),
        "sent_bytes_of_rank": f"{sent[-1]:.0f}",
        "sent_bytes_of_all": str(sum(run.points[-1].sent for run in runs)),
        "held_bytes_of_rank": str(max(run.held_bytes for run in runs)),
        "at_seconds": " ".join(f"{point.seconds:.2f}" for point in points),
        "at_steps": " ".join(str(point.steps) for point in points),
        "at_sent_bytes_of_rank": " ".join(f"{num_bytes:.0f}" for num_bytes in sent),
        "at_score": " ".join(f"{point.score:.5f}" for point in points),
    }


if __name__ == "__main__":
    main()
