"""The table of members that come and go."""

from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table


def by_case(rows: Sequence[Row]) -> str:
    """Return a line a case, with the least and the most of its runs."""
    head = ["", "runs", "faults", "hangs", "steps averaged or committed", "efficiency",
            "a loss stalls, s", "a join stalls, s", "rejoins after, s", "accuracy"]  # fmt: skip
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["case"] != "calm":
            cases.setdefault((row["algorithm"], row["processes"], row["case"]), []).append(row)
    lines = [
        [
            f"`{algorithm}`, {processes} processes, {case}",
            str(len(runs)),
            *(str(sum(int(run[name]) for run in runs)) for name in ("faults", "hangs")),
            *(_percent(runs, name) for name in ("rounds_kept", "efficiency")),
            *(_seconds(runs, name) for name in ("stall", "join", "rejoin")),
            _percent(runs, "accuracy"),
        ]
        for (algorithm, processes, case), runs in cases.items()
    ]
    return markdown_table(head, lines)


def _percent(runs: Sequence[Row], name: str) -> str:
    return f"{_span([100 * float(run[name]) for run in runs], 1)} %"


def _seconds(runs: Sequence[Row], name: str) -> str:
    medians = [float(run[f"{name}_s"]) for run in runs if run[f"{name}_s"]]
    most = [float(run[f"{name}_most_s"]) for run in runs if run[f"{name}_most_s"]]
    return f"{_span(medians, 2)}, at most {max(most):.2f}" if medians else ""


def _span(values: Sequence[float], digits: int) -> str:
    ends = sorted({f"{value:.{digits}f}" for value in (min(values), max(values))}, key=float)
    return " to ".join(ends)
