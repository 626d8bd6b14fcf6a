"""Ranks that are killed, wherever: all others raise the same error, also without the store."""

import datetime
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.link import free_port
from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipelineTrainer,
    PipeOptim,
)
from tests.workers import observe_ranks, store_barrier

TIMEOUT = 40  # seconds
NUM_LAYERS = 8


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(moment, trainer):
    """Have this rank die in the third step, or in a call after it."""
    if moment == "step":
        die()
    stage = trainer.stages[-1]
    if moment == "forward":
        stage.module.register_forward_hook(die)
    elif moment == "update":
        stage.optimizers[0].register_step_pre_hook(die)
    elif moment == "barrier":
        trainer._pipeline.built.p2p.barrier = die
    elif moment == "clipping":
        barrier = trainer._pipeline.built.p2p.barrier

        def die_after(refusal):
            barrier(refusal)
            die()

        trainer._pipeline.built.p2p.barrier = die_after
    elif moment == "tied parameters":
        trainer._pipeline.built.tied.copy_from_owners = die
    elif moment == "evaluate":
        stage.module.register_forward_hook(lambda module, *_: None if module.training else die())
    else:
        assert moment == "flush"


def join_store_on_rank_0(rank, num_ranks, port):
    store_barrier("replaced")
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )


def train(rank, num_ranks, schedule, victims, moment, port):
    if port is not None:
        join_store_on_rank_0(rank, num_ranks, port)
    layers = [nn.Linear(4, 4) for _ in range(NUM_LAYERS)]
    if moment == "tied parameters":
        layers[-1].weight = layers[0].weight
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule,
        num_microbatches=4,
        num_stages=num_ranks * (2 if isinstance(schedule, Interleaved) else 1),
        max_norm=1.0 if moment == "clipping" else None,
    )
    batch = torch.ones(8, 4)
    for step in range(3):
        if step == 2 and rank in victims:
            die_in(moment, trainer)
        trainer.step(batch, batch)
    if moment == "flush" and rank in victims:
        die()
    trainer.flush()
    trainer.evaluate(batch, batch)


CASES = {
    "a forward": (3, PipeOptim(), (1,), "forward", False),
    "the last stage": (3, GPipe(), (2,), "forward", False),
    "interlocking": (3, Interlocking(1, LinearHead(4)), (2,), "forward", False),
    "interlocking, the first stage": (3, Interlocking(3, LinearHead(4)), (0,), "forward", False),
    "two at once": (4, OneForwardOneBackward(), (1, 2), "step", False),
    "the store's host": (3, Interleaved(), (0,), "forward", True),
    "the store's host is left": (4, OneForwardOneBackward(), (2,), "update", True),
    "an update": (3, PipeOptim(), (1,), "update", True),
    "a barrier": (3, GPipe(), (1,), "barrier", True),
    "clipping": (4, GPipe(), (2,), "clipping", True),
    "tied parameters": (4, GPipe(), (3,), "tied parameters", False),
    "flush": (4, PipeOptim(), (1,), "flush", False),
    "evaluate": (3, OneForwardOneBackward(), (1,), "evaluate", True),
    "two ranks": (2, PipeOptim(), (0,), "update", True),
    "the host in clipping": (3, GPipe(), (0,), "clipping", True),
}
FAST = {"the store's host", "interlocking"}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_survivor_raises_the_same_error(name):
    num_ranks, schedule, victims, moment, has_host = CASES[name]
    begin = time.monotonic()
    outcomes = observe_ranks(
        num_ranks, train, num_ranks, schedule, victims, moment, free_port() if has_host else None,
        time_limit=150, group_timeout=TIMEOUT,
    )  # fmt: skip
    assert time.monotonic() - begin < TIMEOUT / 2, "survivors waited for what no rank sends"
    assert [rank for rank, each in enumerate(outcomes) if each.exit_code == -9] == [*victims]
    errors = [each.error for rank, each in enumerate(outcomes) if rank not in victims]
    assert len(set(errors)) == 1, errors
    dead = " and ".join(rf"rank {rank} \(stages? {rank}[, \d]*\)" for rank in victims)
    if name == "two at once":
        dead = r"rank [12] \(stage [12]\)"  # that which was found first
    end = "" if has_host and 0 in victims else r": rank \d waited for .*"
    pattern = rf"StageError: {dead} died, or ended without this call{end}"
    assert re.fullmatch(pattern, errors[0]), errors
