"""``python -m benchmarks.pipeline.bench [--parts throughput prediction bubbles] [--dry-run]``.

Gloo processes on the CPU, one thread each, all systems in turns within one run, each with AdamW on
all stages:

* ``throughput``: tokens per second of a byte model on two ranks, with our schedules and those of
  ``torch.distributed.pipelining``, relative to computing without waiting; and the peak number of
  weight copies of a stage.
* ``prediction``: the cost of weight prediction in PipeOptim.
* ``bubbles``: deeper pipelines whose stages sleep instead of computing: the idle time of ranks,
  measured and simulated.

Rows go to ``benchmarks/results/pipeline-<machine>.csv``, replacing those of the parts that were
measured. ``python -m benchmarks.pipeline.picture FILE.csv`` draws them. ``--dry-run`` runs a
small version of all parts, as a test.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.link import loopback
from benchmarks.harness.measure import summary
from benchmarks.harness.program import Row, make_parser, measure
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline import bubbles, prediction, throughput
from benchmarks.pipeline.limit import Limit
from benchmarks.pipeline.models import FOR_TWO_CORES, ByteModel, SleepingModel
from benchmarks.pipeline.ours import OURS
from benchmarks.pipeline.peers import DEEP_PEERS, PEERS
from benchmarks.pipeline.turns import Plan

FIELDS = [
    "part", "case", "compute", "system", "ranks", "microbatches", "median_ms", "p20_ms", "p80_ms",
    "tokens_per_s", "of_limit", "ratio", "ratio_is", "bubble", "bubble_on_paper", "weight_copies",
    "torch", "commit",
]  # fmt: skip


@dataclass(frozen=True)
class Deep:
    """A pipeline of stages that sleep."""

    ranks: int
    microbatches: int


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Args:
        microbatches: per step, in the part ``throughput``.
        updates: of each kind, in the part ``prediction``.
        forward: seconds that a rank sleeps in the forward of a microbatch; twice that backward.
    """

    model: ByteModel
    microbatches: Sequence[int]
    throughput: Plan
    updates: int
    forward: float
    deep: Sequence[Deep]
    bubble_turns: int


RANKS = 2  # one core each
FULL = Sizes(
    model=FOR_TWO_CORES,
    microbatches=(RANKS, 2 * RANKS, 4 * RANKS),
    throughput=Plan(turns=6, microbatches=8),
    updates=40,
    forward=0.02,
    deep=(Deep(4, 8), Deep(8, 16)),
    bubble_turns=3,
)
DRY = Sizes(
    model=ByteModel(width=48, num_blocks=4, num_heads=2, microbatch=1, length=8),
    microbatches=(RANKS,),
    throughput=Plan(turns=1, microbatches=2),
    updates=4,
    forward=0.002,
    deep=(Deep(3, 6),),
    bubble_turns=1,
)


def bench_throughput(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure with few to many microbatches per step."""
    for num_microbatches in sizes.microbatches:
        arguments = (sizes.model, [*OURS, *PEERS], num_microbatches, sizes.throughput)
        with loopback() as place:
            speeds = run_ranks(RANKS, place, 300, throughput.measure, *arguments)[0]
        yield rows_of_throughput(speeds, sizes.model, num_microbatches)


def rows_of_throughput(
    speeds: Mapping[str, throughput.Speed], model: ByteModel, num_microbatches: int
) -> list[Row]:
    """Return a row per system, relative to the best of torch's and to the limit."""
    medians = {name: statistics.median(speed.seconds) for name, speed in speeds.items()}
    peer = min((system.name for system in PEERS), key=medians.__getitem__)
    return [
        {
            **summary(speed.seconds),
            "part": "throughput",
            "case": f"M = {num_microbatches}",
            "compute": model.name,
            "system": name,
            "ranks": RANKS,
            "microbatches": num_microbatches,
            "tokens_per_s": f"{model.tokens / medians[name]:.0f}",
            "of_limit": f"{medians[Limit.name] / medians[name]:.3f}",
            "ratio": f"{medians[peer] / medians[name]:.3f}",
            "ratio_is": f"speed of {peer}, the best of torch's",
            "weight_copies": " ".join(map(str, speed.weight_copies)),
        }
        for name, speed in speeds.items()
    ]


def bench_prediction(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on both stages at once."""
    with loopback() as place:
        seconds = run_ranks(RANKS, place, 120, prediction.measure, sizes.model, sizes.updates)[0]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    whole = medians[prediction.PASSES] + medians[prediction.UPDATE]
    yield [
        {
            **summary(times),
            "part": "prediction",
            "case": "a microbatch on a stage",
            "compute": sizes.model.name,
            "system": name,
            "ranks": RANKS,
            "ratio": f"{medians[name] / whole:.4f}",
            "ratio_is": "time of forward, backward and update",
        }
        for name, times in seconds.items()
    ]


def bench_bubbles(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure all systems in each pipeline."""
    for deep in sizes.deep:
        forward = sizes.forward * deep.ranks
        model = SleepingModel(2 * deep.ranks, forward, 2 * forward)
        peers = [peer for peer in DEEP_PEERS if peer.runs(deep.ranks, deep.microbatches)]
        plan = Plan(sizes.bubble_turns, deep.microbatches)
        arguments = (model, [*OURS, *peers], deep.microbatches, plan)
        with loopback() as place:
            measured = run_ranks(deep.ranks, place, 400, bubbles.measure, *arguments)[0]
        yield rows_of_bubbles(measured, deep, 3 * sizes.forward)


def rows_of_bubbles(measured: Mapping[str, bubbles.Waiting], deep: Deep, busy: float) -> list[Row]:
    """Return a row per system; ``busy``: seconds of work per rank and microbatch."""
    return [
        {
            **summary(waiting.seconds),
            "part": "bubbles",
            "case": f"{deep.ranks} ranks, M = {deep.microbatches}",
            "compute": f"sleep {busy * 1e3:.0f} ms per microbatch on each rank, no compute",
            "system": name,
            "ranks": deep.ranks,
            "microbatches": deep.microbatches,
            "ratio": f"{waiting.simulated / statistics.median(waiting.seconds):.3f}",
            "ratio_is": "simulated speed",
            "bubble": f"{1 - busy / statistics.median(waiting.seconds):.3f}",
            "bubble_on_paper": f"{max(0, 1 - busy / waiting.simulated):.3f}",
            "weight_copies": " ".join(map(str, waiting.weight_copies)),
        }
        for name, waiting in measured.items()
    ]


PARTS = {
    "throughput": bench_throughput,
    "prediction": bench_prediction,
    "bubbles": bench_bubbles,
}


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    print(f"\n{rows[0]['part']}, {rows[0]['case']}; {rows[0]['compute']}")
    print(f"{'system':<34} {'ms':>9} {'p20..p80':>17} ratio")
    for row in rows:
        spread = f"{row['p20_ms']}..{row['p80_ms']}"
        more = "".join(
            f", {word} {row[field]}"
            for field, word in MORE.items()
            if row.get(field) not in (None, "")
        )
        print(f"{row['system']:<34} {row['median_ms']:>9} {spread:>17} "
              f"{row['ratio']} of the {row['ratio_is']}{more}")  # fmt: skip


MORE = {
    "tokens_per_s": "tokens/s",
    "of_limit": "of limit",
    "bubble": "bubble",
    "bubble_on_paper": "simulated",
    "weight_copies": "weight copies",
}


def main() -> None:
    options = make_parser("pipeline", __doc__, list(PARTS)).parse_args()
    sizes = DRY if options.dry_run else FULL
    measure("pipeline", PARTS, sizes, options, FIELDS, print_rows)


if __name__ == "__main__":
    main()
