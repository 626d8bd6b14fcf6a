"""What ranks say they did, as a timeline; and what a schedule costs by it."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np

from ..runtime.executor import Span
from ..schedules.action import Kind
from .action_table import tabulate
from .costs import Costs
from .timeline import Timeline

_SENDER_OFFSETS = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}


def timeline_from_trace(spans: Iterable[Sequence[Span]]) -> Timeline:
    """The timeline of what ranks did, counted from the first begin; its unit is the second.

    Args:
        spans: of every rank, in the order in which they ran; such as ``trainer.spans``, of one call
            or of several, gathered. The ranks must be of one machine, to share a clock.

    Raises:
        ValueError: there are none.
    """
    ranks = list(spans)
    table = tabulate([span.action for span in rank] for rank in ranks)
    if not len(table.rows):
        raise ValueError("spans must hold at least one action, got none: has a call been made?")
    times = np.array([(span.begin, span.end) for span in chain.from_iterable(ranks)])
    times -= times.min()
    return Timeline(table, times[:, 0], times[:, 1])


def costs_from_timeline(timeline: Timeline) -> Costs:
    """Median times of a stage's actions and of the messages between stages, for ``simulate``.

    A message's time is what passes between the end of what makes it and the begin of what takes it
    up, where the receiver was idle before; it is 0 where none ever was. What never ran takes no
    time.
    """
    durations = [_durations(timeline, kind) for kind in Kind]
    names = [field.name for field in fields(Costs)][:-1]
    return Costs(**dict(zip(names, durations, strict=True)), communication=_latencies(timeline))


def _durations(timeline: Timeline, kind: Kind) -> list[float]:
    """By stage."""
    lengths, rows = timeline.ends - timeline.starts, timeline.table.rows
    of_stages = [
        lengths[(rows[:, 0] == stage) & (rows[:, 1] == kind)]
        for stage in range(timeline.table.num_stages)
    ]
    return [_median(each.tolist()) for each in of_stages]


def _latencies(timeline: Timeline) -> list[float]:
    """Between each stage and the next, either way."""
    table = timeline.table
    ends = {tuple(row): end for row, end in zip(table.rows.tolist(), timeline.ends, strict=True)}
    waits: list[list[float]] = [[] for _ in range(table.num_stages)]
    for row in range(len(table.rows)):
        stage, kind, microbatch = table.rows[row].tolist()
        source = stage + _SENDER_OFFSETS.get(Kind(kind), 0)
        sent = ends.get((source, kind, microbatch))
        if source == stage or sent is None or table.rank_of_stage[source] == table.ranks[row]:
            continue
        if row == table.offsets[table.ranks[row]]:
            continue
        # What begins before the message is there, such as a stage's own head, was for another.
        if timeline.ends[row - 1] <= sent <= timeline.starts[row]:
            waits[min(source, stage)].append(timeline.starts[row] - sent)
    return [_median(each) for each in waits]


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
