"""The tables of the rows of language models."""

import math
from collections.abc import Sequence
from itertools import product

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import grouped, markdown_table

UNSPLIT = "unsplit"
SYNCHRONOUS = "OneForwardOneBackward"
ORDER = [UNSPLIT, SYNCHRONOUS, "PipeOptim", "PipeDream2BW"]  # then others


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
    """Return how far held-out loss is behind synchronous training, by the start; least to most.

    Seconds are of all updates, with clipping, where both stages had a rank of their own.
    """
    cases = sorted(
        {(row["steps"], row["clip"]) for row in rows}, key=lambda case: (int(case[0]), case)
    )
    head = [f"{int(steps):,} updates, {'' if clip else 'not '}clipped" for steps, clip in cases]
    lines = []
    for start, of_start in grouped(rows, "start").items():
        cells = [_gaps(rows, of_start, case) for case in cases]
        seconds = [float(row["seconds"]) for row in of_start if row["clip"] and row["seconds"]]
        lines.append([start, *cells, _range(seconds, "{:.0f} s")])
    lines.sort(key=lambda line: float(line[0].replace("all", "inf")))
    return markdown_table(["synchronous updates", *head, "time"], lines)


def _gaps(rows: Sequence[Row], of_start: Sequence[Row], case: tuple[str, str]) -> str:
    """Return how far those of so many updates, clipped or not, are behind synchronous training."""
    own, exact = (
        {row["seed"]: row for row in some if (row["steps"], row["clip"]) == case}
        for some in (of_start, [row for row in rows if row["start"] == "all"])
    )
    pairs = [(row, exact[seed]) for seed, row in own.items() if seed in exact]
    gaps = [behind(*pair) for pair in pairs if pair[0] is not pair[1]]
    return _range(gaps, "{:+.1f} %")


def by_depth(rows: Sequence[Row]) -> str:
    """Return held-out loss, least to most of the seeds, and against synchronous updates.

    Those have the same rate, or the optimizer's own best of all rates that one seed was trained at.
    """
    against = ["against synchronous", "against synchronous at its best rate"]
    head = ["", "rate", "synchronous updates", "held-out, bits per byte", *against]
    lines = []
    for model, of_model in grouped(rows, "model").items():
        for optimizer, of_pair in grouped(of_model, "optimizer").items():
            exact: dict[str, dict[str, Row]] = {}  # of each rate, by seed
            for row in of_pair:
                if row["schedule"] == SYNCHRONOUS:
                    exact.setdefault(row["rate"], {})[row["seed"]] = row
            best = min(exact.values(), key=_first_loss, default={})
            for schedule, of_schedule in grouped(of_pair, "schedule", ORDER).items():
                for ranks, of_case in grouped(of_schedule, "ranks").items():
                    for pair in product(grouped(of_case, "rate"), grouped(of_case, "start")):
                        own = {r["seed"]: r for r in of_case if (r["rate"], r["start"]) == pair}
                        name = f"{model}, {optimizer}, `{schedule}`, {ranks} stages"
                        if own:
                            same = exact.get(pair[0], {})
                            lines.append([name, *cells_of(own, same), _against(own, best)])
    return markdown_table(head, lines)


def _first_loss(of_rate: dict[str, Row]) -> float:
    """Return the held-out loss with the first seed, which has all rates."""
    return float(of_rate["0"]["held_out_bits"]) if "0" in of_rate else math.inf


def cells_of(own: dict[str, Row], exact: dict[str, Row]) -> list[str]:
    bits = [float(row["held_out_bits"]) for row in own.values()]
    return [
        own[min(own)]["rate"],
        "all" if own[min(own)]["schedule"] == SYNCHRONOUS else own[min(own)]["start"],
        _range(bits, "{:.3f}"),
        _against(own, exact),
    ]


def _against(own: dict[str, Row], exact: dict[str, Row]) -> str:
    gaps = [behind(row, exact[seed]) for seed, row in own.items() if seed in exact]
    return _range(gaps, "{:+.2f} %")


def behind(row: Row, exact: Row) -> float:
    """Return by how many percent the held-out loss is above that of synchronous training."""
    return 100 * (float(row["held_out_bits"]) / float(exact["held_out_bits"]) - 1)


def shown(row: Row) -> str:
    if row["schedule"] == UNSPLIT:
        return f"a plain loop, {row['threads']} threads"
    return f"`{row['schedule']}()`, {row['ranks']} ranks"


def by_method(rows: Sequence[Row]) -> str:
    """Return held-out loss of replicas by their method, beside synchronous ones."""
    groups = grouped(rows, "method")
    exact = {row["seed"]: row for row in groups.get("AdamW, 1F1B, AllReduce", [])}
    head = ["", "rate", "synchronous updates", "held-out, bits per byte", "against synchronous"]
    lines = []
    for method, own in groups.items():
        bits = [float(row["held_out_bits"]) for row in own]
        gaps = _against({row["seed"]: row for row in own}, exact)
        start = "all" if own[0]["start"] == own[0]["steps"] else own[0]["start"]
        lines.append([method, own[0]["rate"], start, _range(bits, "{:.3f}"), gaps])
    return markdown_table(head, lines)


def _range(values: Sequence[float], text: str) -> str:
    ends = [text.format(each) for each in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))


def by_link(rows: Sequence[Row]) -> str:
    """Return tokens a second and held-out loss after equal seconds, for each link."""
    links = sorted({row["link"] for row in rows}, key=lambda name: int(name.split()[0]))
    head = ["", "bits sent a parameter and step"]
    for link in links:
        head += [f"{link}: tokens/s", "bits per byte"]
    lines = []
    for method, own in grouped(rows, "method").items():
        of_link = grouped(own, "link")
        bits = [float(row["bits_per_parameter"]) for row in own if row["bits_per_parameter"]]
        line = [method, _range(bits, "{:.2f}")]
        for link in links:
            found = of_link.get(link, [])
            line.append(_range([float(row["tokens_per_second"]) for row in found], "{:,.0f}"))
            line.append(_range([float(row["held_out_bits"]) for row in found], "{:.3f}"))
        lines.append(line)
    return markdown_table(head, lines)
