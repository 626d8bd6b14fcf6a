"""Tables of trials: by fault, and by trainer; of two commits, with an arrow between."""

from collections.abc import Sequence
from functools import partial

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table, of

COUNTS = ("hangs", "aborts", "errors", "named", "blamed", "placed", "raw")
COLUMNS = {
    "trials": "trials",
    "hangs": "hangs",
    "aborts": "aborts",
    "errors": "errors",
    "named": "name the failed rank",
    "blamed": "blame a living one",
    "placed": "have step, stage or microbatch",
    "raw": "raw text",
    "slowest": "slowest, s",
    "equal": "equal bits",
    "broken": "trials that fail",
}


def totals(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells of all rows together, without trials that were skipped."""
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


def trials_by(key: str, rows: Sequence[Row], before: Sequence[Row] = ()) -> str:
    """Return a table in Markdown with a line for each fault or trainer.

    ``before`` are the rows of an earlier commit, of these trials and maybe others, which are left
    out: cells that differ have both values.
    """
    same = {(row["fault"], row["trainer"]) for row in rows}
    before = [row for row in before if (row["fault"], row["trainer"]) in same]
    lines = []
    for name in [*of(rows, key), None]:
        now, then = (
            totals([row for row in each if name in (row[key], None)]) for each in (rows, before)
        )
        cells = [
            f"{then[column]} → {cell}" if before and then[column] != cell else cell
            for column, cell in now.items()
        ]
        lines.append([name or "all", *cells])
    return markdown_table([key, *COLUMNS.values()], lines)


by_fault, by_trainer = (partial(trials_by, key) for key in ("fault", "trainer"))
