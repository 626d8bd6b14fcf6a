"""The tables of this folder's programs but ``bench``."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.harness import tables
from benchmarks.harness.options import shorten
from benchmarks.harness.rows import Row
from pyparallel.gossip import (
    SGP,
    Algorithm,
    AllReduce,
    DiLoCo,
    NoLoCo,
    SparseLoCo,
    StreamingDiLoCo,
)
from pyparallel.gossip.topology import OnePeerExponential, RandomMatching
from pyparallel.planning.recommend import Link, StepTime, choose, predict
from pyparallel.planning.simulate import Cost, Profile

BASELINE = "allreduce"
ALL_REDUCE = "all-reduce"  # of the runs of rates.py


def by_algorithm(rows: Sequence[Row], data: str) -> dict[str, list[Row]]:
    groups = tables.grouped(tables.where(rows, data=data), "algorithm")
    return dict(sorted(groups.items(), key=lambda item: (item[0] != BASELINE, item[0])))


def markdown(rows: Sequence[Row]) -> str:
    parts = [(by_algorithm(rows, measure.data), measure) for measure in tables.MEASURES]
    return "\n".join(_table(groups, measure) for groups, measure in parts if groups)


def _table(groups: dict[str, list[Row]], measure: tables.Measure) -> str:
    steps = " or ".join(sorted({row["steps"] for rows in groups.values() for row in rows}))
    head = [
        f"{measure.title}, {steps} steps",
        "mean of seeds",
        f"against all-reduce, {measure.unit}",
        "kB sent per step and rank",
        "seeds",
    ]
    lines = []
    for algorithm, rows in groups.items():
        found = tables.differences(rows, groups.get(BASELINE, []), measure)
        lines.append([
            f"{algorithm}: `{shorten(rows[0]['options'])}`",
            measure.show.format(tables.mean(rows, "score")),
            f"{statistics.fmean(found):+.2f}" if found and algorithm != BASELINE else "",
            kilobytes(rows),
            len(rows),
        ])  # fmt: skip
    return tables.markdown_table(head, lines)


def kilobytes(rows: Sequence[Row]) -> str:
    return f"{tables.mean(rows, 'step_bytes') / 1e3:,.0f}"


def spread(rows: Sequence[Row], measure: tables.Measure) -> str:
    scores = [float(row["score"]) for row in rows]
    found = (statistics.fmean(scores), min(scores), max(scores))
    return "{} ({} to {})".format(*map(measure.show.format, found))


def orders(rows: Sequence[Row]) -> str:
    """Return a table for each dataset of the runs of ``rates``: at one rate and at each one's own.

    The rates with the most seeds are those that the search has chosen.
    """
    parts = []
    for measure in tables.MEASURES:
        by_name = _by(tables.where(rows, part="orders", data=measure.data), "algorithm")
        if not by_name:
            continue
        common, lines = _chosen(by_name[ALL_REDUCE])[0], []
        for name, found in by_name.items():
            own = next((rate for rate in _chosen(found) if rate != common), common)
            at_common, at_own = (tables.where(found, rate=rate) for rate in (common, own))
            spreads = spread(at_common, measure), own, spread(at_own, measure)
            lines.append([name, *spreads, kilobytes(at_own)])
        head = [
            measure.title,
            f"at {common}, all-reduce's best rate",
            "own best rate",
            "at that rate",
            "kB per step and rank",
        ]
        parts.append(tables.markdown_table(head, lines))
    return "\n".join(parts)


def hybrids(rows: Sequence[Row]) -> str:
    schedules = tables.where(rows, part="hybrids")
    rates = {(row["data"], row["rate"]) for row in schedules}
    exact = tables.where(rows, part="orders", algorithm=ALL_REDUCE)
    exact = [row for row in exact if (row["data"], row["rate"]) in rates]
    lines = []
    for name, found in _by([*exact, *schedules], "algorithm").items():
        of_data = [(tables.where(found, data=measure.data), measure) for measure in tables.MEASURES]
        lines.append([name, *(x for own, m in of_data for x in (spread(own, m), kilobytes(own)))])
    return tables.markdown_table(
        ["", *(x for m in tables.MEASURES for x in (m.title, "kB"))], lines
    )


def scaling(rows: Sequence[Row]) -> str:
    found = tables.where(rows, part="scaling")
    base = min(float(row["rate"]) for row in found)
    head = ["ranks", "steps", "", "rate of one rank", "times the ranks", "times the ranks, warm-up"]
    lines = []
    for ranks, of_ranks in sorted(_by(found, "ranks").items(), key=lambda item: int(item[0])):
        for name, mine in _by(of_ranks, "algorithm").items():
            cells = [ranks, mine[0]["steps"], name]
            for warm, rate in (
                (False, base),
                (False, base * int(ranks)),
                (True, base * int(ranks)),
            ):
                runs = [
                    row
                    for row in mine
                    if abs(float(row["rate"]) - rate) < 1e-9 and (row["warm_up"] != "0") == warm
                ]
                cells.append(spread(runs, tables.MEASURES[0]) if runs else "")
            lines.append(cells)
    return tables.markdown_table(head, lines)


def biased(rows: Sequence[Row]) -> str:
    lines = []
    for name, found in _by(tables.where(rows, part="biased"), "algorithm").items():
        scores = [spread(tables.where(found, data=each.data), each) for each in tables.MEASURES]
        far = statistics.median(float(row["consensus_distance"]) for row in found)
        lines.append([name, *scores, f"{far:.2g}"])
    return tables.markdown_table(
        ["", *(m.title for m in tables.MEASURES), "distance between ranks"], lines
    )


def _by(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    return tables.grouped(rows, column, [ALL_REDUCE])


def _chosen(rows: Sequence[Row]) -> list[str]:
    """Return the rates with the most seeds, ascending."""
    groups = tables.grouped(rows, "rate")
    most = max(map(len, groups.values()))
    return sorted((rate for rate, each in groups.items() if len(each) == most), key=float)


def outer_steps(rows: Sequence[Row]) -> str:
    """Return a table for each task and link of outer steps, of the runs at each one's best rate.

    The loss of DDP is that of any link, the time is not.
    """
    measure, parts = tables.measure_of("text"), []
    for (task, link), of_link in _by_task_and_link(rows):
        baseline = _at_best_rate(tables.where(rows, task=task, algorithm="ddp"))
        of_ddp = tables.mean(baseline, "bits_per_parameter")
        if all(row["algorithm"].startswith("ddp") for row in of_link):
            continue
        by_name = tables.grouped(of_link, "algorithm", ["ddp", "ddp-muon"])
        by_name = {"ddp": baseline} | by_name
        best = {name: _at_best_rate(found) for name, found in by_name.items()}
        head = [
            f"{task}, {link}, {of_link[0]['ranks']} ranks, {of_link[0]['steps']} steps",
            "rate",
            measure.title,
            "against DDP with AdamW",
            "bits a parameter and step",
            "fewer",
            "waiting",
            "seconds",
        ]
        lines = []
        for name, found in best.items():
            differences = [] if name == "ddp" else tables.differences(found, baseline, measure)
            bits = tables.mean(found, "bits_per_parameter")
            is_here = found[0]["link"] == link
            lines.append([
                name,
                found[0]["rate"],
                measure.show.format(tables.mean(found, "score")),
                ", ".join(f"{each:+.1f}" for each in differences) + " %" * bool(differences),
                f"{bits:.3g}",
                f"{of_ddp / bits:,.0f}x",
                f"{100 * _median(found, 'waiting'):.1f} %" * is_here,
                f"{_median(found, 'seconds'):.0f}" * is_here,
            ])  # fmt: skip
        parts.append(tables.markdown_table(head, lines))
    return "\n".join(parts)


def sharded(rows: Sequence[Row]) -> str:
    """Return a table for each link of shards, beside HSDP."""
    measure, parts = tables.measure_of("text"), []
    for link, of_link in tables.grouped(rows, "link").items():
        by_name = tables.grouped(of_link, "method", ["HSDP"])
        base = by_name.get("HSDP") or of_link
        head = [
            f"{link}, {of_link[0]['ranks']} ranks, {of_link[0]['steps']} steps",
            measure.title,
            "against HSDP",
            "bits a parameter and step",
            "seconds",
            "speed",
            "peak MiB of a rank",
        ]
        lines = []
        for name, found in by_name.items():
            differences = [] if name == "HSDP" else tables.differences(found, base, measure)
            lines.append([
                name,
                measure.show.format(tables.mean(found, "score")),
                ", ".join(f"{each:+.1f}" for each in differences) + " %" * bool(differences),
                f"{tables.mean(found, 'bits'):.3g}",
                f"{_median(found, 'seconds'):.0f}",
                f"{_median(base, 'seconds') / _median(found, 'seconds'):.1f}x",
                f"{_median(found, 'peak_mib'):.0f}",
            ])  # fmt: skip
        parts.append(tables.markdown_table(head, lines))
    return "\n".join(parts)


def _by_task_and_link(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    for task, of_task in tables.grouped(rows, "task").items():
        for link, found in tables.grouped(of_task, "link").items():
            yield (task, link), found


def _at_best_rate(rows: Sequence[Row]) -> list[Row]:
    """Return the rows at the rate of the most seeds, or at the best of as many."""
    by_rate = tables.grouped(rows, "rate").values()
    return max(by_rate, key=lambda found: (len(found), -tables.mean(found, "score")))


def _median(rows: Sequence[Row], field: str) -> float:
    return statistics.median(float(row[field]) for row in rows)


def fastest(rows: Sequence[Row]) -> str:
    """Return a table of predictions: what is fastest by link, ranks and size of the model.

    A step computes for half a second; encoding is not counted. Simpler ways come first, and another
    is named if it is faster than all of these by more than ``NOISE``.
    """
    sizes, lines = [1e7, 1e8, 1e9], []
    for rate, ranks in product((1e3, 100, 20), (4, 64)):
        link = Link(rate * 1e6 / 8, 1e-3, ranks)
        found = [choose(_predictions(size, link)) for size in sizes]
        cells = [f"{each.name}, {each.step:,.2f} s" for each in found]
        lines.append([f"{rate:,.0f} Mbit/s", ranks, *cells])
    return tables.markdown_table(["link", "ranks", "10 M", "100 M", "1 B parameters"], lines)


def _predictions(size: float, link: Link) -> list[StepTime]:
    """Return the predicted steps of a model of so many parameters, the simplest way first."""
    ranks = link.num_ranks
    around, to_all = 2 * (ranks - 1) / ranks, ranks - 1

    def step(name: str, bits: float, algorithm: Algorithm) -> StepTime:
        cost = Cost(name, 0.0, bits * size / 8, bits * size / 8, 1, (0.1,) * 10)
        return predict(cost, Profile(0.5, 0.4), link, algorithm)

    pairs, sparse = NoLoCo(RandomMatching(ranks)), 14 / 64  # bits of an entry
    return [
        step("DDP", 32 * around, AllReduce()),
        step("DDP in bfloat16", 16 * around, AllReduce()),
        step("`SGP(overlap=1)`", 32, SGP(OnePeerExponential(ranks), overlap=1)),
        step("`DiLoCo`", 32 * around, DiLoCo()),
        step("`StreamingDiLoCo`", 4 * around, StreamingDiLoCo()),
        step("`SparseLoCo`", sparse * to_all, SparseLoCo()),
        step("`NoLoCo`, sparse", sparse + 32 / pairs.pull_turns, pairs),
    ]


def sharded_merge(rows: Sequence[Row]) -> str:
    """Return a table of rounds of shards beside plain replicas that send as many bytes."""
    lines = []
    for name, found in tables.grouped(rows, "algorithm").items():
        ratios = sorted(float(row["ratio"]) for row in found)
        times = (f"{_median(found, each):.1f}" for each in ("sharded_ms", "plain_ms"))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append([name, *times, spread])
    return tables.markdown_table(["", "ms of shards", "ms of plain replicas", "ratio"], lines)


def scale(rows: Sequence[Row]) -> str:
    """Return held-out loss of the average for each number of ranks, the mean of the seeds."""
    parts = []
    for scaling, own in tables.grouped(rows, "scaling").items():
        by_ranks = tables.grouped(own, "ranks")
        counts = sorted(by_ranks, key=int)
        lines = []
        for method in tables.grouped(own, "method", ["all-reduce", "one peer"]):
            cells = [method]
            for count in counts:
                found = [row for row in by_ranks[count] if row["method"] == method]
                if found:
                    means = (tables.mean(found, each) for each in ("held_out_bits", "distance"))
                    cells.append("{:.3f}, {:.2%}".format(*means))
                else:
                    cells.append("")
            lines.append(cells)
        head = [f"rate of one rank, {scaling} in the ranks", *(f"{each} ranks" for each in counts)]
        parts.append(tables.markdown_table(head, lines))
    return "\n".join(parts)


def bets(rows: Sequence[Row]) -> str:
    """Return what each bet has predicted and what its run took, in ms, and the error of it."""
    cases = list(product(tables.grouped(rows, "link"), tables.grouped(rows, "stragglers")))
    lines = []
    for algorithm, own in tables.grouped(rows, "algorithm").items():
        cells = [tables.where(own, link=link, stragglers=law) for link, law in cases]
        lines.append([f"`{algorithm}`", *(_bet(*found) if found else "" for found in cells)])
    head = [f"{link}, {law.replace('none', 'no stragglers')}" for link, law in cases]
    return tables.markdown_table(["", *head], lines)


def _bet(row: Row) -> str:
    measured, error = row["measured_ms"], row["error"]
    found = f"{float(measured):.0f} ({100 * float(error):+.0f} %)" if error else "?"
    return f"{float(row['predicted_ms']):.0f}, {found}"


def bet_errors(rows: Sequence[Row]) -> str:
    """Return quantiles of the errors of bets, and of their parts, in percent of a measured step."""
    found: dict[str, list[float]] = {"a step": [], "waiting": [], "the rest of a step": []}
    for row in rows:
        whole, waiting = (
            float(row[f"predicted_{part}ms"]) - float(row[f"measured_{part}ms"])
            for part in ("", "waiting_")
        )
        for errors, error in zip(found.values(), (whole, waiting, whole - waiting), strict=True):
            errors.append(100 * abs(error) / float(row["measured_ms"]))
    lines = []
    for part, errors in found.items():
        tenths = statistics.quantiles(errors, n=10, method="inclusive")
        lines.append([part, f"{tenths[4]:.1f} %", f"{tenths[8]:.1f} %"])
    return tables.markdown_table(["error of", "half are below", "nine in ten are below"], lines)
