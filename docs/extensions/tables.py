"""Tables and pictures of the committed rows, for pages.

A page writes ``{{ tables("gossip", rows("gossip-accuracy")) }}`` for the tables that the benchmark
itself prints, ``{{ pivot(...) }}`` for one of two columns, and ``{{ picture("gossip", "stragglers",
"gossip-amd-epyc-2-threads") }}`` for a picture, which is drawn when the page is rendered. Like a
number, a table or a picture without rows is an error.
"""

import importlib
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import rendered_pages
import rows
from public_names import targets

from benchmarks.harness import pictures
from benchmarks.harness.options import shorten
from benchmarks.harness.tables import of

PICTURES = Path(__file__).resolve().parents[1] / "_build" / "pictures"
MACHINES = {
    "nvidia-h200": "an NVIDIA H200",
    "amd-epyc-2-threads": "two threads of an AMD EPYC",
    "intel-r-xeon-r-processor-2-threads": "two threads of an Intel Xeon",
}


def module_of(area: str, name: str) -> ModuleType:
    """Return a module of a benchmark, and note that the page depends on it."""
    module = importlib.import_module(f"benchmarks.{area}.{name}")
    rows.USED.add(Path(module.__file__))
    return module


def tables(
    area: str, found: Sequence[rows.Row], which: str = "markdown", *more: Sequence[rows.Row]
) -> str:
    """Return the tables that a function of ``benchmarks/<area>/table.py`` makes of rows."""
    return getattr(module_of(area, "table"), which)(found, *more)


def column(name: str, which: str, **where: object) -> list[str]:
    """Return the distinct values of a column, in the order of the file."""
    return of(rows.rows(name, **where), which)


def linked(system: str) -> str:
    """Return a system's name, with a public class that it begins with in code style."""
    first = re.match(r"\w*", system)[0]
    return f"`{first}`{system[len(first) :]}" if first in targets() else system


def pivot(
    name: str, value: str, index: str, columns: str, show: str = "{:.0f}", **where: object
) -> str:
    """Return a table of one column, by two others; empty where there is no row.

    Raises:
        LookupError: two rows have the same place.
    """
    found = rows.rows(name, **where)
    across = of(found, columns)
    lines = [f"| | {' | '.join(across)} |", "|---" * (len(across) + 1) + "|"]
    for each in of(found, index):
        cells = []
        for other in across:
            place = {**where, index: each, columns: other}
            own = [row for row in found if row[index] == each and row[columns] == other]
            if len(own) > 1:
                raise LookupError(f"{name}.csv must have one row with {place}, got {len(own)}")
            cells.append(show.format(float(own[0][value])) if own and own[0][value] else "")
        lines.append(f"| {linked(each)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(area: str, which: str, name: str) -> str:
    """Draw a picture of ``benchmarks/<area>/picture.py`` and return the image.

    Raises:
        LookupError: the file has no rows for it.
    """
    draw = module_of(area, "picture").PICTURES[which]
    path = PICTURES / f"{area}-{which}.png"
    title = pictures.save(draw, rows.rows(name), path)
    if title is None:
        raise LookupError(f"{name}.csv has no rows for the picture {which} of benchmarks/{area}")
    return f"![{title}](/_build/pictures/{path.name})"


def measured(name: str, command: str, **where: object) -> str:
    """Return where and with what rows were measured, what measures again, and a link to them."""
    found = rows.rows(name, **where)
    machine = next((text for key, text in MACHINES.items() if name.endswith(key)), "the CPU")
    versions = ", ".join(sorted({row["torch"] for row in found if row["torch"]}))
    commits = sorted({row["commit"] for row in found if row["commit"]})
    one = commits[0].removesuffix("-dirty")
    where_from = f"commit {one}" if len(commits) == 1 else f"{len(commits)} commits (in the rows)"
    dirty = sum(commit.endswith("-dirty") for commit in commits)
    if dirty:
        some = "" if len(commits) == 1 else f"{dirty} of them "
        where_from += f", {some}with uncommitted changes"
    link = f"{{download}}`{name}.csv </../benchmarks/results/{name}.csv>`"
    measured_on = f"*Measured on {machine}, torch {versions}, {where_from}: {link}."
    return f"{measured_on} Measure again:* `{command}`"


def check(condition: object, sentence: str) -> str:
    """Return a sentence that the rows support.

    Raises:
        LookupError: they no longer do.
    """
    if not condition:
        raise LookupError(f"the rows no longer support: {sentence}")
    return sentence


def not_close(found: Sequence[rows.Row]) -> list[str]:
    """Return the compressors that end further behind DDP than the table of accuracy allows."""
    table = module_of("compression", "table")
    (measure,) = (each for each in table.MEASURES if each.data == found[0]["task"])
    groups = table.by_compressor(found, measure.data)
    exact = groups[table.DENSE.name]
    behind = {name: table.differences(own, exact, measure) for name, own in groups.items()}
    return [name for name, each in behind.items() if table.verdict(each, measure) != "yes"]


def to_target(found: Sequence[rows.Row], method: str) -> tuple[float, float]:
    """Return mean seconds and megabytes of a rank until the first score near DDP's final one.

    Raises:
        LookupError: not all runs of the method get there.
    """
    table = module_of("subnets", "table")
    groups = table.by_method(found, found[0]["task"])
    measure = table.measure_of(found[0]["task"])
    ends = {row["seed"]: float(row["score"]) for row in groups[table.BASELINE]}
    runs = [(table.read_curve(row), ends[row["seed"]]) for row in groups[method]]
    reached = [table.time_to_target(curve, end, measure) for curve, end in runs]
    if None in reached:
        raise LookupError(f"not all runs of {method} reach the final score of {table.BASELINE}")
    seconds, sent = (statistics.fmean(each) for each in zip(*reached, strict=True))
    return seconds, sent / 1e6


def best_peer(name: str, **where: object) -> float:
    """Return our speed relative to the fastest peer of an op's case."""
    peer = module_of("ops", "table").best_peer(rows.rows(name, **where))
    return rows.number(peer, name, "speedup_of_ours")


def fastest_of_torch(value: str, name: str, **where: object) -> float:
    """Return the highest value of torch's systems."""
    found = [row for row in rows.rows(name, **where) if row["system"].startswith("torch ")]
    return max(rows.number(row, name, value) for row in found)


rendered_pages.ENVIRONMENT.globals |= {
    each.__name__: each
    for each in (
        tables,
        column,
        linked,
        pivot,
        picture,
        measured,
        check,
        shorten,
        not_close,
        to_target,
        best_peer,
        fastest_of_torch,
    )
}


def setup(app):
    """Register with Sphinx; pages have the functions once this module is imported."""
    return {"parallel_read_safe": True}
