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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.harness.program import parser_of_parts, run_parts
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import Row, rows_of
from benchmarks.interlocking import cotangents, straggler, windows
from benchmarks.interlocking.cotangents import MLP, Compute, OneBlock
from benchmarks.interlocking.straggler import Slowdown, StragglingModel
from benchmarks.interlocking.windows import SleepingHead, end_to_end, every_window
from benchmarks.pipeline.models import FOR_TWO_CORES, NUM_BYTES, ByteModel, Model, SleepingModel
from benchmarks.pipeline.systems import Plan, ours
from pyparallel.pipeline import Head, LinearHead

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

    @property
    def sleeping_head(self) -> SleepingHead:
        return SleepingHead(self.head, 2 * self.head)

    @property
    def sleeping(self) -> tuple[int, float, float]:
        """Layers, and the seconds of all forwards and of all backwards."""
        seconds = self.ranks * self.forward
        return 2 * self.ranks, seconds, 2 * seconds

    def describe(self) -> str:
        stage, head = (f"{seconds * 1e3:g}" for seconds in (self.forward, self.head))
        return (
            f"no compute: forward, input gradient and weight gradient of a stage sleep {stage} ms "
            f"each, of a head {head} ms; gradients that are propagated back together sleep once"
        )


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
    model, compute = SleepingModel(*sizes.sleeping), sizes.describe()
    plan = sizes.windows
    yield from bench_systems(
        "windows", sizes, model, sizes.sleeping_head, plan, sizes.ranks, compute
    )


def bench_computing(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure two stages of a byte model, for which window 2 is end to end."""
    head = LinearHead(NUM_BYTES, norm=nn.LayerNorm)
    compute = f"{sizes.model.name}, a head of LayerNorm and one linear layer"
    yield from bench_systems("computing", sizes, sizes.model, head, sizes.computing, CORES, compute)


def bench_systems(
    part: str, sizes: Sizes, model: Model, head: Head, plan: Plan, num_ranks: int, compute: str
) -> Iterator[list[Row]]:
    base = ours.ONE_FORWARD_ONE_BACKWARD.name
    for count in sizes.microbatches:
        systems = [*every_window(num_ranks, head), *end_to_end(num_ranks, count)]
        arguments = (model, systems, count, plan)
        seconds = run_on_loopback(num_ranks, 400, windows.measure, *arguments)[0]
        yield rows_of(
            seconds,
            seconds[base],
            f"speed of {base}",
            part=part,
            case=f"M = {count}",
            compute=compute,
            ranks=num_ranks,
            microbatches=count,
        )


def bench_straggler(sizes: Sizes) -> Iterator[list[Row]]:
    model = StragglingModel(*sizes.sleeping, sizes.slowdown)
    systems = [*every_window(sizes.ranks, sizes.sleeping_head), *end_to_end(sizes.ranks, 1)]
    arguments = (model, systems, sizes.straggler_turns)
    measured = run_on_loopback(sizes.ranks, 400, straggler.measure, *arguments)[0]
    yield rows_of_straggler(measured, sizes)


def rows_of_straggler(measured: Mapping[str, Sequence[Sequence[float]]], sizes: Sizes) -> list[Row]:
    """Return a row per system and step, from the one before the last stage becomes slow."""
    slowdown, rows = sizes.slowdown, []
    delay = f"from step t on the last stage's backward {slowdown.seconds * 1e3:g} ms more"
    for name, turns in measured.items():
        before, *at_step = list(zip(*turns, strict=True))[slowdown.normal - 1 :]
        for after, seconds in enumerate((before, *at_step), -1):
            rows += rows_of(
                {name: seconds},
                before,
                "time of the step before t",
                part="straggler",
                case=f"step t{after:+d}" if after else "step t",
                compute=f"{sizes.describe()}; {delay}",
                ranks=sizes.ranks,
                microbatches=1,
            )
    return rows


def bench_cotangents(sizes: Sizes) -> Iterator[list[Row]]:
    arguments = (sizes.computes, COUNTS, sizes.cotangent_turns)
    measured = run_on_loopback(1, 400, cotangents.measure, *arguments)[0]
    for (compute, count), seconds in measured.items():
        yield rows_of(
            seconds,
            seconds[cotangents.APART],
            f"time of {cotangents.APART}",
            part="cotangents",
            case=f"{count} gradients",
            compute=f"{compute}, 1 thread",
            ranks=1,
        )


PARTS = {
    "windows": bench_windows,
    "computing": bench_computing,
    "straggler": bench_straggler,
    "cotangents": bench_cotangents,
}


def main() -> None:
    options = parser_of_parts("interlocking", __doc__, PARTS).parse_args()
    run_parts("interlocking", PARTS, DRY if options.dry_run else FULL, options, FIELDS)


if __name__ == "__main__":
    main()
