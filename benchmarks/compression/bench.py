"""``python -m benchmarks.compression.bench [--parts links casts cost power_sgd] [--dry-run]``.

Two gloo processes on the CPU, one thread each, all compressors alternating within one run:

* ``links``: seconds per step of DistributedDataParallel with each compressor and with torch's
  hooks, on the loopback and on links of limited rate (network namespaces, which need root), bytes
  sent per step, and the prediction of ``python -m pyparallel recommend``.
* ``casts``: the same of 16-bit gradients alone, in more turns, against torch's hook.
* ``cost``: time to encode and decode 25 M parameters, against a backward pass of a transformer of
  that size on 8 x 128 bytes.
* ``power_sgd``: time of PowerSGD without communication, against torch's hook for it; one process.
"""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.compression import cost, links
from benchmarks.compression.systems import CASTS, SYSTEMS, TORCH_BF16
from benchmarks.harness.link import LOOPBACK, links_of
from benchmarks.harness.program import run_parts
from benchmarks.harness.ranks import run_on_loopback, run_ranks
from benchmarks.harness.rows import Row, rows_of, stamp
from benchmarks.pipeline.models import ByteModel
from benchmarks.pipeline.systems import Plan
from pyparallel.planning.recommend import DENSE

RANKS = 2  # a core for each
FIELDS = [
    "part", "case", "compute", "system", "options", "ranks", "numel", "median_ms", "p20_ms",
    "p80_ms", "ratio", "ratio_is", "encode_ms", "decode_ms", "payload_share", "wire_mb",
    "predicted_ms", "note",
    "torch", "commit",
]  # fmt: skip
OPTIONS = {system.name: system.options for system in (*SYSTEMS, *CASTS)}


class Sizes:
    """The sizes of the measurements."""

    on_links = ByteModel(width=256, num_blocks=4, num_heads=4, microbatch=4, length=128)
    rates = (100, 1000)  # Mbit/s
    links = Plan(turns=4, microbatches=2)
    casts = Plan(turns=9, microbatches=2)
    for_cost = ByteModel(width=512, num_blocks=8, num_heads=8, microbatch=8, length=128)
    cost_turns = 10
    power_sgd_layers = 6
    power_sgd_turns = 20


class Dry(Sizes):
    """Those of a dry run."""

    on_links = for_cost = ByteModel(width=48, num_blocks=2, num_heads=2, microbatch=1, length=8)
    rates = ()
    links = casts = Plan(turns=1, microbatches=1)
    cost_turns = power_sgd_layers = power_sgd_turns = 1


def bench_links(sizes: Sizes) -> Iterator[list[Row]]:
    for case, link in links_of(RANKS, sizes.rates):
        with link as place:
            speeds = run_ranks(RANKS, place, 570, links.measure, sizes.on_links, sizes.links)[0]
        yield rows_of_links(speeds, case, sizes.on_links)


def rows_of_links(speeds: dict[str, links.Speed], case: str, model: ByteModel) -> list[Row]:
    """Return a row per system, relative to plain DistributedDataParallel; a note if it fails."""
    numel = count_parameters(model)
    columns = {"part": "links", "case": case, "compute": model.name, "ranks": RANKS, "numel": numel}

    def more(name: str) -> Row:
        speed = speeds[name]
        return {
            "options": OPTIONS[name],
            "payload_share": share(speed.payload_bytes, numel),
            # The loopback carries all traffic of this machine.
            "wire_mb": "" if case == LOOPBACK else f"{speed.wire_bytes / 1e6:.3f}",
            "predicted_ms": "" if speed.predicted is None else f"{speed.predicted * 1e3:.3f}",
            "note": speed.problem,
        }

    seconds = {name: speed.seconds for name, speed in speeds.items() if speed.seconds}
    base = "time of fp32"
    rows = rows_of(seconds, seconds[DENSE.name], base, more=more, **columns)
    failed = [
        {**stamp(), **columns, "system": name, "ratio_is": base, **more(name)}
        for name, speed in speeds.items()
        if not speed.seconds
    ]
    order = list(speeds)
    return sorted([*rows, *failed], key=lambda row: order.index(row["system"]))


def bench_casts(sizes: Sizes) -> Iterator[list[Row]]:
    model = sizes.on_links
    for case, link in links_of(RANKS, sizes.rates):
        with link as place:
            seconds = run_ranks(RANKS, place, 570, links.measure_casts, model, sizes.casts)[0]
        base = seconds[TORCH_BF16.name]
        seconds = {system.name: seconds[system.name] for system in CASTS}
        columns = {"part": "casts", "case": case, "compute": model.name, "ranks": RANKS}
        columns |= {"numel": count_parameters(model)}
        columns["more"] = lambda name: {"options": OPTIONS[name]}
        yield rows_of(seconds, base, "time of torch's bf16 hook", **columns)


def bench_cost(sizes: Sizes) -> Iterator[list[Row]]:
    model = sizes.for_cost
    costs = run_on_loopback(RANKS, 570, cost.measure_compressors, model, sizes.cost_turns)[0]
    numel = count_parameters(model)

    def more(name: str) -> Row:
        each = costs[name]
        return {
            "options": OPTIONS.get(name, ""),
            "encode_ms": milliseconds(each.encode_seconds),
            "decode_ms": milliseconds(each.decode_seconds),
            "payload_share": share(each.payload_bytes, numel) if each.encode_seconds else "",
        }

    seconds = {name: each.seconds for name, each in costs.items()}
    columns = {"part": "cost", "case": f"{model.microbatch} x {model.length} bytes"}
    columns |= {"compute": model.name, "ranks": RANKS, "numel": numel}
    base = seconds[cost.BACKWARD]
    yield rows_of(seconds, base, "time of backward", digits=4, more=more, **columns)


def bench_power_sgd(sizes: Sizes) -> Iterator[list[Row]]:
    layout = cost.transformer(sizes.power_sgd_layers)
    seconds = run_on_loopback(1, 300, cost.measure_power_sgd, sizes.power_sgd_turns, layout)[0]
    rows = []
    for dtype in cost.DTYPES:
        own = {name: times for name, times in seconds.items() if name.endswith(f", {dtype}")}
        columns = {"part": "power_sgd", "case": f"gradients of {dtype}", "ranks": 1}
        columns["compute"] = f"a transformer's parameters, rank {cost.RANK}"
        columns["numel"] = layout.numel
        rows += rows_of(own, own[f"{cost.TORCH}, {dtype}"], "time of torch's hook", **columns)
    yield rows


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


if __name__ == "__main__":
    run_parts("compression", __doc__, PARTS, FIELDS, Sizes(), Dry())
