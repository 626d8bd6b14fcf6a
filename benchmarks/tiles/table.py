"""The table of the rows that ``python -m benchmarks.tiles.in_flight`` writes."""

from collections.abc import Sequence
from html import escape

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table

HIDDEN = ("float16", "Int4", "E4M3", "E5M2", "Natural", "Ternary")


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each kernel whose buffers have one dtype; float16 is like bfloat16."""
    head = ["kernel", "types", "registers", "blocks", "bytes loaded by a thread", "KiB in flight"]
    lines = []
    for row in rows:
        types = row["types"].split(", ")
        mixed = "float32" in types and "bfloat16" in types
        if not mixed and not any(hidden in types for hidden in HIDDEN):
            numbers = [row["registers"], row["blocks"], row["bytes_loaded"]]
            kernel, in_flight = f"`{row['kernel']}`", f"{float(row['kib_in_flight']):.0f}"
            lines.append([kernel, escape(row["types"]), *numbers, in_flight])
    return markdown_table(head, lines)
