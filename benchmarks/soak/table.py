"""The table of members that come and go."""

from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table


def by_case(rows: Sequence[Row]) -> str:
    head = ["", "faults", "hangs", "steps averaged or committed", "efficiency", "a loss stalls, s",
            "a join stalls, s", "rejoins after, s", "accuracy"]  # fmt: skip
    lines = [
        [
            f"`{row['algorithm']}`, {row['processes']} processes, {row['case']}",
            row["faults"],
            row["hangs"],
            f"{100 * float(row['rounds_kept']):.1f} %",
            f"{100 * float(row['efficiency']):.1f} %",
            *(
                f"{float(row[f'{name}_s']):.2f}, at most {float(row[f'{name}_most_s']):.2f}"
                if row[f"{name}_s"]
                else ""
                for name in ("stall", "join", "rejoin")
            ),
            f"{100 * float(row['accuracy']):.1f} %",
        ]
        for row in rows
        if row["case"] != "calm"
    ]
    return markdown_table(head, lines)
