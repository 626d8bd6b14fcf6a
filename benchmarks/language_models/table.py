"""The table of the rows that ``benchmarks.language_models.bench`` measures."""

from collections.abc import Sequence

from benchmarks.harness.rows import Row

UNSPLIT = "unsplit"
ORDER = [UNSPLIT, "OneForwardOneBackward", "PipeOptim"]


def markdown(rows: Sequence[Row]) -> str:
    """Return losses of each model, the unsplit one first."""
    lines = [
        "| | parameters | training, bits per byte | held-out, bits per byte | against unsplit |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = {row["schedule"]: row for row in rows if row["model"] == name}
        for schedule in (each for each in ORDER if each in own):
            row = own[schedule]
            tie = ", tied" if row["tied"] == "True" else ""
            lines.append(
                f"| {name}{tie}, {shown(row)} | {int(row['parameters']) / 1e6:.1f} M "
                f"| {float(row['training_bits']):.4f} | {float(row['held_out_bits']):.4f} "
                f"| {behind(row, own[UNSPLIT]):+.3f} % |"
            )
    return "\n".join(lines)


def behind(row: Row, unsplit: Row) -> float:
    """Return by how many percent the held-out loss is above that of the unsplit model."""
    return 100 * (float(row["held_out_bits"]) / float(unsplit["held_out_bits"]) - 1)


def shown(row: Row) -> str:
    """Return a schedule, or the plain loop, with its ranks."""
    if row["schedule"] == UNSPLIT:
        return f"a plain loop, {row['threads']} threads"
    return f"`{row['schedule']}()`, {row['ranks']} ranks"
