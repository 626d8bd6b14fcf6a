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
* ``leaders``: the same of methods that follow leaders or a center.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.gossip import cost, trainers
from benchmarks.gossip.models import RealCompute, SleepingCompute
from benchmarks.gossip.trainers import ALONE, DDP, RANKS, StragglerPlan
from benchmarks.harness.link import links_of
from benchmarks.harness.program import run_parts
from benchmarks.harness.ranks import run_on_loopback, run_ranks
from benchmarks.harness.rows import Row, rows_of

FIELDS = [
    "part", "case", "compute", "method", "ranks", "numel", "median_ms", "p20_ms", "p80_ms",
    "ratio", "ratio_is", "hidden", "lost_ms", "torch", "commit",
]  # fmt: skip


class Sizes:
    """The sizes of all measurements."""

    real = RealCompute(layers=10, width=1024, batch=128)
    sleeping = SleepingCompute(layers=10, width=1024, seconds=0.3)
    rates = (2000, 1000, 500)  # Mbit/s
    closure_rates = (1000,)  # rounds take as long as a step
    turns_and_steps = 4, 2
    costs = (RealCompute(10, 1024, 1), RealCompute(10, 100, 1))
    cost_turns = 40
    pause = 0.1  # seconds in which messages arrive
    stragglers = StragglerPlan(turns=4, lead=16, steps=48, seconds=0.04)


class Dry(Sizes):
    """Those of a dry run."""

    real = RealCompute(layers=2, width=64, batch=8)
    sleeping = SleepingCompute(layers=2, width=64, seconds=0.01)
    rates = closure_rates = ()
    turns_and_steps = 1, 1
    costs = (RealCompute(2, 64, 1),)
    cost_turns = 2
    pause = 0.01
    stragglers = StragglerPlan(turns=1, lead=2, steps=4, seconds=0.001)


def bench_steps(sizes: Sizes) -> Iterator[list[Row]]:
    for compute in (sizes.sleeping, sizes.real):
        for case, link in links_of(RANKS, sizes.rates):
            with link as place:
                arguments = (trainers.measure_steps, compute, *sizes.turns_and_steps)
                seconds = run_ranks(RANKS, place, 300, *arguments)[0]
            yield rows_of_steps("steps", case, compute, seconds, DDP.name)


def bench_closures(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on the slowest link that there is."""
    *_, (case, link) = links_of(RANKS, sizes.closure_rates)
    with link as place:
        arguments = (trainers.measure_closures, sizes.sleeping, *sizes.turns_and_steps)
        seconds = run_ranks(RANKS, place, 300, *arguments)[0]
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
        fraction = trainers.hidden_fraction
        return {"hidden": f"{fraction(seconds, method):.2f}"} if overlaps else {}

    columns = {"compute": compute.name, "ranks": RANKS, "numel": compute.numel}
    return rows_of_methods(seconds, base, f"time of {base}", part, case, more=hidden, **columns)


def rows_of_methods(
    seconds: Mapping[str, Sequence[float]],
    base: str,
    ratio_is: str,
    part: str,
    case: str,
    **columns: object,
) -> list[Row]:
    """Return a row for each method, relative to one of them."""
    own = {"part": part, "case": case, **columns}
    return rows_of(seconds, seconds[base], ratio_is, name="method", digits=2, **own)


def bench_cost(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure on two ranks, with a core each."""
    for model in sizes.costs:
        arguments = (cost.measure_rounds, model, sizes.cost_turns, sizes.pause)
        seconds = run_on_loopback(2, 120, *arguments)[0]
        names = (cost.MIX_ALONE, "time of the mix_ calls", "cost", "outside communication")
        yield rows_of_methods(seconds, *names, ranks=2, numel=model.numel)


def bench_update(sizes: Sizes) -> Iterator[list[Row]]:
    for model in sizes.costs:
        found = run_on_loopback(2, 300, cost.measure_updates, model, sizes.cost_turns)[0]
        names = list(cost.OPTIMIZERS)
        for pair in zip(names[::2], names[1::2], strict=True):
            seconds = {name: found[name] for name in pair}
            case = "SGP(overlap=1), without communication"
            columns = {"ranks": 2, "numel": model.numel}
            yield rows_of_methods(seconds, pair[0], "time in two passes", "update", case, **columns)


def bench_nonfinite(sizes: Sizes) -> Iterator[list[Row]]:
    arguments = (sizes.real, sizes.cost_turns)
    seconds = run_on_loopback(2, 300, cost.measure_policies, *arguments)[0]
    for optimizer in cost.POLICY_OPTIMIZERS:
        own = {policy: seconds[optimizer, policy] for policy in cost.POLICIES}

        def ratio(policy: str, own: Mapping[str, Sequence[float]] = own) -> Row:
            pairs = zip(own[policy], own["allow"], strict=True)  # of the same turn
            return {"ratio": f"{statistics.median(time / base for time, base in pairs):.4f}"}

        columns = {"method": optimizer, "ranks": 2, "numel": sizes.real.numel}
        columns |= {"part": "nonfinite", "compute": sizes.real.name}
        yield rows_of(own, own["allow"], "time with allow", name="case", more=ratio, **columns)


def bench_stragglers(sizes: Sizes) -> Iterator[list[Row]]:
    """Measure the speed of each method with stragglers, relative to without."""
    yield rows_of_stragglers("stragglers", trainers.measure_stragglers, sizes)


def bench_leaders(sizes: Sizes) -> Iterator[list[Row]]:
    yield rows_of_stragglers("leaders", trainers.measure_leaders, sizes)


def rows_of_stragglers(part: str, measure: Callable[..., object], sizes: Sizes) -> list[Row]:
    times: dict[tuple[str, str], list[float]] = {}
    for answer in run_on_loopback(RANKS, 580, measure, sizes.stragglers):
        for key, values in answer.items():
            times.setdefault(key, []).extend(values)
    columns = {"ranks": RANKS, "numel": trainers.STRAGGLING_MODEL.numel}
    columns["compute"] = f"sleep {sizes.stragglers.seconds * 1e3:.0f} ms"
    rows = []
    for (method, case), values in times.items():
        taken, even = (statistics.mean(times[method, each]) for each in (case, trainers.EVEN))
        lost = {"ratio": f"{even / taken:.3f}", "lost_ms": f"{(taken - even) * 1e3:.2f}"}
        names = (method, "speed without stragglers", part, case)
        rows += rows_of_methods({method: values}, *names, more=lambda _, lost=lost: lost, **columns)
    return rows


PARTS = {
    "cost": bench_cost,
    "update": bench_update,
    "nonfinite": bench_nonfinite,
    "stragglers": bench_stragglers,
    "leaders": bench_leaders,
    "closures": bench_closures,
    "steps": bench_steps,
}

if __name__ == "__main__":
    run_parts("gossip", __doc__, PARTS, FIELDS, Sizes(), Dry())
