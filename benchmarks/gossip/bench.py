"""``python -m benchmarks.gossip.bench [--parts steps cost update ...] [--dry-run]``.

Four gloo processes on the CPU with one thread each; the methods take turns within one run:

* ``steps``: seconds per step of DDP and SGP for 10 M parameters, on loopback and on links of
  limited bandwidth (network namespaces, which need root), and how much communication SGP overlaps.
* ``closures``: the same of SGP with forward and backward in the closure of
  ``optimizer.step`` and without, at 1 Gbit/s.
* ``cost``: the cost of a round outside communication, compared with its ``mix_`` calls alone.
* ``update``: the cost of a step of SGP with overlap without communication, in one pass and in two.
* ``nonfinite``: the cost of a step of each policy for gradients that are not finite.
* ``stragglers``: how much speed the other ranks keep when some are slow.

Rows go to ``benchmarks/results/gossip-<machine>.csv``, where they replace those of the measured
parts. ``python -m benchmarks.gossip.picture FILE.csv`` draws them. ``--dry-run`` runs all with
tiny sizes, as a test.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gossip import cost, steps, stragglers, update
from benchmarks.gossip.models import RealCompute, SleepingCompute
from benchmarks.gossip.trainers import ALONE, DDP, RANKS
from benchmarks.harness.link import links_of
from benchmarks.harness.program import parser_of_parts, run_parts
from benchmarks.harness.ranks import run_on_loopback, run_ranks
from benchmarks.harness.rows import Row, rows_of

FIELDS = [
    "part", "case", "compute", "method", "ranks", "numel", "median_ms", "p20_ms", "p80_ms",
    "ratio", "ratio_is", "hidden", "lost_ms", "torch", "commit",
]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements.

    Args:
        rates: Mbit/s of the limited links.
        closure_rates: of the link in the part ``closures``, whose rounds take as long as a step.
        costs: models of the part ``cost``.
    """

    real: RealCompute
    sleeping: SleepingCompute
    rates: Sequence[int]
    closure_rates: Sequence[int]
    steps: steps.Plan
    costs: Sequence[RealCompute]
    cost_turns: int
    pause: float
    stragglers: stragglers.Plan


FULL = Sizes(
    real=RealCompute(layers=10, width=1024, batch=128),
    sleeping=SleepingCompute(layers=10, width=1024, seconds=0.3),
    rates=(2000, 1000, 500),
    closure_rates=(1000,),
    steps=steps.Plan(turns=4, steps=2),
    costs=(RealCompute(10, 1024, 1), RealCompute(10, 100, 1)),
    cost_turns=40,
    pause=0.1,
    stragglers=stragglers.Plan(turns=4, lead=16, steps=48, seconds=0.04),
)
DRY = Sizes(
    real=RealCompute(layers=2, width=64, batch=8),
    sleeping=SleepingCompute(layers=2, width=64, seconds=0.01),
    rates=(),
    closure_rates=(),
    steps=steps.Plan(turns=1, steps=1),
    costs=(RealCompute(2, 64, 1),),
    cost_turns=2,
    pause=0.01,
    stragglers=stragglers.Plan(turns=1, lead=2, steps=4, seconds=0.001),
)


def bench_steps(sizes: Sizes) -> Iterator[list[Row]]:
    for compute in (sizes.sleeping, sizes.real):
        for case, link in links_of(RANKS, sizes.rates):
            with link as place:
                arguments = (compute, sizes.steps, False)
                seconds = run_ranks(RANKS, place, 300, steps.measure, *arguments)[0]
            yield rows_of_steps("steps", case, compute, seconds, DDP.name)


def bench_closures(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure steps with closures and without on the slowest link that there is."""
    *_, (case, link) = links_of(RANKS, sizes.closure_rates)
    with link as place:
        arguments = (sizes.sleeping, sizes.steps, True)
        seconds = run_ranks(RANKS, place, 300, steps.measure, *arguments)[0]
    yield rows_of_steps("closures", case, sizes.sleeping, seconds, ALONE.name)


def rows_of_steps(
    part: str,
    case: str,
    compute: RealCompute | SleepingCompute,
    seconds: Mapping[str, Sequence[float]],
    base: str,
) -> list[Row]:
    def hidden(method: str) -> Row:
        overlaps = method.startswith("SGP, overlap=1")
        return {"hidden": f"{steps.hidden_fraction(seconds, method):.2f}"} if overlaps else {}

    return rows_of(
        seconds,
        seconds[base],
        f"time of {base}",
        name="method",
        digits=2,
        more=hidden,
        part=part,
        case=case,
        compute=compute.name,
        ranks=RANKS,
        numel=compute.numel,
    )


def bench_cost(sizes: Sizes) -> Iterator[list[Row]]:
    for model in sizes.costs:
        seconds = run_on_loopback(2, 120, cost.measure, model, sizes.cost_turns, sizes.pause)[0]
        yield rows_of(
            seconds,
            seconds[cost.MIX_ALONE],
            "time of the mix_ calls",
            name="method",
            digits=2,
            part="cost",
            case="outside communication",
            ranks=2,
            numel=model.numel,
        )


def bench_update(sizes: Sizes) -> Iterator[list[Row]]:
    for model in sizes.costs:
        seconds = run_on_loopback(2, 300, update.measure, model, sizes.cost_turns)[0]
        names = list(update.OPTIMIZERS)
        for two_passes, fused in zip(names[::2], names[1::2], strict=True):
            yield rows_of(
                {name: seconds[name] for name in (two_passes, fused)},
                seconds[two_passes],
                "time in two passes",
                name="method",
                digits=2,
                part="update",
                case="SGP(overlap=1), without communication",
                ranks=2,
                numel=model.numel,
            )


def bench_nonfinite(sizes: Sizes) -> Iterator[list[Row]]:
    arguments = (sizes.real, sizes.cost_turns)
    seconds = run_on_loopback(2, 300, update.measure_policies, *arguments)[0]
    for optimizer in update.POLICY_OPTIMIZERS:
        own = {policy: seconds[optimizer, policy] for policy in update.POLICIES}

        def ratio(policy: str, own: Mapping[str, Sequence[float]] = own) -> Row:
            pairs = zip(own[policy], own["allow"], strict=True)  # of the same turn
            return {"ratio": f"{statistics.median(time / base for time, base in pairs):.4f}"}

        yield rows_of(
            own,
            own["allow"],
            "time with allow",
            name="case",
            more=ratio,
            part="nonfinite",
            compute=sizes.real.name,
            method=optimizer,
            ranks=2,
            numel=sizes.real.numel,
        )


def bench_stragglers(sizes: Sizes) -> Iterator[list[Row]]:
    times: dict[tuple[str, str], list[float]] = {}
    for answer in run_on_loopback(RANKS, 580, stragglers.measure, sizes.stragglers):
        for key, values in answer.items():
            times.setdefault(key, []).extend(values)
    rows = []
    for (method, case), values in times.items():
        taken, even = (statistics.mean(times[method, each]) for each in (case, stragglers.EVEN))
        lost = {"ratio": f"{even / taken:.3f}", "lost_ms": f"{(taken - even) * 1e3:.2f}"}
        rows += rows_of(
            {method: values},
            values,
            "speed without stragglers",
            name="method",
            more=lambda _, lost=lost: lost,
            part="stragglers",
            case=case,
            compute=f"sleep {sizes.stragglers.seconds * 1e3:.0f} ms",
            ranks=RANKS,
            numel=stragglers.MODEL.numel,
        )
    yield rows


PARTS = {
    "cost": bench_cost,
    "update": bench_update,
    "nonfinite": bench_nonfinite,
    "stragglers": bench_stragglers,
    "closures": bench_closures,
    "steps": bench_steps,
}


def main() -> None:
    options = parser_of_parts("gossip", __doc__, PARTS).parse_args()
    run_parts("gossip", PARTS, DRY if options.dry_run else FULL, options, FIELDS)


if __name__ == "__main__":
    main()
