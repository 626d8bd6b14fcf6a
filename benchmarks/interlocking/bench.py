"""``python -m benchmarks.interlocking.bench [--parts PART ...] [--dry-run]``.

The speed of interlocking backpropagation. Gloo processes on the CPU, one thread each, all systems
in turns within one run:

* ``windows``: the step time of a pipeline whose stages and heads sleep instead of computing, with
  all windows, compared with 1F1B with a flush, ours and torch's, and PipeOptim, which does not
  flush. PipeOptim updates after each microbatch, all others once per step.
* ``computing``: the same with stages that compute, one on each of two cores, and linear heads.
* ``straggler``: the sleeping pipeline with one microbatch per step; from step t on the backward of
  the last stage is slow. Measures the steps of the first stage.
* ``cotangents``: gradients of several losses, propagated back through a stage together or one
  after the other.

Rows go to ``benchmarks/results/interlocking-<machine>.csv``, replacing those of the parts that were
measured. ``python -m benchmarks.interlocking.picture FILE.csv`` draws them. ``--dry-run`` runs a
small version of all parts, as a test.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.harness.link import loopback
from benchmarks.harness.measure import summary
from benchmarks.harness.program import Row, make_parser, measure
from benchmarks.harness.ranks import run_ranks
from benchmarks.interlocking import cotangents, straggler, windows
from benchmarks.interlocking.cotangents import MLP, Compute, OneBlock
from benchmarks.interlocking.straggler import Slowdown, StragglingModel
from benchmarks.interlocking.windows import SleepingHead, end_to_end, every_window
from benchmarks.pipeline.models import FOR_TWO_CORES, NUM_BYTES, ByteModel, SleepingModel
from benchmarks.pipeline.systems import ours
from benchmarks.pipeline.turns import Plan
from pyparallel.pipeline import LinearHead

FIELDS = [
    "part", "case", "compute", "system", "ranks", "microbatches", "median_ms", "p20_ms", "p80_ms",
    "ratio", "ratio_is", "torch", "commit",
]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Args:
        ranks: of the sleeping pipelines.
        forward: seconds that a stage sleeps in the forward of a microbatch; the same for the
            gradient of its input, and for that of its weights.
        head: the same for a head.
        microbatches: per step, in the part ``windows``.
        windows: turns and microbatches of the part ``windows``.
        model: of two ranks, in the part ``computing``.
        computing: turns and microbatches of the part ``computing``.
        slowdown: of the last stage, in the part ``straggler``.
        straggler_turns: turns of the part ``straggler``.
        computes: modules of the part ``cotangents``.
        cotangent_turns: turns of the part ``cotangents``.
    """

    ranks: int
    forward: float
    head: float
    microbatches: Sequence[int]
    windows: Plan
    model: ByteModel
    computing: Plan
    slowdown: Slowdown
    straggler_turns: int
    computes: Sequence[Compute]
    cotangent_turns: int


FULL = Sizes(
    ranks=4,
    forward=0.02,
    head=0.004,
    microbatches=(1, 4, 8),
    windows=Plan(turns=5, microbatches=16),
    model=FOR_TWO_CORES,
    computing=Plan(turns=9, microbatches=16),
    slowdown=Slowdown(normal=6, slow=6, seconds=0.2),
    straggler_turns=5,
    computes=(
        MLP(width=64, samples=32),
        MLP(width=1024, samples=256),
        OneBlock(width=64, samples=8, length=32),
        OneBlock(width=256, samples=8, length=128),
    ),
    cotangent_turns=40,
)
DRY = Sizes(
    ranks=3,
    forward=0.002,
    head=0.001,
    microbatches=(3,),
    windows=Plan(turns=1, microbatches=3),
    model=ByteModel(width=48, num_blocks=2, num_heads=2, microbatch=1, length=8),
    computing=Plan(turns=1, microbatches=3),
    slowdown=Slowdown(normal=2, slow=2, seconds=0.004),
    straggler_turns=1,
    computes=(MLP(width=8, samples=2), OneBlock(width=8, samples=1, length=4)),
    cotangent_turns=2,
)
CORES = 2  # stages that compute: more would contend
COUNTS = (2, 3)  # of gradients that are propagated back


def bench_windows(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure with few to many microbatches per step."""
    num_ranks, head = sizes.ranks, SleepingHead(sizes.head, 2 * sizes.head)
    seconds = num_ranks * sizes.forward
    model = SleepingModel(2 * num_ranks, seconds, 2 * seconds)
    for num_microbatches in sizes.microbatches:
        systems = [*every_window(num_ranks, head), *end_to_end(num_ranks, num_microbatches)]
        arguments = (model, systems, num_microbatches, sizes.windows)
        with loopback() as place:
            measured = run_ranks(num_ranks, place, 400, windows.measure, *arguments)[0]
        yield rows_of_windows("windows", measured, describe(sizes), num_ranks, num_microbatches)


def bench_computing(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure two stages of a byte model, for which window 2 is end to end."""
    head = LinearHead(NUM_BYTES, norm=nn.LayerNorm)
    for num_microbatches in sizes.microbatches:
        systems = [*every_window(CORES, head), *end_to_end(CORES, num_microbatches)]
        arguments = (sizes.model, systems, num_microbatches, sizes.computing)
        with loopback() as place:
            measured = run_ranks(CORES, place, 400, windows.measure, *arguments)[0]
        compute = f"{sizes.model.name}, a head of LayerNorm and one linear layer"
        yield rows_of_windows("computing", measured, compute, CORES, num_microbatches)


def rows_of_windows(
    part: str,
    measured: Mapping[str, Sequence[float]],
    compute: str,
    num_ranks: int,
    num_microbatches: int,
) -> list[Row]:
    """Return a row per system, relative to our own 1F1B."""
    baseline = statistics.median(measured[ours.ONE_FORWARD_ONE_BACKWARD.name])
    return [
        {
            **summary(seconds),
            "part": part,
            "case": f"M = {num_microbatches}",
            "compute": compute,
            "system": name,
            "ranks": num_ranks,
            "microbatches": num_microbatches,
            "ratio": f"{baseline / statistics.median(seconds):.3f}",
            "ratio_is": f"speed of {ours.ONE_FORWARD_ONE_BACKWARD.name}",
        }
        for name, seconds in measured.items()
    ]


def describe(sizes: Sizes) -> str:
    """Describe how long stages and heads sleep."""
    stage, head = (f"{seconds * 1e3:g}" for seconds in (sizes.forward, sizes.head))
    return (
        f"no compute: forward, input gradient and weight gradient of a stage sleep {stage} ms "
        f"each, of a head {head} ms; gradients that are propagated back together sleep once"
    )


def bench_straggler(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure the delay of each step of the first stage, with one microbatch per step."""
    num_ranks, head = sizes.ranks, SleepingHead(sizes.head, 2 * sizes.head)
    seconds = num_ranks * sizes.forward
    model = StragglingModel(2 * num_ranks, seconds, 2 * seconds, sizes.slowdown)
    systems = [*every_window(num_ranks, head), *end_to_end(num_ranks, 1)]
    arguments = (model, systems, sizes.straggler_turns)
    with loopback() as place:
        measured = run_ranks(num_ranks, place, 400, straggler.measure, *arguments)[0]
    yield rows_of_straggler(measured, sizes)


def rows_of_straggler(measured: Mapping[str, Sequence[Sequence[float]]], sizes: Sizes) -> list[Row]:
    """Return a row per system and step, from the one before the last stage becomes slow."""
    slowdown = sizes.slowdown
    return [
        {
            **summary(at_step[step]),
            "part": "straggler",
            "case": f"step t{after:+d}" if after else "step t",
            "compute": f"{describe(sizes)}; from step t on the last stage's backward "
            f"{slowdown.seconds * 1e3:g} ms more",
            "system": name,
            "ranks": sizes.ranks,
            "microbatches": 1,
            "ratio": ratio_of(at_step[step], at_step[slowdown.normal - 1]),
            "ratio_is": "time of the step before t",
        }
        for name, turns in measured.items()
        for at_step in [list(zip(*turns, strict=True))]
        for after, step in enumerate(range(slowdown.normal - 1, len(at_step)), -1)
    ]


def bench_cotangents(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure a stage that computes on one thread."""
    arguments = (sizes.computes, COUNTS, sizes.cotangent_turns)
    with loopback() as place:
        measured = run_ranks(1, place, 400, cotangents.measure, *arguments)[0]
    for (compute, count), seconds in measured.items():
        yield [
            {
                **summary(times),
                "part": "cotangents",
                "case": f"{count} gradients",
                "compute": f"{compute}, 1 thread",
                "system": name,
                "ranks": 1,
                "ratio": ratio_of(times, seconds[cotangents.APART]),
                "ratio_is": f"time of {cotangents.APART}",
            }
            for name, times in seconds.items()
        ]


def ratio_of(times: Sequence[float], others: Sequence[float]) -> str:
    """Return the ratio of the medians."""
    return f"{statistics.median(times) / statistics.median(others):.3f}"


PARTS = {
    "windows": bench_windows,
    "computing": bench_computing,
    "straggler": bench_straggler,
    "cotangents": bench_cotangents,
}


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    print(f"\n{rows[0]['part']}; {rows[0]['compute']}")
    for row in rows:
        spread = f"{row['p20_ms']}..{row['p80_ms']}"
        print(f"{row['system']:<26} {row['case']:<12} {row['median_ms']:>9} ms {spread:>19} "
              f"{row['ratio']} of the {row['ratio_is']}")  # fmt: skip


def main() -> None:
    options = make_parser("interlocking", __doc__, list(PARTS)).parse_args()
    sizes = DRY if options.dry_run else FULL
    measure("interlocking", PARTS, sizes, options, FIELDS, print_rows)


if __name__ == "__main__":
    main()
