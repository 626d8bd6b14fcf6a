"""``python -m benchmarks.pipeline.clock``.

Held-out loss after equal seconds, on two gloo ranks that compute, one thread each: ``PipeOptim``
and the fastest of torch's schedules, each with AdamW and with Muon for the matrices of the blocks,
in turns within one run. Torch's trains for 1,000 updates, 50 in a turn; ``PipeOptim``, with the
same optimizer, for as many as it does in that time by a measurement before the race, and its
learning rate warms up and decays over those. A byte transformer; every update is from 16 windows of
64 bytes: one microbatch of ``PipeOptim``, four or eight of torch's schedules. The rates are those
that ``benchmarks.pipeline.optimizers`` has chosen for two stages, by one rule, for ``GPipe`` and
``PipeOptim``. Evaluations are not in the seconds; the flush of ``PipeOptim`` before each one is.

Rows go to ``benchmarks/results/pipeline-clock-<machine>.csv``.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.program import make_parser
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, machine, record, stamp
from benchmarks.harness.turns import largest, take_turns, timed
from benchmarks.pipeline import optimizers, table
from benchmarks.pipeline.optimizers import IN_TWO, MAKERS, NO_CORRECTION, WARM_UP
from benchmarks.pipeline.systems.peers import PEERS, TorchSchedule, TorchTraining
from pyparallel.pipeline import PipelineTrainer, PipeOptim

FIELDS = [
    "system", "optimizer", "microbatches", "rate", "seed", "updates", "seconds", "held_out_bits",
    "compute", "torch", "commit",
]  # fmt: skip
OURS = "PipeOptim"
NUM_RANKS = 2
MICROBATCHES = 4, 8  # of torch's schedules
PER_STEP = 5  # microbatches of ours, each with an update
NUM_PROBED = 20  # updates, to find torch's fastest schedule and the length of our turn
UPDATES, TURN = 1000, 50  # of torch's schedules, in all and in a turn
SEEDS = range(3)


@dataclass(frozen=True)
class Entry:
    """A system with an optimizer."""

    schedule: TorchSchedule | None  # of torch; None: ours
    optimizer: str  # a key of ``MAKERS``
    rate: float  # the highest of the schedule
    microbatches: int = 1
    turn: int = TURN  # updates

    @property
    def name(self) -> str:
        return OURS if self.schedule is None else self.schedule.name


@dataclass
class Training:
    """The training of one entry on one rank."""

    train: Callable[[int], None]  # trains for a number of updates, a multiple of 5, and flushes
    layers: nn.Sequential  # the whole model, equal on all ranks when training begins
    own: list[int]  # those of this rank


def start(entry: Entry, updates: int, seed: int) -> Training:
    torch.manual_seed(seed)
    layers, batches = IN_TWO.build(), IN_TWO.batches(seed)
    rates = partial(decayed, steps=updates, warm_up=WARM_UP)
    make_optimizers = partial(MAKERS[entry.optimizer], lr=entry.rate)
    splits = IN_TWO.split
    if entry.schedule is not None:
        splits = {2: splits, 4: (2, 3, 4)}[NUM_RANKS * entry.schedule.stages_per_rank]
    edges = list(pairwise([0, *splits, len(layers)]))
    if entry.schedule is None:
        trainer = PipelineTrainer(
            layers, IN_TWO.loss, make_optimizers, PipeOptim(), num_microbatches=PER_STEP,
            split=splits, scheduler_fn=rates,
        )  # fmt: skip
        stages = [stage.index for stage in trainer.stages]

        def train(updates: int) -> None:
            for _ in range(updates // PER_STEP):
                inputs, target = map(torch.cat, zip(*islice(batches, PER_STEP), strict=True))
                trainer.step(inputs, target)
            trainer.flush()

    else:

        def optimizers_of(modules: Sequence[nn.Module]) -> list[Optimizer]:
            made = make_optimizers([p for module in modules for p in module.parameters()])
            return made if isinstance(made, list) else [made]

        modules = [nn.Sequential(*layers[slice(*edge)]) for edge in edges]
        training = TorchTraining(
            entry.schedule, modules, IN_TWO.loss, entry.microbatches, optimizers_of
        )
        stages, schedulers = training.own, list(map(rates, training.optimizers))

        def train(updates: int) -> None:
            for batch in islice(batches, updates):
                training.batch = batch
                training.step()
                for scheduler in schedulers:
                    scheduler.step()

    return Training(train, layers, [layer for each in stages for layer in range(*edges[each])])


def measure(rank: int, candidates: Sequence[Entry]) -> list[float]:
    """Return the seconds of an update of each on the slowest rank, the median of five turns."""
    runs = {
        place: partial(timed, start(each, NUM_PROBED, 0).train, NUM_PROBED)
        for place, each in enumerate(candidates)
    }
    seconds = take_turns(runs, turns=5, warm_up=1, before=dist.barrier)
    return largest([statistics.median(times) / NUM_PROBED for times in seconds.values()])


def race(rank: int, entries: Sequence[Entry], turns: int, seed: int) -> list[list[tuple]]:
    """Return (updates, seconds on the slowest rank, held-out bits) after each turn, by entry."""
    trainings = [start(each, turns * each.turn, seed) for each in entries]
    whole = IN_TWO.build()
    points: list[list[tuple]] = [
        [(0, 0.0, evaluate(rank, training, whole))] for training in trainings
    ]

    def run(place: int) -> None:
        turn, training, of_entry = entries[place].turn, trainings[place], points[place]
        done, seconds, _ = of_entry[-1]
        (taken,) = largest([timed(training.train, turn)])
        of_entry.append((done + turn, seconds + taken, evaluate(rank, training, whole)))

    runs = {place: partial(run, place) for place in range(len(entries))}
    take_turns(runs, turns, warm_up=0, before=dist.barrier)
    return points


@torch.no_grad()
def evaluate(rank: int, training: Training, whole: nn.Sequential) -> float:
    """Return the held-out bits per byte on rank 0, after gathering the model there; else nan."""
    states: list[Any] | None = [None] * NUM_RANKS if rank == 0 else None
    own = {
        f"{index}.{name}": value  # by its name in the whole model
        for index in training.own
        for name, value in training.layers[index].state_dict().items()
    }
    dist.gather_object(own, states)
    if states is None:
        return float("nan")
    whole.load_state_dict({name: each for state in states for name, each in state.items()})
    inputs, target = IN_TWO.held_out()
    return IN_TWO.units_per_nat * float(IN_TWO.loss(whole(inputs), target))


def rows_of(
    entries: Sequence[Entry], points: Sequence[Sequence[tuple]], seed: int
) -> Iterator[Row]:
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
                **stamp(),
            }


def main() -> None:
    options = make_parser("pipeline.clock", __doc__, f"pipeline-clock-{machine()}").parse_args()
    rows = optimizers.Rows(RESULTS / "pipeline-optimizers.csv")
    contestants = [(schedule, NO_CORRECTION) for schedule in ("GPipe", OURS)]
    chosen = {each: optimizers.search(rows, 2, each, contestants) for each in MAKERS}
    rates = {
        (schedule, optimizer): rate
        for optimizer, of_schedules in chosen.items()
        for (schedule, _), (rate, _) in of_schedules.items()
    }
    candidates = [Entry(peer, "adamw", 1e-3, count) for peer in PEERS for count in MICROBATCHES]
    found = run_on_loopback(NUM_RANKS, 300, measure, candidates)[0]
    for candidate, seconds in zip(candidates, found, strict=True):
        print(f"{candidate.name}, {candidate.microbatches}: {seconds * 1e3:.1f} ms")
    fastest = candidates[min(range(len(found)), key=found.__getitem__)]
    ours = [Entry(None, each, rates[OURS, each]) for each in MAKERS]
    theirs = [replace(fastest, optimizer=each, rate=rates["GPipe", each]) for each in MAKERS]
    seconds = run_on_loopback(NUM_RANKS, 300, measure, [*ours, *theirs])[0]
    for place, entry in enumerate(ours):
        steps = TURN * seconds[len(ours) + place] / seconds[place] / PER_STEP
        ours[place] = replace(entry, turn=PER_STEP * round(steps))
    entries = [*ours, *theirs]

    def race_of(seed: int) -> list[Row]:
        points = run_on_loopback(NUM_RANKS, 1800, race, entries, UPDATES // TURN, seed)[0]
        return list(rows_of(entries, points, seed))

    print(table.race(record(map(race_of, SEEDS), options.out, FIELDS)))


if __name__ == "__main__":
    main()
