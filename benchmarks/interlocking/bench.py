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
"""

from collections.abc import Iterator

from torch import nn

from benchmarks.harness.program import run_parts
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import Row, rows_of
from benchmarks.interlocking import cotangents, sleeping
from benchmarks.interlocking.cotangents import Compute
from benchmarks.pipeline.models import FOR_TWO_CORES, NUM_BYTES, ByteModel, Model, SleepingModel
from benchmarks.pipeline.systems import Plan, ours
from pyparallel.pipeline import Head, LinearHead

FIELDS = [
    "part", "case", "compute", "system", "ranks", "microbatches", "median_ms", "p20_ms", "p80_ms",
    "ratio", "ratio_is", "torch", "commit",
]  # fmt: skip


CORES = 2  # stages that compute: more would contend
COUNTS = (2, 3)  # of gradients that are propagated back


class Sizes:
    """The sizes of the measurements, in seconds and microbatches per step."""

    ranks = 4  # of the sleeping pipelines
    # Of a stage in its forward; as long for the gradient of its input, and that of its weights.
    forward = 0.02
    head = 0.004
    microbatches = (1, 4, 8)
    windows = Plan(turns=5, microbatches=16)
    model = FOR_TWO_CORES
    computing = Plan(turns=9, microbatches=16)
    slowdown = sleeping.Slowdown(normal=6, slow=6, seconds=0.2)
    straggler_turns = 5
    computes = (
        Compute(width=64, samples=32),
        Compute(width=1024, samples=256),
        Compute(width=64, samples=8, length=32),
        Compute(width=256, samples=8, length=128),
    )
    cotangent_turns = 40

    @property
    def sleeping_head(self) -> sleeping.SleepingHead:
        return sleeping.SleepingHead(self.head, 2 * self.head)

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


class Dry(Sizes):
    """Those of a dry run."""

    ranks = 3
    forward = 0.002
    head = 0.001
    microbatches = (3,)
    windows = computing = Plan(turns=1, microbatches=3)
    model = ByteModel(width=48, num_blocks=2, num_heads=2, microbatch=1, length=8)
    slowdown = sleeping.Slowdown(normal=2, slow=2, seconds=0.004)
    straggler_turns = 1
    computes = (Compute(width=8, samples=2), Compute(width=8, samples=1, length=4))
    cotangent_turns = 2


def bench_windows(sizes: Sizes) -> Iterator[list[Row]]:
    model, head = SleepingModel(*sizes.sleeping), sizes.sleeping_head
    arguments = (sizes, model, head, sizes.windows, sizes.ranks, sizes.describe())
    yield from bench_systems("windows", *arguments)


def bench_computing(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure two stages of a byte model, for which window 2 is end to end."""
    head = LinearHead(NUM_BYTES, norm=nn.LayerNorm)
    compute = f"{sizes.model.name}, a head of LayerNorm and one linear layer"
    yield from bench_systems("computing", sizes, sizes.model, head, sizes.computing, CORES, compute)


def bench_systems(
    part: str, sizes: Sizes, model: Model, head: Head, plan: Plan, num_ranks: int, compute: str
) -> Iterator[list[Row]]:
    """Measure all windows beside end-to-end training, relative to our own 1F1B."""
    base = ours.ONE_FORWARD_ONE_BACKWARD.name
    for count in sizes.microbatches:
        systems = [*sleeping.every_window(num_ranks, head), *sleeping.end_to_end(num_ranks, count)]
        arguments = (sleeping.measure_windows, model, systems, count, plan)
        seconds = run_on_loopback(num_ranks, 400, *arguments)[0]
        columns = {"part": part, "case": f"M = {count}", "compute": compute}
        columns |= {"ranks": num_ranks, "microbatches": count}
        yield rows_of(seconds, seconds[base], f"speed of {base}", **columns)


def bench_straggler(sizes: Sizes) -> Iterator[list[Row]]:
    """Yield a row per system and step of the first stage, from the one before t."""
    model, slowdown = sleeping.StragglingModel(*sizes.sleeping, sizes.slowdown), sizes.slowdown
    systems = [
        *sleeping.every_window(sizes.ranks, sizes.sleeping_head),
        *sleeping.end_to_end(sizes.ranks, 1),
    ]
    arguments = (sleeping.measure_straggler, model, systems, sizes.straggler_turns)
    measured = run_on_loopback(sizes.ranks, 400, *arguments)[0]
    delay = f"from step t on the last stage's backward {slowdown.seconds * 1e3:g} ms more"
    columns = {"compute": f"{sizes.describe()}; {delay}", "ranks": sizes.ranks, "microbatches": 1}
    rows: list[Row] = []
    for name, turns in measured.items():
        before, *at_step = list(zip(*turns, strict=True))[slowdown.normal - 1 :]
        for after, seconds in enumerate((before, *at_step), -1):
            own = {"part": "straggler", "case": f"step t{after:+d}" if after else "step t"}
            rows += rows_of({name: seconds}, before, "time of the step before t", **own, **columns)
    yield rows


def bench_cotangents(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure a stage that computes on one thread."""
    arguments = (cotangents.measure, sizes.computes, COUNTS, sizes.cotangent_turns)
    for (compute, count), seconds in run_on_loopback(1, 400, *arguments)[0].items():
        columns = {"part": "cotangents", "case": f"{count} gradients", "ranks": 1}
        columns["compute"] = f"{compute}, 1 thread"
        apart = cotangents.APART
        yield rows_of(seconds, seconds[apart], f"time of {apart}", **columns)


PARTS = {
    "windows": bench_windows,
    "computing": bench_computing,
    "straggler": bench_straggler,
    "cotangents": bench_cotangents,
}

if __name__ == "__main__":
    run_parts("interlocking", __doc__, PARTS, FIELDS, Sizes(), Dry())
