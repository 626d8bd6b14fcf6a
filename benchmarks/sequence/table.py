"""Tables of attention over slow links."""

from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table


def by_method(rows: Sequence[Row]) -> str:
    """Return the time of a step, what attention sends in it, and the loss at the end."""
    head = ["", "ms of a step", "MB of attention a rank sends in it", "training, bits per byte"]
    lines = [
        [
            f"{row['method']}, {row['link']}",
            f"{float(row['step_ms']):.0f}",
            f"{float(row['mb_per_step']):.2f}",
            f"{float(row['training_bits']):.3f}",
        ]
        for row in rows
    ]
    return markdown_table(head, lines)
