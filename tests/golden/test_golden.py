"""States saved by older versions load, and runs resume from them bit for bit."""

import functools

import pytest
import torch

from pyparallel.compression import ErrorFeedback, StateStore, TopK, merge_states
from tests.golden.kinds import KINDS, load_saved, replay_all
from tests.workers import run_ranks

EVERY_JOB = [
    pytest.param(kind, name, id=f"{kind}-{name}") for kind in KINDS for name in KINDS[kind].jobs
]


@functools.cache
def outcome(kind):
    return run_ranks(KINDS[kind].num_ranks, replay_all, kind, time_limit=180)


@pytest.mark.parametrize(("kind", "name"), EVERY_JOB)
def test_a_saved_run_resumes_bit_for_bit(kind, name):
    for rank, found in enumerate(outcome(kind)):
        assert found[name] == [], f"{name} of {kind}, rank {rank}, torch {torch.__version__}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_has_its_job(kind):
    assert load_saved(kind).keys() == KINDS[kind].jobs.keys(), "run python -m tests.golden.save"


def test_saved_states_are_merged_for_another_number_of_ranks():
    ranks = load_saved("compression")["ddp-owing-top-k"]["states"]
    states = [rank["compression"] for rank in ranks]
    residuals = [
        torch.stack([state["parameters"][name]["residual"] for state in states]).mean(0).flatten()
        for name in states[0]["parameters"]
    ]
    memory = StateStore(ErrorFeedback(TopK(0.25)), 0, 1)
    memory.load_state_dict(merge_states(states, 1))
    assert memory.norm("residual") == pytest.approx(float(torch.cat(residuals).norm()))
    assert memory.norm("residual") > 0
