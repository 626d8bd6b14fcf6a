"""Tables of trials: by fault, and by trainer."""

from collections.abc import Callable, Sequence

Row = dict[str, str]

COUNTS = ("hangs", "aborts", "errors", "named", "blamed", "placed", "raw")
COLUMNS = {
    "trials": "trials",
    "hangs": "hangs",
    "aborts": "aborts",
    "errors": "survivors' errors",
    "named": "name the rank that failed",
    "blamed": "blame a living rank",
    "placed": "have step, stage or microbatch",
    "raw": "raw text",
    "slowest": "slowest error, s",
    "equal": "equal bits",
    "broken": "trials with a requirement broken",
}


def by_fault(rows: Sequence[Row]) -> str:
    """Return a table in Markdown with a line for each fault."""
    return _table("fault", rows, lambda row: row["fault"])


def by_trainer(rows: Sequence[Row]) -> str:
    """Return a table in Markdown with a line for each trainer."""
    return _table("trainer", rows, lambda row: row["trainer"])


def totals(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells of all rows together."""
    ran = [row for row in rows if not row["verdict"].startswith("skipped")]
    compared = [row for row in ran if row["equal"]]
    equal = sum(row["equal"] == "yes" for row in compared)
    return {
        "trials": str(len(ran)),
        **{key: str(sum(int(row[key]) for row in ran)) for key in COUNTS},
        "slowest": f"{max((float(row['slowest_s']) for row in ran), default=0):.1f}",
        "equal": f"{equal} of {len(compared)}" if compared else "",
        "broken": str(sum(row["verdict"] != "ok" for row in ran)),
    }


def _table(name: str, rows: Sequence[Row], key_of: Callable[[Row], str]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row), []).append(row)
    lines = [f"| {name} | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for key, group in [*groups.items(), ("all", list(rows))]:
        lines.append(f"| {key} | {' | '.join(totals(group).values())} |")
    return "\n".join(lines)
