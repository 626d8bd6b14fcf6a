"""Ranks that wait for each other in different calls: a warning, then an error, with both calls."""

import re
import warnings

import pytest
import torch
from torch import nn

from pyparallel.comm.errors import compare_calls
from pyparallel.gossip import SGP
from pyparallel.pipeline import PipelineTrainer
from tests.comm import trainers

JOIN = "; for unequal numbers of batches gossip and DistributedDataParallel have join()"
TIMEOUT = 8


def test_ranks_in_one_call_are_told_apart_from_ranks_in_several():
    assert compare_calls({1: "step 7", 0: "step 7"}) == "ranks 0-1 wait for each other in step 7"
    assert compare_calls({1: "step 7"}) == "rank 1 waits in step 7"
    calls = {2: "step 7", 0: "flush() after 6 steps", 1: "step 7"}
    got = "flush() after 6 steps on rank 0, step 7 on ranks 1-2"
    assert compare_calls(calls) == f"all ranks must make the same calls, got {got}{JOIN}"


def gossip(rank, call):
    trainer, step = trainers.gossip(SGP())
    for _ in range(2 + rank * (call == "batches")):
        step()
    if call == "consensus" and rank == 0:
        with trainer.consensus():
            pass
    elif call == "batches" and rank == 0:
        trainer.flush()
    step()


def pipeline(rank, call):
    torch.manual_seed(0)
    trainer = PipelineTrainer(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), split=[1],
    )  # fmt: skip
    batch = torch.ones(8, 4), torch.zeros(8, 4)
    trainer.step(*batch)
    if call == "state" and rank == 0:
        trainer.full_state_dict()
    elif call == "evaluate" and rank == 1:
        trainer.evaluate(*batch)
    trainer.step(*batch)


def fail(rank, cases):
    """Return the error and the warnings of this rank in each case."""
    found = []
    for trainer, call in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError) as raised:
                trainer(rank, call)
        texts = [str(raised.value), *(str(each.message) for each in caught)]
        error, *warned = [re.sub(r" of trainer \d+", "", each) for each in texts]  # still there
        found.append((error, warned))
    return found


CASES = {  # the calls of ranks 0 and 1, and whether they wait for the timeout
    (gossip, "batches"): ("flush() after 2 steps", "step 3", True),
    (gossip, "consensus"): ("consensus() after 2 steps", "step 3", True),
    (pipeline, "state"): ("full_state_dict()", "step 1", True),
    (pipeline, "evaluate"): ("step 1", "evaluate() after 1 step", False),
}


@pytest.mark.slow
def test_both_ranks_name_both_calls(ranks, subtests):
    outcomes = ranks.run(2, fail, [*CASES], group_timeout=TIMEOUT, time_limit=200)
    for (key, (first, second, waits)), *of_ranks in zip(CASES.items(), *outcomes, strict=True):
        text = (
            f"all ranks must make the same calls, got {first} on rank 0, {second} on rank 1{JOIN}"
        )
        for rank, (error, warned) in enumerate(of_ranks):
            with subtests.test(key[1], rank=rank):
                assert text in error, error
                assert "doctor --links" not in error
                start = f"rank {rank} has waited for "
                assert [each.startswith(start) and each.endswith(text) for each in warned] == (
                    [True] * waits
                ), warned
