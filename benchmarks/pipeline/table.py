"""The tables of this folder's programs but ``bench``."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.harness.options import shorten
from benchmarks.harness.rows import Row
from benchmarks.harness.tables import (
    Measure,
    differences,
    grouped,
    markdown_table,
    mean,
    of,
    values,
    where,
)
from benchmarks.pipeline.tasks import TASKS, Task

BASELINE = "gpipe"
ORDER = [BASELINE, "pipedream", "2bw", "spectrain", "xpipe", "pipeoptim", "naive"]
TRAINING = Measure("training loss", "%", "{:.4f}", 1, "training_loss")
HELD_OUT = Measure("held-out loss", "%", "{:.4f}", 1, "held_out_loss")
ACCURACY = Measure("held-out accuracy", "points", "{:.2%}", 1, "held_out_accuracy")


def measure_of(rows: Iterable[Row]) -> Measure:
    """Return the main metric of a task: accuracy if it has one."""
    return ACCURACY if any(row[ACCURACY.field] for row in rows) else HELD_OUT


def select(
    rows: Sequence[Row], task: Task, rate: float, order: Sequence[str] = ORDER
) -> dict[str, list[Row]]:
    """Return the rows of each schedule at one learning rate, the baseline first."""
    own = [row for row in where(rows, task=task.name) if float(row["rate"]) == rate]
    return grouped(own, "schedule", order)


def finite_differences(
    rows: Iterable[Row], baseline: Iterable[Row], measure: Measure
) -> list[float]:
    """Return the differences by seed, of the runs that did not diverge."""
    own, exact = ([row for row in each if values([row], measure)] for each in (rows, baseline))
    return differences(own, exact, measure)


def markdown(rows: Sequence[Row]) -> str:
    """Return two tables per task: all schedules at the main rate, and some at all rates."""
    found = [(task, where(rows, task=task.name)) for task in TASKS]
    parts = [
        table(own, task) for task, own in found if own for table in (_main_table, _sweep_table)
    ]
    return "\n".join(part for part in parts if part)


def _main_table(rows: Sequence[Row], task: Task) -> str:
    groups = select(rows, task, task.main_rate)
    measures = [measure_of(rows), TRAINING]
    updates = " or ".join(sorted({row["updates"] for group in groups.values() for row in group}))
    head = [
        f"{task.name}, lr {task.main_rate:g}, {updates} updates",
        *(f"{each.title} (against GPipe)" for each in measures),
        "weight copies by stage",
        "seeds",
    ]
    lines = [
        [
            f"{name}: `{shorten(group[0]['options'])}`",
            *(_cell(group, groups.get(BASELINE, []), each) for each in measures),
            group[0]["weight_copies"],
            len(group),
        ]
        for name, group in groups.items()
    ]
    return markdown_table(head, lines)


def swept(
    rows: Sequence[Row], task: Task, order: Sequence[str] = ORDER
) -> tuple[dict[float, dict[str, list[Row]]], list[str]]:
    """Return the rows at each rate, and the names of what was trained at several."""
    at_rates = {rate: select(rows, task, rate, order) for rate in task.rates}
    return at_rates, [
        name for name in order if sum(name in groups for groups in at_rates.values()) > 1
    ]


def _sweep_table(rows: Sequence[Row], task: Task) -> str:
    """Return the table of all rates; empty if there is only one."""
    if len(task.rates) == 1:
        return ""
    (at_rates, names), measure = swept(rows, task), measure_of(rows)
    lines = []
    for name in names:
        pairs = [(each.get(name, []), each.get(BASELINE, [])) for each in at_rates.values()]
        lines.append([name, *(_cell(*pair, measure) for pair in pairs)])
    head = [f"{task.name}, {measure.title} (against GPipe)", *(f"lr {rate:g}" for rate in at_rates)]
    return markdown_table(head, lines)


def _cell(rows: Sequence[Row], baseline: Sequence[Row], measure: Measure) -> str:
    """Return the mean over seeds, its difference from the baseline, and the diverged runs."""
    found = values(rows, measure)
    of_pairs = finite_differences(rows, baseline, measure)
    parts = [measure.show.format(statistics.fmean(found))] if found else []
    if of_pairs and rows[0]["schedule"] != BASELINE:
        parts.append(f"({statistics.fmean(of_pairs):+.1f} {measure.unit})")
    if len(found) < len(rows):
        parts.append(f"{len(rows) - len(found)} of {len(rows)} diverged")
    return " ".join(parts)


def by_model(rows: Sequence[Row]) -> str:
    """Return for each model the mean held-out loss of each schedule, at its best rate."""
    found = at_best_rates(rows)
    lines = []
    for task, by_schedule in found.items():
        best = min(mean(own, HELD_OUT.field) for own in by_schedule.values())
        cells = []
        for own in by_schedule.values():
            loss = mean(own, HELD_OUT.field)
            mark = "**" if loss == best else ""
            cells.append(f"{mark}{loss:.4f}{mark} at {own[0]['rate']}")
        lines.append([task, *cells])
    head = ["held-out loss at the best rate", *next(iter(found.values()), [])]
    return markdown_table(head, lines)


def rivals_of_pipeoptim(rows: Sequence[Row]) -> str:
    """Return against whom PipeOptim has the lower loss: models by the mean, and single seeds."""
    found = at_best_rates(rows)
    lines = []
    for rival in (name for name in next(iter(found.values()), []) if name != "pipeoptim"):
        pairs = [(own["pipeoptim"], own[rival]) for own in found.values()]
        gaps = [
            HELD_OUT.difference(*(mean(each, HELD_OUT.field) for each in pair)) for pair in pairs
        ]
        seeds = [
            float(ours[HELD_OUT.field]) < float(theirs[HELD_OUT.field])
            for pair in pairs
            for ours, theirs in zip(*pair, strict=True)
        ]
        spread = f"{statistics.median(gaps):+.1f} % ({min(gaps):+.1f} to {max(gaps):+.1f})"
        wins = sum(gap < 0 for gap in gaps)
        lines.append([rival, f"{wins} of {len(gaps)}", f"{sum(seeds)} of {len(seeds)}", spread])
    head = ["PipeOptim against", "models with a lower loss", "runs", "loss, median of models"]
    return markdown_table(head, lines)


def at_best_rates(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return the rows of the rate that the first seed has chosen, by model and schedule.

    Models that not all schedules have trained are left out.
    """
    found: dict[str, dict[str, list[Row]]] = {}
    for task, of_task in grouped(rows, "task").items():
        for name, own in grouped(of_task, "schedule", ORDER).items():
            first = where(own, seed=min(row["seed"] for row in own))
            best = min(first, key=lambda row: float(row[HELD_OUT.field]))
            at_best = sorted(where(own, rate=best["rate"]), key=lambda row: row["seed"])
            found.setdefault(task, {})[name] = at_best
    return {task: own for task, own in found.items() if len(own) == len(of(rows, "schedule"))}


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}  # of the column ``optimizer``
PLAIN = "none"  # of the column ``correction``
SEARCHED = "500"  # updates
Contestant = tuple[str, str]  # a schedule and a correction
GPIPE = ("GPipe", PLAIN)


def searched(rows: Sequence[Row]) -> str:
    """Return for each number of stages the best rate of each contestant, and the loss at it."""
    parts = []
    for stages, of_depth in grouped(where(rows, updates=SEARCHED), "stages").items():
        head = [f"{stages} stages, {SEARCHED} updates"]
        for name in OPTIMIZERS.values():
            head += [f"{name}: rate", "bits per byte"]
        lines = []
        for contestant in contestants(of_depth):
            cells = [label(contestant)]
            for optimizer in OPTIMIZERS:
                found = trained(of_depth, contestant, optimizer)
                best = min(found, key=bits) if found else None
                cells += [best["rate"], f"{bits(best):.3f}"] if best else ["", ""]
            lines.append(cells)
        parts.append(markdown_table(head, lines))
    return "\n".join(parts)


def finals(rows: Sequence[Row]) -> str:
    """Return the long runs at each one's own rate and at GPipe's, for each number of stages."""
    parts = []
    for stages, own in grouped(long_runs(rows), "stages").items():
        updates, seeds = own[0]["updates"], len({row["seed"] for row in own})
        head = [
            f"{stages} stages, {int(updates):,} updates, {seeds} seeds",
            "rate",
            "bits per byte (least to greatest)",
            "against GPipe with the same optimizer",
            "against GPipe with AdamW",
        ]
        first, lines = best_runs(own, GPIPE, "adamw"), []
        for optimizer, name in OPTIMIZERS.items():
            exact = best_runs(own, GPIPE, optimizer)
            for contestant in contestants(own):
                for rate, group in by_rate(own, contestant, optimizer).items():
                    found = [bits(row) for row in group]
                    lines.append([
                        f"{label(contestant)}, {name}",
                        rate,
                        f"{statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})",
                        *(f"{behind(group, each):+.1f} %" for each in (exact, first)),
                    ])  # fmt: skip
        parts.append(markdown_table(head, lines))
    return "\n".join(parts)


def contestants(rows: Sequence[Row]) -> list[Contestant]:
    """Return schedules and corrections: first GPipe, then those without a correction."""
    found = dict.fromkeys((row["schedule"], row["correction"]) for row in rows)
    return sorted(found, key=lambda each: (each != GPIPE, each[1] != PLAIN, each))


def trained(rows: Sequence[Row], contestant: Contestant, optimizer: str) -> list[Row]:
    return where(rows, schedule=contestant[0], correction=contestant[1], optimizer=optimizer)


def long_runs(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of ``optimizers`` that trained for longer than the search."""
    return [row for row in rows if "stages" in row and row["updates"] != SEARCHED]


def by_rate(rows: Sequence[Row], contestant: Contestant, optimizer: str) -> dict[str, list[Row]]:
    own = grouped(trained(long_runs(rows), contestant, optimizer), "rate")
    return {rate: own[rate] for rate in sorted(own, key=float)}


def best_runs(rows: Sequence[Row], contestant: Contestant, optimizer: str) -> list[Row]:
    """Return the long runs at the rate that is best; none if there are none."""
    return min(by_rate(rows, contestant, optimizer).values(), key=mean_bits, default=[])


def label(contestant: Contestant) -> str:
    schedule, correction = contestant
    return schedule if correction == PLAIN else f"{schedule}, {correction}"


def bits(row: Row) -> float:
    return float(row["held_out_bits"])


def mean_bits(rows: Sequence[Row]) -> float:
    return statistics.fmean(map(bits, rows))


def behind(rows: Sequence[Row], baseline: Sequence[Row]) -> float:
    return 100 * (mean_bits(rows) / mean_bits(baseline) - 1)


def race(rows: Sequence[Row]) -> str:
    """Return the end of each training on the clock, and how far ours is from torch's, by seed."""
    trainings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        names = "system", "optimizer", "rate", "microbatches"
        trainings.setdefault(tuple(row[name] for name in names), []).append(row)
    ends = {
        names: [own[-1] for own in grouped(found, "seed").values()]  # of each seed
        for names, found in trainings.items()
    }
    theirs = {names[1]: own for names, own in ends.items() if names[0] != "PipeOptim"}
    head = ["", "rate", "microbatches an update", "updates", "seconds"]
    head += [
        "bits at the end (least to greatest)",
        "against torch with the same optimizer, by seed",
    ]
    lines = []
    for (system, optimizer, *columns), own in ends.items():
        found = [bits(row) for row in own]
        gaps = [behind([row], [other]) for row, other in zip(own, theirs[optimizer], strict=True)]
        lines.append([
            f"{system}, {OPTIMIZERS[optimizer]}",
            *columns,
            own[0]["updates"],
            f"{mean(own, 'seconds'):.1f}",
            f"{statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})",
            ", ".join(f"{gap:+.1f} %" for gap in gaps) if system == "PipeOptim" else "",
        ])  # fmt: skip
    return markdown_table(head, lines)


def replicas(rows: Sequence[Row]) -> str:
    """Return a table of tokens a second for each link, beside torch's DDP in bfloat16."""
    parts = []
    for link, of_link in grouped(rows, "link").items():
        by_name = grouped(of_link, "method", ["torch 1F1B, DDP", "torch 1F1B, DDP in bfloat16"])
        base = mean(by_name.get("torch 1F1B, DDP in bfloat16", of_link), "tokens_per_second")
        head = [
            f"{link}, {of_link[0]['ranks']} ranks, {of_link[0]['steps']} steps",
            "tokens a second",
            "speed",
            "bits a parameter and step",
        ]
        lines = [
            [
                name,
                f"{mean(found, 'tokens_per_second'):.0f}",
                f"{mean(found, 'tokens_per_second') / base:.2f}x",
                f"{mean(found, 'bits'):.3g}",
            ]
            for name, found in by_name.items()
        ]
        parts.append(markdown_table(head, lines))
    return "\n".join(parts)


def slow_replica(rows: Sequence[Row]) -> str:
    """Return a table of the other replicas' steps, alone and beside a slow one."""
    lines = []
    for method, of_method in grouped(rows, "method").items():
        found = grouped(of_method, "slowdown")
        alone, beside = (
            [float(row["ms_per_step"]) for row in found.get(each, [])] for each in ("1", "3")
        )
        if alone and beside:
            ratios = sorted(b / statistics.median(alone) for b in beside)
            medians = (f"{statistics.median(each):.0f}" for each in (alone, beside))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            lines.append([method, *medians, spread])
    head = ["", "ms a step", "beside one 3x slower", "ratio"]
    return markdown_table(head, lines)
