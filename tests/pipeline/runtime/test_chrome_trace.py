"""A trace is one event for each action and each wait, with its rank, stage and weights."""

import json

import pytest

from pyparallel.pipeline import Action, Kind, Span, export_chrome_trace
from pyparallel.pipeline.runtime.weight_copies import VersionKey

SPANS = [
    [Span(Action(0, Kind.FORWARD, 3), 10.0, 10.5, 0.0, VersionKey(2, 1))],
    [
        Span(Action(1, Kind.FORWARD, 3), 10.75, 11.0, 1.0, VersionKey(3, 0)),
        Span(Action(1, Kind.BACKWARD_INPUT, 3), 11.0, 11.5),
    ],
]


def test_events_are_those_of_the_spans(tmp_path):
    export_chrome_trace(SPANS, tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    events = written["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        (0, None): "rank 0", (0, 0): "stage 0", (1, None): "rank 1", (1, 1): "stage 1",
    }  # fmt: skip
    assert [
        (e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e.get("args"))
        for e in events
        if e["ph"] == "X"
    ] == [
        (0, 0, "forward 3", 250_000, 500_000,
         {"microbatch": 3, "action": "0F3", "version": 2, "horizon": 1}),
        (1, 1, "wait for activations", 0, 1_000_000, None),
        (1, 1, "forward 3", 1_000_000, 250_000,
         {"microbatch": 3, "action": "1F3", "version": 3, "horizon": 0}),
        (1, 1, "backward input 3", 1_250_000, 500_000, {"microbatch": 3, "action": "1I3"}),
    ]  # fmt: skip


def test_no_spans_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got none: run trainer\.step first"):
        export_chrome_trace([[], []], tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
