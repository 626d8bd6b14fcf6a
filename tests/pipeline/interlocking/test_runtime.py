"""Gradients stream: a stage waits for the end of its window, and for nothing behind it."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Farthest, Interlocking, Kind, LinearHead, Mean, PipelineTrainer
from tests.workers import run_ranks

NUM_STAGES, NUM_CALLS = 4, 9
# How many calls a stage finishes before the last one's backward of the first: each is a call ahead
# of the end of its window; with a window of one of the next stage, whose forward it waits for.
AHEAD = {1: [4, 3, 2], 2: [2, 1, 0], 3: [1, 0, 0], 4: [0, 0, 0]}
PATIENCE = 60.0


class Gate(nn.Module):
    """Its backward of a call waits until the other stages are as far ahead as they may be."""

    def __init__(self, folder, ahead):
        super().__init__()
        self.folder, self.ahead = folder, ahead
        self.begun, self.released, self.early = [], [], []

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.wait)
        return x

    def wait(self, gradient):
        call = len(self.begun)
        self.begun.append(time.perf_counter())
        for stage, ahead in enumerate(self.ahead):
            if 0 < call + ahead <= NUM_CALLS:
                await_file(self.folder / f"{stage}-{call + ahead}")
        self.early.append([
            (self.folder / f"{stage}-{call + ahead + 1}").exists()
            for stage, ahead in enumerate(self.ahead)
        ])  # fmt: skip
        self.released.append(time.perf_counter())


def await_file(path):
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody has come to {path.name}"
        time.sleep(0.001)


def race(rank, window, losses, folder):
    """When a stage was done with each call, and the gate's report on the last one."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(NUM_STAGES)]
    gate = Gate(folder, AHEAD[window])
    layers[-1] = nn.Sequential(layers[-1], gate)
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        Interlocking(window, LinearHead(4), losses), num_microbatches=1, split=[1, 2, 3],
    )  # fmt: skip
    batch = torch.ones(2, 4)
    learned, most_under_way = [], 0
    for call in range(NUM_CALLS):
        trainer.step(batch, batch)
        (folder / f"{rank}-{call + 1}").touch()
        learned.append(next(s.end for s in trainer.spans if s.action.kind is Kind.LEARN))
        under_way = [len(channel._sent) for channel in trainer._mail._channels.values()]
        most_under_way = max(most_under_way, *under_way)
    trainer.flush()
    return learned, most_under_way, (gate.begun, gate.released, gate.early)


RACES = {
    **{f"window {window}": (window, Farthest()) for window in AHEAD},
    "window 3, mean": (3, Mean()),
}


def race_all(rank, folder):
    return {
        name: race(rank, window, losses, Path(folder, name))
        for name, (window, losses) in RACES.items()
    }


@pytest.fixture(scope="module")
def races(tmp_path_factory):
    return run_ranks(NUM_STAGES, race_all, str(tmp_path_factory.mktemp("races")), time_limit=200)


@pytest.mark.parametrize("name", RACES)
def test_a_late_stage_delays_another_no_sooner_than_the_window_allows(races, name):
    """The gate opened at all: so the stages came as far without what was behind it."""
    *_, (_, released, early) = races[-1][name]
    ahead = AHEAD[RACES[name][0]]
    assert early == [[False] * 3] * NUM_CALLS
    for stage in range(3):
        learned = races[stage][name][0]
        for call in range(NUM_CALLS - ahead[stage]):
            assert learned[call + ahead[stage]] > released[call], (stage, call)


def test_with_the_whole_window_all_wait_for_the_last_stage(races):
    *_, (begun, released, _) = races[-1]["window 4"]
    for stage in range(3):
        learned = races[stage]["window 4"][0]
        assert all(a < b < c for a, b, c in zip(begun, released, learned, strict=True))


@pytest.mark.parametrize("name", RACES)
def test_what_is_under_way_does_not_grow_with_the_calls(races, name):
    assert max(rank[name][1] for rank in races) <= 4
