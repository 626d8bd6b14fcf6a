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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from benchmarks.harness.link import limited_links
from benchmarks.harness.program import parser_of_parts, run_parts
from benchmarks.harness.ranks import run_on_loopback, run_ranks
from benchmarks.harness.rows import Row, rows_of
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
from benchmarks.pipeline.systems import ADAMW, Plan, System, ours, peers
from benchmarks.pipeline.systems.ours import OURS, OurSchedule
from benchmarks.pipeline.systems.peers import DEEP_PEERS, PEERS

FIELDS = [
    "part", "case", "compute", "system", "ranks", "microbatches", "median_ms", "p20_ms", "p80_ms",
    "tokens_per_s", "of_limit", "ratio", "ratio_is", "bubble", "bubble_on_paper", "weight_copies",
    "torch", "commit", "optimizer", "runs", "ratio_low", "ratio_high",
]  # fmt: skip
RANKS = 2  # one core each
MBIT_PER_S = 1000
COMPARED = [ours.PIPE_OPTIM, ours.ONE_FORWARD_ONE_BACKWARD]  # in the parts small and link
TORCHS = [peers.GPIPE, peers.ONE_FORWARD_ONE_BACKWARD]
LIMIT = Limit.name
FASTEST = "the fastest of torch's"


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
        return [replace(system, optimizer=self.optimizer) for system in systems]

    def optimizer_of(self, system: str) -> str:
        return ADAMW if system.startswith("torch ") else self.optimizer


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
    small_model=EncoderModel(width=16, num_blocks=2, num_heads=2, microbatch=1, length=4),
    small=Plan(turns=1, microbatches=2),
    runs=1,
    updates=4,
    forward=0.002,
    deep=(Deep(3, 6),),
    bubble_turns=1,
)


def bench_throughput(sizes: Sizes) -> Iterator[list[Row]]:
    for count in sizes.microbatches:
        systems = [*sizes.ours(OURS), *PEERS]
        run = measure_speeds_of(sizes, sizes.model, systems, count, sizes.throughput)
        ratio_is = f"speed of {fastest(run, PEERS)}, the best of torch's"
        yield rows_of_speeds(
            [run], sizes, sizes.model, "throughput", count, best_of_torch, ratio_is
        )


def bench_small(sizes: Sizes) -> Iterator[list[Row]]:
    name_of_ours, theirs = (each.ONE_FORWARD_ONE_BACKWARD.name for each in (ours, peers))
    systems, model = [*sizes.ours(COMPARED), *TORCHS], sizes.small_model

    def peer_of(name: str, run: Mapping[str, Speed]) -> str:
        return theirs if name == name_of_ours else fastest(run, TORCHS)

    for count in sizes.microbatches:
        runs = measure_runs(sizes, model, systems, count)
        rows = rows_of_speeds(runs, sizes, model, "small", count, peer_of, f"speed of {FASTEST}")
        for row in rows:
            if row["system"] == name_of_ours:
                row["ratio_is"] = f"speed of {theirs}"
        yield rows


def bench_limit(sizes: Sizes) -> Iterator[list[Row]]:
    for count in sizes.microbatches:
        runs = measure_runs(sizes, sizes.model, sizes.ours([ours.PIPE_OPTIM]), count)
        ratio_is = "speed of the limit"
        yield rows_of_speeds(runs, sizes, sizes.model, "limit", count, lambda *_: LIMIT, ratio_is)


def measure_speeds_of(
    sizes: Sizes, model: Model, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> Mapping[str, Speed]:
    arguments = (model, systems, num_microbatches, plan, sizes.optimizer)
    return run_on_loopback(RANKS, 300, measure_speeds, *arguments)[0]


def measure_runs(
    sizes: Sizes, model: Model, systems: Sequence[System], num_microbatches: int
) -> list[Mapping[str, Speed]]:
    arguments = (sizes, model, systems, num_microbatches, sizes.small)
    return [measure_speeds_of(*arguments) for _ in range(sizes.runs)]


def fastest(run: Mapping[str, Speed], systems: Sequence[System]) -> str:
    return min((each.name for each in systems), key=lambda name: run[name].median)


def best_of_torch(name: str, run: Mapping[str, Speed]) -> str:
    return fastest(run, PEERS)


def rows_of_speeds(
    runs: Sequence[Mapping[str, Speed]],
    sizes: Sizes,
    model: ByteModel | EncoderModel,
    part: str,
    num_microbatches: int,
    peer_of: Callable[[str, Mapping[str, Speed]], str],
    ratio_is: str,
) -> list[Row]:
    """Return a row per system: the median of all turns, and of the ratios within each run.

    A ratio is the speed of a system relative to that of its peer.
    """
    seconds = {name: [*chain.from_iterable(run[name].seconds for run in runs)] for name in runs[0]}

    def columns(name: str) -> Row:
        ratios = [run[peer_of(name, run)].median / run[name].median for run in runs]
        shares = [run[LIMIT].median / run[name].median for run in runs]
        return {
            "tokens_per_s": f"{model.tokens / statistics.median(seconds[name]):.0f}",
            "of_limit": f"{statistics.median(shares):.3f}",
            "weight_copies": " ".join(map(str, runs[0][name].weight_copies)),
            "optimizer": sizes.optimizer_of(name),
            **spread_of(ratios),
        }

    return rows_of(
        seconds,
        seconds[LIMIT],
        ratio_is,
        part=part,
        case=f"M = {num_microbatches}",
        compute=model.name,
        ranks=RANKS,
        microbatches=num_microbatches,
        more=columns,
    )


def spread_of(ratios: Sequence[float]) -> Row:
    found = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }
    return {name: f"{value:.3f}" for name, value in found.items()} | {"runs": len(ratios)}


def bench_prediction(sizes: Sizes) -> Iterator[list[Row]]:
    for kind in prediction.OPTIMIZERS:
        arguments = (sizes.model, sizes.updates, kind)
        seconds = run_on_loopback(RANKS, 300, prediction.measure, *arguments)[0]
        passes, update = (
            statistics.median(seconds[name]) for name in (prediction.PASSES, prediction.UPDATE)
        )
        yield rows_of(
            seconds,
            [passes + update],
            "time of forward, backward and update",
            digits=4,
            part="prediction",
            case="a microbatch on a stage",
            optimizer=kind,
            compute=sizes.model.name,
            ranks=RANKS,
        )


def bench_link(sizes: Sizes) -> Iterator[list[Row]]:
    systems, peer = [*sizes.ours(COMPARED), *TORCHS], peers.ONE_FORWARD_ONE_BACKWARD.name
    for count in sizes.microbatches:
        arguments = (sizes.model, systems, count, sizes.throughput)
        with limited_links(RANKS, MBIT_PER_S) as place:
            waits = run_ranks(RANKS, place, 300, waiting.measure, *arguments)[0]
        for kind in (waiting.ACTIVATIONS, waiting.GRADIENTS):
            seconds = {name: each[kind] for name, each in waits.items()}

            def columns(name: str, seconds: Mapping[str, Sequence[float]] = seconds) -> Row:
                pairs = zip(seconds[name], seconds[peer], strict=True)
                ratios = [own / theirs for own, theirs in pairs]  # of the same turn
                return {**spread_of(ratios), "optimizer": sizes.optimizer_of(name)}

            yield rows_of(
                seconds,
                seconds[peer],
                f"wait of {peer}",
                part="link",
                case=f"M = {count}, {kind}",
                compute=f"{sizes.model.name}, {MBIT_PER_S} Mbit/s",
                ranks=RANKS,
                microbatches=count,
                more=columns,
            )


def bench_bubbles(sizes: Sizes) -> Iterator[list[Row]]:
    busy = 3 * sizes.forward  # seconds of work per rank and microbatch
    for deep in sizes.deep:
        forward = sizes.forward * deep.ranks
        model = SleepingModel(2 * deep.ranks, forward, 2 * forward)
        others = [peer for peer in DEEP_PEERS if peer.runs(deep.ranks, deep.microbatches)]
        plan = Plan(sizes.bubble_turns, deep.microbatches)
        arguments = (model, [*sizes.ours(OURS), *others], deep.microbatches, plan)
        found = run_on_loopback(deep.ranks, 400, bubbles.measure, *arguments)[0]

        def columns(name: str, found: Mapping[str, bubbles.Waiting] = found) -> Row:
            median, simulated = statistics.median(found[name].seconds), found[name].simulated
            return {
                "ratio": f"{simulated / median:.3f}",
                "bubble": f"{1 - busy / median:.3f}",
                "bubble_on_paper": f"{max(0, 1 - busy / simulated):.3f}",
                "weight_copies": " ".join(map(str, found[name].weight_copies)),
            }

        yield rows_of(
            {name: each.seconds for name, each in found.items()},
            [busy],
            "simulated speed",
            part="bubbles",
            case=f"{deep.ranks} ranks, M = {deep.microbatches}",
            compute=f"sleep {busy * 1e3:.0f} ms per microbatch on each rank, no compute",
            ranks=deep.ranks,
            microbatches=deep.microbatches,
            more=columns,
        )


PARTS = {
    "throughput": bench_throughput,
    "small": bench_small,
    "limit": bench_limit,
    "prediction": bench_prediction,
    "link": bench_link,
    "bubbles": bench_bubbles,
}


def main() -> None:
    parser = parser_of_parts("pipeline", __doc__, PARTS)
    parser.add_argument("--optimizer", default=ADAMW, help="a class of AdamW, such as %(default)s")
    options = parser.parse_args()
    sizes = replace(DRY if options.dry_run else FULL, optimizer=options.optimizer)
    run_parts("pipeline", PARTS, sizes, options, FIELDS)


if __name__ == "__main__":
    main()
