"""The table of the rows that ``python -m benchmarks.tiles.in_flight`` writes."""

from collections.abc import Sequence
from html import escape

from benchmarks.harness.rows import Row

HIDDEN = ("float16", "Int4", "E4M3", "E5M2", "Natural", "Ternary")


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each kernel whose buffers have one dtype; float16 is like bfloat16."""
    lines = [
        "| kernel | types | registers | blocks | bytes loaded by a thread | KiB in flight |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        types = row["types"].split(", ")
        mixed = "float32" in types and "bfloat16" in types
        if mixed or any(hidden in types for hidden in HIDDEN):
            continue
        cells = [f"`{row['kernel']}`", escape(row["types"]), row["registers"], row["blocks"]]
        cells += [row["bytes_loaded"], f"{float(row['kib_in_flight']):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
