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
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from benchmarks.harness.link import limited_links
from benchmarks.harness.program import run_parts
from benchmarks.harness.ranks import run_on_loopback, run_ranks
from benchmarks.harness.rows import Row, rows_of
from benchmarks.pipeline import limit, models, waiting
from benchmarks.pipeline.limit import Limit, Speed, measure_speeds
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


class Sizes:
    """The sizes of the measurements; ``optimizer`` is the class of ours."""

    optimizer = ADAMW
    microbatches = (RANKS, 2 * RANKS, 4 * RANKS)  # per step
    model = models.FOR_TWO_CORES
    throughput = Plan(turns=6, microbatches=8)
    small_model = models.SMALL_MICROBATCHES
    small = Plan(turns=4, microbatches=16)  # each of ``runs`` processes
    runs = 5
    updates = 120  # of each kind, in the part ``prediction``
    forward = 0.02  # seconds that a rank sleeps in a microbatch; twice that in its backward
    deep = ((4, 8), (8, 16))  # ranks that sleep, and microbatches
    bubble_turns = 3

    def ours(self, systems: Sequence[OurSchedule]) -> list[OurSchedule]:
        return [replace(system, optimizer=self.optimizer) for system in systems]

    def optimizer_of(self, system: str) -> str:
        return ADAMW if system.startswith("torch ") else self.optimizer


class Dry(Sizes):
    """Those of a dry run."""

    microbatches = (RANKS,)
    model = models.ByteModel(width=48, num_blocks=4, num_heads=2, microbatch=1, length=8)
    throughput = small = Plan(turns=1, microbatches=2)
    small_model = models.EncoderModel(width=16, num_blocks=2, num_heads=2, microbatch=1, length=4)
    runs = bubble_turns = 1
    updates = 4
    forward = 0.002
    deep = ((3, 6),)


def bench_throughput(sizes: Sizes) -> Iterator[list[Row]]:
    for count in sizes.microbatches:
        systems = [*sizes.ours(OURS), *PEERS]
        (run,) = measure_runs(sizes, sizes.model, systems, count, sizes.throughput, 1)
        peer = fastest(run, PEERS)
        ratio_is = f"speed of {peer}, the best of torch's"
        arguments = ("throughput", count, lambda *_, peer=peer: peer, ratio_is)
        yield rows_of_speeds([run], sizes, sizes.model, *arguments)


def bench_small(sizes: Sizes) -> Iterator[list[Row]]:
    name_of_ours, theirs = (each.ONE_FORWARD_ONE_BACKWARD.name for each in (ours, peers))
    systems, model = [*sizes.ours(COMPARED), *TORCHS], sizes.small_model

    def peer_of(name: str, run: Mapping[str, Speed]) -> str:
        return theirs if name == name_of_ours else fastest(run, TORCHS)

    for count in sizes.microbatches:
        runs = measure_runs(sizes, model, systems, count, sizes.small, sizes.runs)
        rows = rows_of_speeds(runs, sizes, model, "small", count, peer_of, f"speed of {FASTEST}")
        for row in rows:
            if row["system"] == name_of_ours:
                row["ratio_is"] = f"speed of {theirs}"
        yield rows


def bench_limit(sizes: Sizes) -> Iterator[list[Row]]:
    for count in sizes.microbatches:
        systems = sizes.ours([ours.PIPE_OPTIM])
        runs = measure_runs(sizes, sizes.model, systems, count, sizes.small, sizes.runs)
        arguments = ("limit", count, lambda *_: LIMIT, "speed of the limit")
        yield rows_of_speeds(runs, sizes, sizes.model, *arguments)


def measure_runs(
    sizes: Sizes, model: models.Model, systems: Sequence[System], count: int, plan: Plan, runs: int
) -> list[Mapping[str, Speed]]:
    """Return the speeds of systems and of the limit, in new processes for each run."""
    arguments = (measure_speeds, model, systems, count, plan, sizes.optimizer)
    return [run_on_loopback(RANKS, 300, *arguments)[0] for _ in range(runs)]


def fastest(run: Mapping[str, Speed], systems: Sequence[System]) -> str:
    return min((each.name for each in systems), key=lambda name: run[name].median)


def rows_of_speeds(
    runs: Sequence[Mapping[str, Speed]],
    sizes: Sizes,
    model: models.ByteModel | models.EncoderModel,
    part: str,
    count: int,
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

    common = {"part": part, "case": f"M = {count}", "compute": model.name}
    common |= {"ranks": RANKS, "microbatches": count}
    return rows_of(seconds, seconds[LIMIT], ratio_is, more=columns, **common)


def spread_of(ratios: Sequence[float]) -> Row:
    found = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }
    return {name: f"{value:.3f}" for name, value in found.items()} | {"runs": len(ratios)}


def bench_prediction(sizes: Sizes) -> Iterator[list[Row]]:
    for kind in limit.OPTIMIZERS:
        arguments = (sizes.model, sizes.updates, kind)
        seconds = run_on_loopback(RANKS, 300, limit.measure_prediction, *arguments)[0]
        passes, update = (statistics.median(seconds[x]) for x in (limit.PASSES, limit.UPDATE))
        columns = {"part": "prediction", "case": "a microbatch on a stage", "optimizer": kind}
        columns |= {"compute": sizes.model.name, "ranks": RANKS}
        ratio_is = "time of forward, backward and update"
        yield rows_of(seconds, [passes + update], ratio_is, digits=4, **columns)


def bench_link(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure both stages in a network namespace of its own, against torch's 1F1B."""
    systems, peer = [*sizes.ours(COMPARED), *TORCHS], peers.ONE_FORWARD_ONE_BACKWARD.name
    for count in sizes.microbatches:
        arguments = (sizes.model, systems, count, sizes.throughput)
        with limited_links(RANKS, MBIT_PER_S) as place:
            waits = run_ranks(RANKS, place, 300, waiting.measure, *arguments)[0]
        for kind in (waiting.ACTIVATIONS, waiting.GRADIENTS):
            seconds = {name: each[kind] for name, each in waits.items()}

            def more(name: str, seconds: Mapping[str, Sequence[float]] = seconds) -> Row:
                pairs = zip(seconds[name], seconds[peer], strict=True)
                ratios = [own / theirs for own, theirs in pairs]  # of the same turn
                return {**spread_of(ratios), "optimizer": sizes.optimizer_of(name)}

            columns = {"part": "link", "case": f"M = {count}, {kind}", "microbatches": count}
            columns |= {"compute": f"{sizes.model.name}, {MBIT_PER_S} Mbit/s", "ranks": RANKS}
            yield rows_of(seconds, seconds[peer], f"wait of {peer}", more=more, **columns)


def bench_bubbles(sizes: Sizes) -> Iterator[list[Row]]:
    busy = 3 * sizes.forward  # seconds of work per rank and microbatch
    for ranks, count in sizes.deep:
        model = models.SleepingModel(2 * ranks, sizes.forward * ranks, 2 * sizes.forward * ranks)
        others = [peer for peer in DEEP_PEERS if peer.runs(ranks, count)]
        arguments = (model, [*sizes.ours(OURS), *others], count, Plan(sizes.bubble_turns, count))
        found = run_on_loopback(ranks, 400, limit.measure_bubbles, *arguments)[0]

        def more(name: str, found: Mapping[str, Speed] = found) -> Row:
            speed = found[name]
            return {
                "ratio": f"{speed.simulated / speed.median:.3f}",
                "bubble": f"{1 - busy / speed.median:.3f}",
                "bubble_on_paper": f"{max(0, 1 - busy / speed.simulated):.3f}",
                "weight_copies": " ".join(map(str, speed.weight_copies)),
            }

        seconds = {name: each.seconds for name, each in found.items()}
        columns = {"part": "bubbles", "case": f"{ranks} ranks, M = {count}", "ranks": ranks}
        compute = f"sleep {busy * 1e3:.0f} ms per microbatch on each rank, no compute"
        columns |= {"compute": compute, "microbatches": count}
        yield rows_of(seconds, [busy], "simulated speed", more=more, **columns)


PARTS = {
    "throughput": bench_throughput,
    "small": bench_small,
    "limit": bench_limit,
    "prediction": bench_prediction,
    "link": bench_link,
    "bubbles": bench_bubbles,
}

if __name__ == "__main__":
    optimizer = (ADAMW, "a class of AdamW, such as %(default)s")
    run_parts("pipeline", __doc__, PARTS, FIELDS, Sizes(), Dry(), optimizer=optimizer)
