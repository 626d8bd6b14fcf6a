"""Timelines from the traces of ranks, and costs from timelines."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np

from ...training.arguments import require
from ..runtime.telemetry import Span
from ..schedules.action import Kind
from .action_table import tabulate
from .costs import Costs
from .timeline import Timeline

_SENDER_OFFSETS = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}


def timeline_from_trace(spans: Iterable[Sequence[Span]]) -> Timeline:
    """Return the timeline of traced actions, in seconds from the first begin.

    Args:
        spans: of each rank, in the order in which they ran: ``trainer.spans`` of one or more steps,
            gathered from all ranks. The ranks must be on one machine, to share a clock.
    """
    ranks = list(spans)
    table = tabulate([span.action for span in rank] for rank in ranks)
    require(len(table.rows), "spans must hold at least one action", "none: run trainer.step first")
    times = np.array([(span.begin, span.end) for span in chain.from_iterable(ranks)])
    times -= times.min()
    return Timeline(table, times[:, 0], times[:, 1])


def costs_from_timeline(timeline: Timeline) -> Costs:
    """Return the median durations of a stage's actions and messages, for ``simulate``.

    A message takes from the end of the action that sends it to the begin of the action that uses
    it, measured only if the receiver was idle in between; 0 without a measurement. Actions that
    never ran take no time.
    """
    lengths, rows = timeline.ends - timeline.starts, timeline.table.rows
    durations = [
        [
            _median(lengths[(rows[:, 0] == stage) & (rows[:, 1] == kind)].tolist())
            for stage in range(timeline.table.num_stages)
        ]
        for kind in Kind
    ]
    names = [field.name for field in fields(Costs)][:-1]
    return Costs(**dict(zip(names, durations, strict=True)), communication=_latencies(timeline))


def _latencies(timeline: Timeline) -> list[float]:
    table = timeline.table
    ends = {tuple(row): end for row, end in zip(table.rows.tolist(), timeline.ends, strict=True)}
    waits: list[list[float]] = [[] for _ in range(table.num_stages)]
    for row in range(len(table.rows)):
        stage, kind, microbatch = table.rows[row].tolist()
        source = stage + _SENDER_OFFSETS.get(Kind(kind), 0)
        sent = ends.get((source, kind, microbatch))
        if source == stage or sent is None or table.rank_of_stage[source] == table.ranks[row]:
            continue
        # An action that begins before the message arrives, such as a stage's head, uses another.
        begins_rank = row == table.offsets[table.ranks[row]]
        if not begins_rank and timeline.ends[row - 1] <= sent <= timeline.starts[row]:
            waits[min(source, stage)].append(timeline.starts[row] - sent)
    return [_median(each) for each in waits]


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
