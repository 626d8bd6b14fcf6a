"""``python -m pyparallel watch``: the ranks of a run, as long as it lasts."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..integrations.metrics_log import describe_place
from .text_table import aligned

EXAMPLE = "python -m pyparallel watch runs/language_model/gossip"

_Row = Mapping[str, Any]
_TAIL_BYTES = 2**16
_CLEAR = "\x1b[2J\x1b[H"
_LEAST_SILENCE = 10  # seconds


def _number(row: _Row, name: str, form: str, scale: float = 1.0) -> str:
    return format(scale * row[name], form) if row.get(name) is not None else ""


def _speed(before: _Row, row: _Row) -> str:
    seconds, steps = row["time"] - before["time"], row["step"] - before["step"]
    return f"{steps / seconds:.2f}" if min(seconds, steps) > 0 else ""


def _staleness(_: _Row, row: _Row) -> str:
    """Return that of the rank, or the largest of its stages."""
    found = [value for name, value in row.items() if name.endswith("/staleness")]
    return f"{max(found):g}" if found else ""


# Each column's heading, and a rank's cell from its last two lines; "" if it does not have it.
_COLUMNS: dict[str, Callable[[_Row, _Row], str]] = {
    "step": lambda _, row: f"{row['step']:,}",
    "loss": lambda _, row: _number(row, "loss", ".3f"),
    "steps/s": _speed,
    "waiting, ms": lambda _, row: _number(row, "rank/waiting_seconds", ".1f", 1000),
    "staleness": _staleness,
    "mass": lambda _, row: _number(row, "rank/push_sum_weight", ".3f"),
    "epoch": lambda _, row: _number(row, "epoch", "g"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, help="folder that the ranks' MetricsLog writes")
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    parser.add_argument("--every", type=float, default=1.0, help="seconds (default: 1.0)")


def report(arguments: argparse.Namespace) -> str:
    """Show the table until all ranks have ended, or Ctrl-C; return the last one."""
    text, going_on = _table(arguments.run)
    try:
        while going_on and not arguments.once and sys.stdout.isatty():
            sys.stdout.write(f"{_CLEAR}{text}\n")
            sys.stdout.flush()
            time.sleep(arguments.every)
            text, going_on = _table(arguments.run)
    except KeyboardInterrupt:
        return ""  # it is on the screen
    return text


def _table(run: Path) -> tuple[str, bool]:
    """Return the table of all ranks, and whether one may still write."""
    paths = sorted(run.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise SystemExit(
            f"watch: {run} must hold a file rank-0.jsonl, got none; write it with "
            "pyparallel.integrations.metrics_log.MetricsLog"
        )
    cells, states = [], []
    for path in paths:
        lines = _read_end(path)
        steps = [row for row in lines if "step" in row]
        before, row = (steps[-2:] * 2)[:2] if steps else ({}, {})
        cells.append([column(before, row) if row else "" for column in _COLUMNS.values()])
        states.append(_state(lines, row.get("time", 0.0) - before.get("time", 0.0)))
    shown = [index for index in range(len(_COLUMNS)) if any(cell[index] for cell in cells)]
    table = [("rank", *(list(_COLUMNS)[index] for index in shown), "state")]
    for path, own, state in zip(paths, cells, states, strict=True):
        table.append((path.stem, *(own[index] or "-" for index in shown), state))
    return "\n".join(aligned(table)), not set(states) <= {"ended", "dead"}


def _read_end(path: Path) -> list[_Row]:
    """Return the last lines of a file; one that is not complete yet is left out."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    found: list[_Row] = []
    for index, line in enumerate(lines):
        try:
            row = json.loads(line)
            found.append({**row, "time": row["time"], "place": row["place"]})
        except (ValueError, TypeError, KeyError):
            if index:  # the first one may begin in its middle
                text = f"watch: {path} must hold lines of MetricsLog, got {line.decode()}"
                raise SystemExit(text) from None
    return found


def _state(lines: Sequence[_Row], interval: float) -> str:
    """Return what is known of a rank; elsewhere than here only the age of its last line."""
    if not lines:
        return "starting"
    last = lines[-1]
    if "ended" in last:
        return "ended"
    if last["place"] == describe_place() and not Path(f"/proc/{last['process']}").exists():
        return "dead"
    silence = time.time() - last["time"]
    is_usual = silence < max(_LEAST_SILENCE, 5 * interval)
    if is_usual:
        return "training" if "step" in last else "starting"
    return f"silent for {silence:,.0f} s"
