"""Schedules as CSV files in the format of ``torch.distributed.pipelining``: one line per rank."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from ...pipeline.schedules.action import Action, Kind, parse_action

# Torch's own, implied by the order of the computations. Its visualizer writes gaps as "".
_IMPLIED = re.compile(r"\d+((WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(actions: Iterable[Iterable[Action]], path: Path | str) -> None:
    """Write the actions of all ranks; torch can read a file without updates."""
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in rank] for rank in actions)


def read_csv(path: Path | str) -> tuple[tuple[Action, ...], ...]:
    """Read the actions of all ranks from a file of ``write_csv`` or of torch.

    Torch's actions of communication, sharding and gradient reduction are dropped, since they follow
    from the order of the computations; an overlapped pair is read as two. A ValueError has the line
    and column of an entry that is no action.
    """
    with Path(path).open(newline="") as file:
        return tuple(
            tuple(
                action
                for column, text in enumerate(line, start=1)
                for action in _read_entry(text.strip(), f"{path}, line {number}, column {column}")
            )
            for number, line in enumerate(csv.reader(file), start=1)
        )


def _read_entry(text: str, place: str) -> list[Action]:
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped[1].split(";") if overlapped else [text]
    try:
        return [parse_action(part) for part in parts if part and not _IMPLIED.fullmatch(part)]
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def without_updates(actions: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the actions without updates, which torch's runtime does not know."""
    return tuple(
        tuple(action for action in rank if action.kind is not Kind.UPDATE) for rank in actions
    )
