"""The table of the rows that ``benchmarks.language_models.bench`` measures."""

from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import grouped, markdown_table

UNSPLIT = "unsplit"
ORDER = [UNSPLIT, "OneForwardOneBackward", "PipeOptim"]


def markdown(rows: Sequence[Row]) -> str:
    head = ["", "parameters", "training, bits per byte", "held-out, bits per byte"]
    lines = []
    for name, of_model in grouped(rows, "model").items():
        own = grouped(of_model, "schedule", ORDER)
        for (row,) in own.values():
            tie = ", tied" if row["tied"] == "True" else ""
            lines.append([
                f"{name}{tie}, {shown(row)}",
                f"{int(row['parameters']) / 1e6:.1f} M",
                f"{float(row['training_bits']):.4f}",
                f"{float(row['held_out_bits']):.4f}",
                f"{behind(row, own[UNSPLIT][0]):+.3f} %",
            ])  # fmt: skip
    return markdown_table([*head, "against unsplit"], lines)


def by_start(rows: Sequence[Row]) -> str:
    """Return how far held-out loss is behind synchronous training, by the start; least to most."""
    lines = []
    for start, of_start in grouped([r for r in rows if r["start"] != "all"], "start").items():
        cells = []
        for clip in ("", "1.0"):
            exact = {r["seed"]: r for r in rows if r["start"] == "all" and r["clip"] == clip}
            own = [behind(r, exact[r["seed"]]) for r in of_start if r["clip"] == clip]
            cells.append(f"{min(own):+.1f} to {max(own):+.1f} %")
        lines.append([start, *cells])
    lines.sort(key=lambda line: int(line[0]))
    return markdown_table(["synchronous updates", "not clipped", "max_norm=1.0"], lines)


def behind(row: Row, unsplit: Row) -> float:
    """Return by how many percent the held-out loss is above that of the unsplit model."""
    return 100 * (float(row["held_out_bits"]) / float(unsplit["held_out_bits"]) - 1)


def shown(row: Row) -> str:
    if row["schedule"] == UNSPLIT:
        return f"a plain loop, {row['threads']} threads"
    return f"`{row['schedule']}()`, {row['ranks']} ranks"
