"""The tables of the rows that ``python -m benchmarks`` and ``benchmarks.ops.calls`` measure."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import markdown_table, of, where
from pyparallel import ops


def largest_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each op's largest size, one list per case: ours first, the copy last.

    Of sizes with peers, if any: the largest may be of ours alone. Codecs have a table of their own.
    """
    rows = [row for row in rows if row["op"] != "codecs"]
    counts = Counter((row["op"], row["case"], row["numel"]) for row in rows)
    largest: dict[str, tuple[bool, int]] = {}
    for (op, _, numel), count in counts.items():
        largest[op] = max(largest.get(op, (False, 0)), (count > 2, int(numel)))
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if int(row["numel"]) == largest[row["op"]][1]:
            cases.setdefault((row["op"], row["case"]), []).append(row)
    return [cases[key] for key in sorted(cases)]


def best_peer(case: Sequence[Row]) -> Row | None:
    """Return the fastest of the rows between ours and the copy."""
    return min(case[1:-1], key=lambda row: float(row["speedup_of_ours"]), default=None)


def markdown(rows: Sequence[Row]) -> str:
    head = ["op", "case", "ms", "of the copy", "against the best peer", "peer"]
    lines = []
    for case in largest_cases([row for row in rows if row["of_copy"]]):
        ours, peer = case[0], best_peer(case)
        op = ours["op"] if ours["op"] in ops.__all__ else f"{ours['op']}_"
        op = "a DDP hook" if ours["op"] == "hooks" else f"`{op}`"
        ms, of_copy = float(ours["median_ms"]), float(ours["of_copy"])
        times = f"{ms:.{1 if ms > 10 else 3}f}", f"{of_copy:.2f}"
        best = ["", ""]
        if peer:
            name = peer["provider"].replace("topk and its kin", "topk and the ops it needs")
            best = [f"{float(peer['speedup_of_ours']):.3g}x", name]
        lines.append([op, ours["case"], *times, *best])
    return markdown_table(head, lines)


def codecs(rows: Sequence[Row]) -> str:
    """Return a line for each codec: ms and the speed relative to the best peer's, by size."""
    cases: dict[str, dict[str, list[Row]]] = {}
    for row in where(rows, op="codecs"):
        cases.setdefault(row["case"], {}).setdefault(row["numel"], []).append(row)
    sizes = of(where(rows, op="codecs"), "numel")
    lines = []
    for name, by_size in cases.items():
        cells, peers = [], []
        for numel in sizes:
            if not (case := by_size.get(numel)):
                cells.append("")
                continue
            peer = best_peer(case)
            cells.append(f"{float(case[0]['median_ms']):.3g} ms")
            if peer:
                cells[-1] += f", {float(peer['speedup_of_ours']):.3g}x"
                peers.append(peer["provider"].removeprefix("torch "))
        lines.append([name, *cells, "; ".join(dict.fromkeys(peers))])
    head = [f"{int(numel) // 1024:,} Ki entries" for numel in sizes]
    return markdown_table(["", *head, "best peers"], lines)


def calls(rows: Sequence[Row]) -> str:
    """Return a line for each op with the microseconds of a call, at each size: ours, torch's."""
    sizes = of(rows, "numel")
    names = [f"{numel} elements: {each}" for numel in sizes for each in ("public", "raw", "torch")]
    lines = []
    for op in of(rows, "op"):
        cells, peers = [f"`{op}`"], []
        for numel in sizes:
            found = where(rows, op=op, numel=numel)
            medians = [f"{float(row['median_us']):.3g}" for row in found]
            cells += [*medians, ""][:3]  # not every op has a peer
            peers = [row["provider"].removeprefix("torch ") for row in found[2:]]
        lines.append([*cells, *(peers or ["none"])])
    return markdown_table(["op", *names, "in torch"], lines)


def small_steps(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        now, before = (f"{float(row[name]):.3g} {row['unit']}" for name in ("after", "before"))
        ratio, least, greatest = (f"{float(row[x]):.2f}" for x in ("ratio", "least", "greatest"))
        lines.append([row["case"], now, before, f"{ratio} ({least} to {greatest})"])
    head = ["", "now", "before", "ratio of the medians (least to greatest of a turn)"]
    return markdown_table(head, lines)
