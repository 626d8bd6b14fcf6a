"""``python -m benchmarks.compression.bench [--parts links casts cost power_sgd] [--dry-run]``.

Two gloo processes on the CPU, one thread each, all compressors alternating within one run:

* ``links``: seconds per step of DistributedDataParallel with each compressor and with torch's
  hooks, on the loopback and on links of limited rate (network namespaces, which need root), bytes
  sent per step, and the prediction of ``python -m pyparallel recommend``.
* ``casts``: the same of 16-bit gradients alone, in more turns, against torch's hook.
* ``cost``: time to encode and decode 25 M parameters, against a backward pass of a transformer of
  that size on 8 x 128 bytes.
* ``power_sgd``: time of PowerSGD without communication, against torch's hook for it; one process.

Rows go to ``benchmarks/results/compression-<machine>.csv``, replacing those of the measured
parts. ``python -m benchmarks.compression.picture FILE.csv`` draws them. ``--dry-run`` measures a
minimum of everything, to test the script.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.compression import cost, links, power_sgd
from benchmarks.compression.systems import CASTS, SYSTEMS, TORCH_BF16
from benchmarks.harness.link import Rendezvous, limited_links, loopback
from benchmarks.harness.measure import commit, summary
from benchmarks.harness.program import Row, make_parser, measure
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline.models import ByteModel
from benchmarks.pipeline.turns import Plan
from pyparallel.compression import BufferLayout
from pyparallel.recommend import DENSE

RANKS = 2  # a core for each
FIELDS = [
    "part", "case", "compute", "system", "options", "ranks", "numel", "median_ms", "p20_ms",
    "p80_ms", "ratio", "ratio_is", "encode_ms", "decode_ms", "payload_share", "wire_mb",
    "predicted_ms", "note",
    "torch", "commit",
]  # fmt: skip
OPTIONS = {system.name: system.options for system in SYSTEMS}
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Args:
        rates: Mbit/s of the limited links.
    """

    on_links: ByteModel
    rates: Sequence[int]
    links: Plan
    casts: Plan
    for_cost: ByteModel
    cost_turns: int
    power_sgd_layers: int
    power_sgd_turns: int


FULL = Sizes(
    on_links=ByteModel(width=256, num_blocks=4, num_heads=4, microbatch=4, length=128),
    rates=(100, 1000),
    links=Plan(turns=4, microbatches=2),
    casts=Plan(turns=9, microbatches=2),
    for_cost=ByteModel(width=512, num_blocks=8, num_heads=8, microbatch=8, length=128),
    cost_turns=10,
    power_sgd_layers=6,
    power_sgd_turns=20,
)
DRY = Sizes(
    on_links=ByteModel(width=48, num_blocks=2, num_heads=2, microbatch=1, length=8),
    rates=(),
    links=Plan(turns=1, microbatches=1),
    casts=Plan(turns=1, microbatches=1),
    for_cost=ByteModel(width=48, num_blocks=2, num_heads=2, microbatch=1, length=8),
    cost_turns=1,
    power_sgd_layers=1,
    power_sgd_turns=1,
)


def bench_links(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on each link."""
    for case, link in find_links(sizes.rates):
        with link() as place:
            speeds = run_ranks(RANKS, place, 570, links.measure, sizes.on_links, sizes.links)[0]
        yield rows_of_links(speeds, case, sizes.on_links)


def find_links(
    rates: Sequence[int],
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Rendezvous]]]]:
    """Yield the loopback, and limited links if root."""
    yield LOOPBACK, loopback
    if rates and os.geteuid() != 0:
        print("links of limited rate: not measured, network namespaces need root")
        return
    for rate in rates:
        yield f"{rate} Mbit/s", lambda rate=rate: limited_links(RANKS, rate)


def rows_of_links(speeds: Mapping[str, links.Speed], case: str, model: ByteModel) -> list[Row]:
    """Return a row per system, relative to plain DistributedDataParallel."""
    numel = count_parameters(model)
    base = statistics.median(speeds[DENSE.name].seconds)
    return [
        {
            **(summary(speed.seconds) if speed.seconds else {"commit": commit()}),
            "part": "links",
            "case": case,
            "compute": model.name,
            "system": name,
            "options": OPTIONS[name],
            "ranks": RANKS,
            "numel": numel,
            "ratio": f"{statistics.median(speed.seconds) / base:.3f}" if speed.seconds else "",
            "ratio_is": "time of fp32",
            "payload_share": share(speed.payload_bytes, numel),
            # The loopback carries all traffic of this machine.
            "wire_mb": "" if case == LOOPBACK else f"{speed.wire_bytes / 1e6:.3f}",
            "predicted_ms": "" if speed.predicted is None else f"{speed.predicted * 1e3:.3f}",
            "note": speed.problem,
        }
        for name, speed in speeds.items()
    ]


def bench_casts(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure 16-bit gradients on each link."""
    model = sizes.on_links
    for case, link in find_links(sizes.rates):
        with link() as place:
            seconds = run_ranks(RANKS, place, 570, links.measure_casts, model, sizes.casts)[0]
        base = statistics.median(seconds[TORCH_BF16.name])
        yield [
            {
                **summary(seconds[system.name]),
                "part": "casts",
                "case": case,
                "compute": model.name,
                "system": system.name,
                "options": system.options,
                "ranks": RANKS,
                "numel": count_parameters(model),
                "ratio": f"{statistics.median(seconds[system.name]) / base:.3f}",
                "ratio_is": "time of torch's bf16 hook",
            }
            for system in CASTS
        ]


def bench_cost(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure without communication time."""
    model = sizes.for_cost
    with loopback() as place:
        costs = run_ranks(RANKS, place, 570, cost.measure, model, sizes.cost_turns)[0]
    yield rows_of_cost(costs, model)


def rows_of_cost(costs: Mapping[str, cost.Cost], model: ByteModel) -> list[Row]:
    """Return a row per compressor, relative to the backward pass."""
    numel = count_parameters(model)
    backward = statistics.median(costs[cost.BACKWARD].seconds)
    return [
        {
            **summary(each.seconds),
            "part": "cost",
            "case": f"{model.microbatch} x {model.length} bytes",
            "compute": model.name,
            "system": name,
            "options": OPTIONS.get(name, ""),
            "ranks": RANKS,
            "numel": numel,
            "ratio": f"{statistics.median(each.seconds) / backward:.4f}",
            "ratio_is": "time of backward",
            "encode_ms": milliseconds(each.encode_seconds),
            "decode_ms": milliseconds(each.decode_seconds),
            "payload_share": share(each.payload_bytes, numel) if each.encode_seconds else "",
        }
        for name, each in costs.items()
    ]


def bench_power_sgd(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on one rank, which sends nothing."""
    layout = power_sgd.transformer(sizes.power_sgd_layers)
    with loopback() as place:
        arguments = (time_power_sgd, sizes.power_sgd_turns, layout)
        seconds = run_ranks(1, place, 300, *arguments)[0]
    yield rows_of_power_sgd(seconds, layout)


def time_power_sgd(rank: int, turns: int, layout: BufferLayout) -> dict[str, list[float]]:
    return power_sgd.measure(turns, layout)


def rows_of_power_sgd(seconds: Mapping[str, Sequence[float]], layout: BufferLayout) -> list[Row]:
    """Return rows relative to torch's hook of the same dtype."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    dtypes = {name: name.rpartition(", ")[2] for name in seconds}
    return [
        {
            **summary(times),
            "part": "power_sgd",
            "case": f"gradients of {dtypes[name]}",
            "compute": f"a transformer's parameters, rank {power_sgd.RANK}",
            "system": name,
            "ranks": 1,
            "numel": layout.numel,
            "ratio": f"{medians[name] / medians[f'{power_sgd.TORCH}, {dtypes[name]}']:.3f}",
            "ratio_is": "time of torch's hook",
        }
        for name, times in seconds.items()
    ]


def count_parameters(model: ByteModel) -> int:
    return sum(parameter.numel() for layer in model.build() for parameter in layer.parameters())


def share(payload_bytes: int | None, numel: int) -> str:
    """Return the fraction of float32's bytes."""
    return "" if payload_bytes is None else f"{payload_bytes / (4 * numel):.4f}"


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3f}" if seconds else ""


PARTS = {
    "links": bench_links,
    "casts": bench_casts,
    "cost": bench_cost,
    "power_sgd": bench_power_sgd,
}


@dataclass(frozen=True)
class Goal:
    """An upper limit for a field of one row."""

    part: str
    name: str
    field: str
    limit: float
    means: str


GOALS = (
    Goal("cost", "int8-ef", "ratio", 0.10, "encoding and decoding, of the backward"),
    Goal("links", "topk-ef", "payload_share", 0.022, "messages with indices, of fp32's bytes"),
)


def print_goals(rows: Sequence[Row]) -> None:
    """Print the goals of the measured parts."""
    for goal in GOALS:
        for row in rows:
            if (row["part"], row["system"]) == (goal.part, goal.name):
                value = float(str(row[goal.field]))
                word = "reached" if value < goal.limit else "MISSED"
                print(f"{goal.name}, {row['case']}: {goal.means} {value:.2%}, "
                      f"goal below {goal.limit:.1%}: {word}")  # fmt: skip


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table."""
    print(f"\n{rows[0]['part']}, {rows[0]['case']}; {rows[0]['compute']}, {rows[0]['numel']:,}")
    print(
        f"{'system':<30} {'ms':>10} {'p20..p80':>19} {'ratio':>8} {'messages':>9} {'sent MB':>8} "
        f"{'predicted':>10}"
    )
    for row in rows:
        if row.get("note"):
            print(f"{row['system']:<30} does not run: {row['note']}")
            continue
        spread = f"{row['p20_ms']}..{row['p80_ms']}"
        print(f"{row['system']:<30} {row['median_ms']:>10} {spread:>19} {row['ratio']:>8} "
              f"{row.get('payload_share', ''):>9} {row.get('wire_mb', ''):>8} "
              f"{row.get('predicted_ms', ''):>10}")  # fmt: skip


def print_rows_and_goals(rows: Sequence[Row]) -> None:
    """Print rows, then goals."""
    print_rows(rows)
    print_goals(rows)


def main() -> None:
    options = make_parser("compression", __doc__, list(PARTS)).parse_args()
    sizes = DRY if options.dry_run else FULL
    measure("compression", PARTS, sizes, options, FIELDS, print_rows_and_goals)


if __name__ == "__main__":
    main()
