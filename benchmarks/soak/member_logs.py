"""What the logs of members say: how long they waited, what was lost, and whether weights add up."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness.rows import Row, machine


def lives_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each process that has had a name."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["pid"], []).append(row)
    return list(found.values())


def weight_error(logs: dict[str, list[Row]]) -> float:
    """Return the greatest difference of an epoch's push-sum weights from their number, of it."""
    weights: dict[int, dict[str, float]] = {}
    members: dict[int, list[str]] = {}
    for name, rows in logs.items():
        for row in rows:
            if "change" in row:
                members[row["change"]["epoch"]] = row["change"]["members"]
            epoch = row.get("epoch", row.get("change", {}).get("epoch"))
            if row.get("weight") is not None:
                weights.setdefault(epoch, {})[name] = row["weight"]
    errors = [
        abs(sum(weights[epoch].values()) - len(each)) / len(each)
        for epoch, each in members.items()
        if set(each) == set(weights.get(epoch, {}))
    ]
    return max(errors, default=math.nan)


def summarize(logs: dict[str, list[Row]], *, discards: bool = False) -> Row:
    """Return the columns of a run from the logs of its processes, by name.

    With ``discards`` a step that is not kept is lost; else only its round is.
    """
    lives = [life for rows in logs.values() for life in lives_of(rows)]
    steps = [row for life in lives for row in life if "seconds" in row]
    calm = statistics.median(row["seconds"] for row in steps if row["kept"])
    living = sum(
        life[-1]["time"] - next(row["time"] for row in life if "member" in row)
        for life in lives
        if any("member" in row for row in life)
    )
    stalls: dict[bool, list[float]] = {True: [], False: []}  # by whether members were lost
    for life in lives:
        changes: list[Row] = []
        for row in life:
            if "change" in row:
                changes.append(row["change"])
            elif "seconds" in row:
                if not row["kept"]:
                    has_lost = any(each["left"] for each in changes)
                    stalls[has_lost].append(row["seconds"] - calm)
                changes = []
    rejoins = []
    for rows in logs.values():
        for life in lives_of(rows)[1:]:
            times = [row["time"] for row in life if "ready" in row or "member" in row]
            rejoins += [times[1] - times[0]] if len(times) > 1 else []
    oldest = max(lives, key=lambda life: life[-1]["time"] - life[0]["time"])
    first = [row for row in oldest if "fds" in row]
    ends = [row["accuracy"] for life in lives for row in life if "accuracy" in row]
    epochs = {row["change"]["epoch"] for life in lives for row in life if "change" in row}
    useful = sum(row["kept"] or not discards for row in steps)
    columns = {
        "step_ms": f"{1e3 * calm:.1f}",
        "changes": len(epochs) - 1,
        "weight_error": f"{weight_error(logs):.1e}",
        "steps": len(steps),
        "rounds_kept": f"{statistics.fmean(row['kept'] for row in steps):.4f}",
        "efficiency": f"{useful * calm / living:.4f}",
        "growth_kb": first[-1]["kb"] - first[0]["kb"],
        "more_fds": first[-1]["fds"] - first[0]["fds"],
        "accuracy": f"{statistics.median(ends):.4f}",
        "machine": machine(),
    }
    for name, values in (("stall", stalls[True]), ("join", stalls[False]), ("rejoin", rejoins)):
        if values:
            columns[f"{name}_s"] = f"{statistics.median(values):.3f}"
            columns[f"{name}_most_s"] = f"{max(values):.3f}"
    return columns
