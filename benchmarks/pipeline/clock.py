"""``python -m benchmarks.pipeline.clock [--updates 1000]``.

Held-out loss against seconds, on two gloo ranks that compute, one thread each: ``PipeOptim`` and
the fastest of torch's schedules, each with AdamW and with Muon for the matrices of the blocks, in
turns of 50 updates within one run. A byte transformer; every update is from 16 windows of 64 bytes:
one microbatch of ``PipeOptim``, four or eight of torch's schedules. The rates are those that
``benchmarks.pipeline.optimizers --stages 2`` has chosen, by one rule, for ``GPipe`` and
``PipeOptim``. Evaluations are not in the seconds; the flush of ``PipeOptim`` before each one is.

Rows go to ``benchmarks/results/pipeline-clock-<machine>.csv``.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.link import loopback
from benchmarks.harness.measure import RESULTS, commit, machine, write_rows
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline.optimizers import (
    IN_TWO,
    MAKERS,
    NO_CORRECTION,
    SEARCH_UPDATES,
    WARM_UP,
    Rows,
    Run,
    choose_rate,
)
from benchmarks.pipeline.systems.peers import PEERS, TorchSchedule
from pyparallel.pipeline import PipelineTrainer, PipeOptim

FIELDS = [
    "system", "optimizer", "microbatches", "rate", "seed", "updates", "seconds", "held_out_bits",
    "compute", "torch", "commit",
]  # fmt: skip
OURS = "PipeOptim"
NUM_RANKS = 2
MICROBATCHES = 4, 8  # of torch's schedules
PER_STEP = 5  # microbatches of ours, each with an update
NUM_PROBED = 20  # updates, to find torch's fastest schedule
TURN = 50  # updates


@dataclass(frozen=True)
class Entry:
    """A system with an optimizer.

    Args:
        schedule: of torch; None: ours.
        optimizer: a key of ``MAKERS``.
        rate: the highest of the schedule.
        microbatches: of an update.
    """

    schedule: TorchSchedule | None
    optimizer: str
    rate: float
    microbatches: int = 1

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return OURS if self.schedule is None else self.schedule.name


class Training(Protocol):
    """Protocol of the training of one entry on one rank."""

    def train(self, updates: int) -> None:
        """Train for a multiple of 5 updates, and flush."""

    def own_state(self) -> dict[str, Tensor]:
        """Return the parameters of this rank's layers, by their names in the whole model."""


class OurTraining(Training):
    """``PipelineTrainer`` with ``PipeOptim``."""

    def __init__(self, entry: Entry, updates: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._layers = IN_TWO.build()
        self._batches = IN_TWO.batches(seed)
        self._trainer = PipelineTrainer(
            self._layers,
            IN_TWO.loss,
            partial(MAKERS[entry.optimizer], lr=entry.rate),
            PipeOptim(),
            num_microbatches=PER_STEP,
            split=IN_TWO.split,
            scheduler_fn=partial(decayed, updates=updates),
        )

    @override
    def train(self, updates: int) -> None:
        for _ in range(updates // PER_STEP):
            inputs, target = map(torch.cat, zip(*islice(self._batches, PER_STEP), strict=True))
            self._trainer.step(inputs, target)
        self._trainer.flush()

    @override
    def own_state(self) -> dict[str, Tensor]:
        edges = [0, *IN_TWO.split, len(self._layers)]
        mine = (range(edges[stage.index], edges[stage.index + 1]) for stage in self._trainer.stages)
        return state_of(self._layers, [layer for layers in mine for layer in layers])


class TorchTraining(Training):
    """A schedule of ``torch.distributed.pipelining``."""

    def __init__(self, entry: Entry, updates: int, seed: int) -> None:
        assert entry.schedule is not None
        torch.manual_seed(seed)
        self._layers = IN_TWO.build()
        self._batches = IN_TWO.batches(seed)
        num_stages = NUM_RANKS * entry.schedule.stages_per_rank
        own = entry.schedule.stages(dist.get_rank(), NUM_RANKS)
        splits = {2: IN_TWO.split, 4: (2, 3, 4)}
        edges = list(pairwise([0, *splits[num_stages], len(self._layers)]))
        modules = [nn.Sequential(*self._layers[slice(*edge)]) for edge in edges]
        self._own = [layer for stage in own for layer in range(*edges[stage])]
        cpu = torch.device("cpu")
        stages = [PipelineStage(modules[each], each, num_stages, cpu) for each in own]
        kind = getattr(schedules, entry.schedule.schedule)
        held: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self._schedule = kind(held, entry.microbatches, loss_fn=IN_TWO.loss)
        parameters = [p for each in own for p in modules[each].parameters()]
        made = MAKERS[entry.optimizer](parameters, lr=entry.rate)
        self._optimizers: list[Optimizer] = made if isinstance(made, list) else [made]
        self._schedulers = [decayed(each, updates=updates) for each in self._optimizers]
        self._is_first, self._is_last = 0 in own, num_stages - 1 in own

    @override
    def train(self, updates: int) -> None:
        for inputs, target in islice(self._batches, updates):
            arguments = (inputs,) if self._is_first else ()
            self._schedule.step(
                *arguments, target=target if self._is_last else None, return_outputs=False
            )
            for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    @override
    def own_state(self) -> dict[str, Tensor]:
        return state_of(self._layers, self._own)


def decayed(optimizer: Optimizer, updates: int) -> LambdaLR:
    """Return the schedule of the rates, with warm-up and cosine decay."""
    return LambdaLR(optimizer, lambda update: rate_at(min(update, updates), updates, WARM_UP))


def state_of(layers: nn.Sequential, own: Sequence[int]) -> dict[str, Tensor]:
    """Return the parameters of some layers, by their names in the whole model."""
    return {
        f"{index}.{name}": value
        for index in own
        for name, value in layers[index].state_dict().items()
    }


def start(entry: Entry, updates: int, seed: int) -> Training:
    """Start the training of an entry on this rank."""
    kind = OurTraining if entry.schedule is None else TorchTraining
    return kind(entry, updates, seed)


def find_fastest(rank: int, candidates: Sequence[Entry]) -> list[float]:
    """Return the seconds of each candidate on the slowest rank, the least of three turns."""
    trainings = [start(each, NUM_PROBED, 0) for each in candidates]
    least = torch.full((len(candidates),), float("inf"), dtype=torch.float64)
    for _ in range(3):
        for index, training in enumerate(trainings):
            least[index] = min(float(least[index]), timed(training, NUM_PROBED))
    dist.all_reduce(least, dist.ReduceOp.MAX)
    return least.tolist()


def timed(training: Training, updates: int) -> float:
    """Return the seconds of updates."""
    dist.barrier()
    begin = time.perf_counter()
    training.train(updates)
    return time.perf_counter() - begin


def race(rank: int, entries: Sequence[Entry], updates: int, seed: int) -> list[list[tuple]]:
    """Return (updates, seconds on the slowest rank, held-out bits) after each turn, by entry."""
    trainings = [start(each, updates, seed) for each in entries]
    whole = IN_TWO.build()
    seconds = torch.zeros(len(entries), dtype=torch.float64)
    order = random.Random(0)  # the same on all ranks
    points: list[list[tuple]] = [
        [(0, 0.0, evaluate(rank, training, whole))] for training in trainings
    ]
    for done in range(TURN, updates + 1, TURN):
        for index in order.sample(range(len(entries)), len(entries)):
            taken = torch.tensor(timed(trainings[index], TURN), dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[index] += taken
            bits = evaluate(rank, trainings[index], whole)
            points[index].append((done, float(seconds[index]), bits))
    return points


@torch.no_grad()
def evaluate(rank: int, training: Training, whole: nn.Sequential) -> float:
    """Return the held-out bits per byte on rank 0, after gathering the model there; else nan."""
    states: list[Any] | None = [None] * NUM_RANKS if rank == 0 else None
    dist.gather_object(training.own_state(), states)
    if states is None:
        return float("nan")
    whole.load_state_dict({name: each for state in states for name, each in state.items()})
    inputs, target = IN_TWO.held_out()
    return IN_TWO.units_per_nat * float(IN_TWO.loss(whole(inputs), target))


def rows_of(entries: Sequence[Entry], points: Sequence[Sequence[tuple]], seed: int) -> Iterator:
    """Yield a row for each evaluation."""
    shape = f"{IN_TWO.num_layers} blocks of width {IN_TWO.width}"
    compute = f"byte transformer, {shape}, {IN_TWO.batch_size} x {IN_TWO.context} bytes an update"
    for entry, of_entry in zip(entries, points, strict=True):
        for updates, seconds, bits in of_entry:
            yield {
                "system": entry.name,
                "optimizer": entry.optimizer,
                "microbatches": entry.microbatches,
                "rate": f"{entry.rate:g}",
                "seed": seed,
                "updates": updates,
                "seconds": f"{seconds:.3f}",
                "held_out_bits": f"{bits:.5f}",
                "compute": f"{compute}, {NUM_RANKS} ranks, 1 thread each",
                "torch": torch.__version__,
                "commit": commit(),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--updates", type=int, default=1000, help="a multiple of 50")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=Path, default=RESULTS / "pipeline-optimizers.csv")
    parser.add_argument("--out", type=Path, help="another CSV file")
    options = parser.parse_args()
    rows = Rows(options.rates)
    rates = {
        (schedule, optimizer): choose_rate(
            rows, Run(2, optimizer, schedule, NO_CORRECTION, 0.0, SEARCH_UPDATES)
        )
        for schedule in ("GPipe", OURS)
        for optimizer in MAKERS
    }
    candidates = [Entry(peer, "adamw", 1e-3, count) for peer in PEERS for count in MICROBATCHES]
    with loopback() as place:
        found = run_ranks(NUM_RANKS, place, 300, find_fastest, candidates)[0]
    for candidate, seconds in zip(candidates, found, strict=True):
        print(f"{candidate.name}, {candidate.microbatches}: {seconds / NUM_PROBED * 1e3:.1f} ms")
    fastest = candidates[min(range(len(found)), key=found.__getitem__)]
    entries = [
        *(Entry(None, each, rates[OURS, each]) for each in MAKERS),
        *(replace(fastest, optimizer=each, rate=rates["GPipe", each]) for each in MAKERS),
    ]
    measured = []
    for seed in options.seeds:
        with loopback() as place:
            points = run_ranks(NUM_RANKS, place, 1800, race, entries, options.updates, seed)[0]
        measured += list(rows_of(entries, points, seed))
    path = options.out or RESULTS / f"pipeline-clock-{machine()}.csv"
    write_rows(measured, path, FIELDS, ["system"])
    for row in measured:
        if row["updates"] == options.updates:
            print(*(row[name] for name in FIELDS[:8]))
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
