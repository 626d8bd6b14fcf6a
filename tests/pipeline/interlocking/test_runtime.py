"""A stage waits for the end of its window, and for no later stage."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Farthest, Interlocking, Kind, LinearHead, Mean, PipelineTrainer

NUM_STAGES, NUM_STEPS = 4, 9
# How many steps a stage finishes before the last one's backward of the first: it is one step ahead
# of the end of its window; with window 1, of the next stage, whose forward it waits for.
AHEAD = {1: [4, 3, 2], 2: [2, 1, 0], 3: [1, 0, 0], 4: [0, 0, 0]}
TIMEOUT_SECONDS = 60.0


class Gate(nn.Module):
    """A layer whose backward waits until the other stages are as far ahead as they may be."""

    def __init__(self, folder, ahead):
        super().__init__()
        self.folder, self.ahead = folder, ahead
        self.begun, self.released, self.early = [], [], []

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.wait)
        return x

    def wait(self, gradient):
        step = len(self.begun)
        self.begun.append(time.perf_counter())
        for stage, ahead in enumerate(self.ahead):
            if 0 < step + ahead <= NUM_STEPS:
                await_file(self.folder / f"{stage}-{step + ahead}")
        self.early.append([
            (self.folder / f"{stage}-{step + ahead + 1}").exists()
            for stage, ahead in enumerate(self.ahead)
        ])  # fmt: skip
        self.released.append(time.perf_counter())


def await_file(path):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no stage has reached {path.name}"
        time.sleep(0.001)


def race(rank, window, losses, folder):
    """Return when a stage finished each step, and what the last stage's gate recorded."""
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
    learned, most_in_flight = [], 0
    for step in range(NUM_STEPS):
        trainer.step(batch, batch)
        (folder / f"{rank}-{step + 1}").touch()
        learned.append(next(s.end for s in trainer.spans if s.action.kind is Kind.LEARN))
        in_flight = [
            len(channel._sent) for channel in trainer._pipeline.built.p2p._channels.values()
        ]
        most_in_flight = max(most_in_flight, *in_flight)
    trainer.flush()
    return learned, most_in_flight, (gate.begun, gate.released, gate.early)


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
def races(ranks, tmp_path_factory):
    return ranks.run(NUM_STAGES, race_all, str(tmp_path_factory.mktemp("races")), time_limit=200)


def test_a_slow_stage_delays_another_no_sooner_than_the_window_allows(races, subtests):
    """The gate opened, so the other stages came that far without the last one."""
    for name in RACES:
        with subtests.test(name=name):
            *_, (_, released, early) = races[-1][name]
            ahead = AHEAD[RACES[name][0]]
            assert early == [[False] * 3] * NUM_STEPS
            for stage in range(3):
                learned = races[stage][name][0]
                for step in range(NUM_STEPS - ahead[stage]):
                    assert learned[step + ahead[stage]] > released[step], (stage, step)


def test_with_the_whole_window_all_wait_for_the_last_stage(races):
    *_, (begun, released, _) = races[-1]["window 4"]
    for stage in range(3):
        learned = races[stage]["window 4"][0]
        assert all(a < b < c for a, b, c in zip(begun, released, learned, strict=True))


def test_the_number_of_sends_in_flight_is_bounded(races, subtests):
    for name in RACES:
        with subtests.test(name=name):
            assert max(rank[name][1] for rank in races) <= 4
