"""States saved by older versions load, and runs resume from them bit for bit."""

import functools

import pytest
import torch

from pyparallel.compression import ErrorFeedback, StateStore, TopK, merge_states
from tests.golden.kinds import KINDS, load_saved, replay_all
from tests.workers import run_ranks


def replay_kinds(rank, kinds):
    return {kind: replay_all(rank, kind) for kind in kinds}


@functools.cache
def replayed(num_ranks):
    """Replay the kinds that have this number of ranks, in one set of processes."""
    kinds = [kind for kind in KINDS if KINDS[kind].num_ranks == num_ranks]
    return run_ranks(num_ranks, replay_kinds, kinds, time_limit=240)


def failures(kind):
    """Return what went wrong, by job and rank; every job must have been replayed."""
    ranks = [found[kind] for found in replayed(KINDS[kind].num_ranks)]
    assert all(found.keys() == KINDS[kind].jobs.keys() for found in ranks)
    return {
        f"{name}, rank {rank}": wrong
        for rank, found in enumerate(ranks)
        for name, wrong in found.items()
        if wrong
    }


@pytest.mark.slow  # loading is in test_saved_states.py
@pytest.mark.parametrize("kind", KINDS)
def test_saved_runs_resume_bit_for_bit(kind):
    assert failures(kind) == {}, f"torch {torch.__version__}"


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
