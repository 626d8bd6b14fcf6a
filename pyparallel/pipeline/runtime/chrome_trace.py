"""Traces of all ranks as one file in the format of ``chrome://tracing``."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...comm import Run, gather_json
from ...training.arguments import require
from ..schedules.action import Action, Kind
from .telemetry import Span
from .weight_copies import VersionKey

_MICROSECONDS = 1e6
_ABSENT = -1.0  # in place of a version


def export_chrome_trace(spans: Iterable[Sequence[Span]], path: str | os.PathLike[str]) -> None:
    """Write traced actions of all ranks for Perfetto or ``chrome://tracing``.

    A rank is a process of the trace and a stage a thread. Each action is one event, with its
    microbatch and the version of the weights that it has read ("version", and "horizon": by how
    many updates that was predicted ahead). The wait for its message is an event before it. Times
    are in microseconds from the first event of any rank.

    ``spans`` are of each rank, in their order: ``trainer.spans`` of one or more steps. Of several
    machines, each one's events are shifted by the difference of the clocks.
    """
    ranks = [list(each) for each in spans]
    begins = [span.begin - span.waited for rank in ranks for span in rank]
    require(begins, "spans must hold at least one action", "none: run trainer.step first")
    first = min(begins)
    events = [event for rank, each in enumerate(ranks) for event in _events(rank, each, first)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def gather_spans(spans: Sequence[Span], run: Run) -> list[list[Span]]:
    """Return the spans of all ranks, on every rank; all ranks of the run must call this."""
    if run.size == 1:
        return [list(spans)]
    own = [_to_row(span) for span in spans]
    return gather_json(
        own, run.group, "traced actions", "traces", lambda rows: [_from_row(row) for row in rows]
    )


def _events(rank: int, spans: Sequence[Span], first: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    for stage in sorted({span.action.stage for span in spans}):
        name = {"name": f"stage {stage}"}
        yield {"ph": "M", "pid": rank, "tid": stage, "name": "thread_name", "args": name}
    for span in spans:
        stage, kind, microbatch = span.action
        place = {"ph": "X", "pid": rank, "tid": stage}
        begin = _MICROSECONDS * (span.begin - first)
        if span.waited:
            what = "activations" if kind is Kind.FORWARD else "gradients"
            waited = _MICROSECONDS * span.waited
            times = {"ts": begin - waited, "dur": waited}
            yield place | times | {"name": f"wait for {what}", "cat": "wait"}
        arguments: dict[str, Any] = {"microbatch": microbatch, "action": str(span.action)}
        if span.weights is not None:
            arguments |= span.weights._asdict()
        yield place | {
            "ts": begin,
            "dur": _MICROSECONDS * (span.end - span.begin),
            "name": f"{kind.name.lower().replace('_', ' ')} {microbatch}",
            "cat": "action",
            "args": arguments,
        }


def _to_row(span: Span) -> list[float]:
    weights = (_ABSENT, _ABSENT) if span.weights is None else span.weights
    return [*span.action, span.begin, span.end, span.waited, *weights]


def _from_row(row: Sequence[float]) -> Span:
    stage, kind, microbatch, begin, end, waited, version, horizon = row
    weights = None if version == _ABSENT else VersionKey(int(version), int(horizon))
    action = Action(int(stage), Kind(int(kind)), int(microbatch))
    return Span(action, begin, end, waited, weights)
