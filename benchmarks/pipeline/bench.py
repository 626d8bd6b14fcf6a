"""``python -m benchmarks.pipeline.bench [--parts throughput small ...] [--dry-run]``.

Gloo processes on the CPU, one thread each, all systems in turns within one run, each with AdamW on
all stages, ours and the limit with the class of ``--optimizer``, torch's with torch's:

* ``throughput``: tokens per second of a byte model on two ranks, with our schedules and those of
  ``torch.distributed.pipelining``, relative to computing without waiting; and the peak number of
  weight copies of a stage.
* ``small``: tokens per second with little computing in a microbatch, so that what a pipeline does
  around it counts: PipeOptim against the faster of torch's GPipe and 1F1B, 1F1B against torch's.
* ``limit``: PipeOptim against computing without waiting and messages, with the same optimizer.
* ``prediction``: the cost of weight prediction in PipeOptim.
* ``link``: the time in which stages wait for messages over 1 Gbit/s, of PipeOptim and of torch's.
* ``bubbles``: deeper pipelines whose stages sleep instead of computing: the idle time of ranks,
  measured and simulated.

Rows go to ``benchmarks/results/pipeline-<machine>.csv``, replacing those of the parts that were
measured. ``python -m benchmarks.pipeline.picture FILE.csv`` draws them. ``--dry-run`` runs a
small version of all parts, as a test.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.link import limited_links, loopback
from benchmarks.harness.measure import summary
from benchmarks.harness.program import Row, make_parser, measure
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline import bubbles, prediction, waiting
from benchmarks.pipeline.limit import Limit, Speed, measure_speeds
from benchmarks.pipeline.models import (
    FOR_TWO_CORES,
    SMALL_MICROBATCHES,
    ByteModel,
    EncoderModel,
    Model,
    SleepingModel,
)
from benchmarks.pipeline.systems import ADAMW, System, ours, peers
from benchmarks.pipeline.systems.ours import OURS, OurSchedule
from benchmarks.pipeline.systems.peers import DEEP_PEERS, PEERS
from benchmarks.pipeline.turns import Plan

FIELDS = [
    "part", "case", "compute", "system", "ranks", "microbatches", "median_ms", "p20_ms", "p80_ms",
    "tokens_per_s", "of_limit", "ratio", "ratio_is", "bubble", "bubble_on_paper", "weight_copies",
    "torch", "commit", "optimizer", "runs", "ratio_low", "ratio_high",
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
        microbatches: per step, in the parts ``throughput`` and ``small``.
        small: each of ``runs`` processes.
        updates: of each kind, in the part ``prediction``.
        forward: seconds that a rank sleeps in the forward of a microbatch; twice that backward.
    """

    model: ByteModel
    microbatches: Sequence[int]
    throughput: Plan
    small_model: EncoderModel
    small: Plan
    runs: int
    updates: int
    forward: float
    deep: Sequence[Deep]
    bubble_turns: int
    optimizer: str = ADAMW

    def ours(self, systems: Sequence[OurSchedule]) -> list[OurSchedule]:
        """Return systems with the optimizer."""
        return [replace(system, optimizer=self.optimizer) for system in systems]


RANKS = 2  # one core each
FULL = Sizes(
    model=FOR_TWO_CORES,
    microbatches=(RANKS, 2 * RANKS, 4 * RANKS),
    throughput=Plan(turns=6, microbatches=8),
    small_model=SMALL_MICROBATCHES,
    small=Plan(turns=4, microbatches=16),
    runs=5,
    updates=120,
    forward=0.02,
    deep=(Deep(4, 8), Deep(8, 16)),
    bubble_turns=3,
)
DRY = Sizes(
    model=ByteModel(width=48, num_blocks=4, num_heads=2, microbatch=1, length=8),
    microbatches=(RANKS,),
    throughput=Plan(turns=1, microbatches=2),
    small_model=EncoderModel(width=16, num_layers=2, num_heads=2, microbatch=1, length=4),
    small=Plan(turns=1, microbatches=2),
    runs=1,
    updates=4,
    forward=0.002,
    deep=(Deep(3, 6),),
    bubble_turns=1,
)


def bench_throughput(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure with few to many microbatches per step."""
    for num_microbatches in sizes.microbatches:
        systems = [*sizes.ours(OURS), *PEERS]
        arguments = (sizes.model, systems, num_microbatches, sizes.throughput, sizes.optimizer)
        with loopback() as place:
            speeds = run_ranks(RANKS, place, 300, measure_speeds, *arguments)[0]
        yield rows_of_throughput(speeds, sizes, num_microbatches)


def rows_of_throughput(
    speeds: Mapping[str, Speed], sizes: Sizes, num_microbatches: int
) -> list[Row]:
    """Return a row per system, relative to the best of torch's and to the limit."""
    model = sizes.model
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
            "optimizer": optimizer_of(name, sizes),
        }
        for name, speed in speeds.items()
    ]


def optimizer_of(system: str, sizes: Sizes) -> str:
    """Return the class of a system's optimizer."""
    return ADAMW if system in {peer.name for peer in DEEP_PEERS} else sizes.optimizer


SMALL_OURS = [ours.PIPE_OPTIM, ours.ONE_FORWARD_ONE_BACKWARD]
SMALL_PEERS = [peers.GPIPE, peers.ONE_FORWARD_ONE_BACKWARD]
FASTEST = "the fastest of torch's"
COMPARED = {  # with which of torch's
    ours.ONE_FORWARD_ONE_BACKWARD.name: peers.ONE_FORWARD_ONE_BACKWARD.name
}


def bench_small(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure in several runs, each of new processes."""
    systems = [*sizes.ours(SMALL_OURS), *SMALL_PEERS]
    for num_microbatches in sizes.microbatches:
        runs = measure_runs(sizes, sizes.small_model, systems, num_microbatches)
        yield rows_of_small(runs, sizes, num_microbatches)


def measure_runs(
    sizes: Sizes, model: Model, systems: Sequence[System], num_microbatches: int
) -> list[Mapping[str, Speed]]:
    """Return the speeds of systems and of the limit in each run."""
    runs = []
    for _ in range(sizes.runs):
        with loopback() as place:
            arguments = (model, systems, num_microbatches, sizes.small, sizes.optimizer)
            runs.append(run_ranks(RANKS, place, 120, measure_speeds, *arguments)[0])
    return runs


def bench_limit(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure PipeOptim against the limit, both with the same optimizer, in several runs."""
    systems = sizes.ours([ours.PIPE_OPTIM])
    for num_microbatches in sizes.microbatches:
        runs = measure_runs(sizes, sizes.model, systems, num_microbatches)
        yield rows_of_limit(runs, sizes, num_microbatches)


def rows_of_limit(
    runs: Sequence[Mapping[str, Speed]], sizes: Sizes, num_microbatches: int
) -> list[Row]:
    """Return a row per system: the median of all turns, and of the ratios within each run."""
    rows: list[Row] = []
    for name in runs[0]:
        ratios = [
            statistics.median(run[Limit.name].seconds) / statistics.median(run[name].seconds)
            for run in runs
        ]
        rows.append(
            {
                **summary([each for run in runs for each in run[name].seconds]),
                "part": "limit",
                "case": f"M = {num_microbatches}",
                "compute": sizes.model.name,
                "system": name,
                "ranks": RANKS,
                "microbatches": num_microbatches,
                "of_limit": f"{statistics.median(ratios):.3f}",
                "ratio": f"{statistics.median(ratios):.3f}",
                "ratio_is": "speed of the limit",
                "optimizer": optimizer_of(name, sizes),
                "runs": len(runs),
                "ratio_low": f"{min(ratios):.3f}",
                "ratio_high": f"{max(ratios):.3f}",
            }
        )
    return rows


def rows_of_small(
    runs: Sequence[Mapping[str, Speed]], sizes: Sizes, num_microbatches: int
) -> list[Row]:
    """Return a row per system: the median of all turns, and of the ratios within each run."""
    rows: list[Row] = []
    for name in runs[0]:
        pairs = [speed_ratios(run, name) for run in runs]
        ratios, of_limit = ([pair[i] for pair in pairs] for i in range(2))
        seconds = [each for run in runs for each in run[name].seconds]
        rows.append(
            {
                **summary(seconds),
                "part": "small",
                "case": f"M = {num_microbatches}",
                "compute": sizes.small_model.name,
                "system": name,
                "ranks": RANKS,
                "microbatches": num_microbatches,
                "tokens_per_s": f"{sizes.small_model.tokens / statistics.median(seconds):.0f}",
                "of_limit": f"{statistics.median(of_limit):.3f}",
                "ratio": f"{statistics.median(ratios):.3f}",
                "ratio_is": f"speed of {COMPARED.get(name, FASTEST)}",
                "weight_copies": " ".join(map(str, runs[0][name].weight_copies)),
                "optimizer": optimizer_of(name, sizes),
                "runs": len(runs),
                "ratio_low": f"{min(ratios):.3f}",
                "ratio_high": f"{max(ratios):.3f}",
            }
        )
    return rows


def speed_ratios(run: Mapping[str, Speed], name: str) -> tuple[float, float]:
    """Return the speed of a system relative to torch's and to the limit in the same run."""
    medians = {each: statistics.median(speed.seconds) for each, speed in run.items()}
    fastest = min(medians[peer.name] for peer in SMALL_PEERS)
    peer = medians[COMPARED[name]] if name in COMPARED else fastest
    return peer / medians[name], medians[Limit.name] / medians[name]


def bench_prediction(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on both stages at once."""
    for kind in prediction.OPTIMIZERS:
        arguments = sizes.model, sizes.updates, kind
        with loopback() as place:
            seconds = run_ranks(RANKS, place, 300, prediction.measure, *arguments)[0]
        yield rows_of_prediction(kind, seconds, sizes.model)


def rows_of_prediction(
    kind: str, seconds: Mapping[str, Sequence[float]], model: ByteModel
) -> list[Row]:
    """Return a row for the passes, each update and the prediction."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    whole = medians[prediction.PASSES] + medians[prediction.UPDATE]
    return [
        {
            **summary(times),
            "part": "prediction",
            "case": "a microbatch on a stage",
            "optimizer": kind,
            "compute": model.name,
            "system": name,
            "ranks": RANKS,
            "ratio": f"{medians[name] / whole:.4f}",
            "ratio_is": "time of forward, backward and update",
        }
        for name, times in seconds.items()
    ]


LINK_OURS = [ours.PIPE_OPTIM, ours.ONE_FORWARD_ONE_BACKWARD]
LINK_PEERS = [peers.GPIPE, peers.ONE_FORWARD_ONE_BACKWARD]
MBIT_PER_S = 1000


def bench_link(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure both stages in a network namespace of its own."""
    for num_microbatches in sizes.microbatches:
        systems = [*sizes.ours(LINK_OURS), *LINK_PEERS]
        arguments = (sizes.model, systems, num_microbatches, sizes.throughput)
        with limited_links(RANKS, MBIT_PER_S) as place:
            waits = run_ranks(RANKS, place, 300, waiting.measure, *arguments)[0]
        for kind in (waiting.ACTIVATIONS, waiting.GRADIENTS):
            of_kind = {name: each[kind] for name, each in waits.items()}
            yield rows_of_link(of_kind, kind, sizes, num_microbatches)


def rows_of_link(
    waits: Mapping[str, Sequence[float]], kind: str, sizes: Sizes, num_microbatches: int
) -> list[Row]:
    """Return a row per system, relative to torch's 1F1B in the same turns."""
    peer = peers.ONE_FORWARD_ONE_BACKWARD.name
    rows: list[Row] = []
    for name, seconds in waits.items():
        ratios = [own / theirs for own, theirs in zip(seconds, waits[peer], strict=True)]
        rows.append(
            {
                **summary(seconds),
                "part": "link",
                "case": f"M = {num_microbatches}, {kind}",
                "compute": f"{sizes.model.name}, {MBIT_PER_S} Mbit/s",
                "system": name,
                "ranks": RANKS,
                "microbatches": num_microbatches,
                "ratio": f"{statistics.median(ratios):.3f}",
                "ratio_is": f"wait of {peer}",
                "optimizer": optimizer_of(name, sizes),
                "runs": len(seconds),
                "ratio_low": f"{min(ratios):.3f}",
                "ratio_high": f"{max(ratios):.3f}",
            }
        )
    return rows


def bench_bubbles(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure all systems in each pipeline."""
    for deep in sizes.deep:
        forward = sizes.forward * deep.ranks
        model = SleepingModel(2 * deep.ranks, forward, 2 * forward)
        others = [peer for peer in DEEP_PEERS if peer.runs(deep.ranks, deep.microbatches)]
        plan = Plan(sizes.bubble_turns, deep.microbatches)
        arguments = (model, [*sizes.ours(OURS), *others], deep.microbatches, plan)
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
    "small": bench_small,
    "limit": bench_limit,
    "prediction": bench_prediction,
    "link": bench_link,
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
    "ratio_low": "least of the runs",
    "ratio_high": "most",
}


def main() -> None:
    parser = make_parser("pipeline", __doc__, list(PARTS))
    parser.add_argument("--optimizer", default=ADAMW, help="a class of AdamW, such as %(default)s")
    options = parser.parse_args()
    sizes = replace(DRY if options.dry_run else FULL, optimizer=options.optimizer)
    measure("pipeline", PARTS, sizes, options, FIELDS, print_rows)


if __name__ == "__main__":
    main()
