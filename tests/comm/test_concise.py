"""What Python prints of a user's mistake: the user's line, one frame of ours, the sentence."""

import traceback

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel, SubnetTrainer
from pyparallel.comm import PeerError
from pyparallel.comm.errors import concise
from pyparallel.compression import Int8, compress_ddp
from pyparallel.gossip import SGP
from pyparallel.pipeline import GPipe, PipelineTrainer
from pyparallel.subnets import Partition
from tests.comm import trainers

MOST_LINES = 12
LAYERS = nn.Linear(4, 4), nn.Linear(4, 4)
BATCH = torch.ones(4, 4)


def gossip_arguments(rank):
    module = nn.Linear(4, 4)
    GossipDataParallel(module, trainers.sgd(module.parameters()), SGP(), bucket_cap_mb=-rank or 1)


def gossip_nan(rank):
    trainer, _ = trainers.gossip(SGP())
    (trainer(BATCH).sum() * float("nan")).backward()
    next(iter(trainer._optimizers))().step()


def gossip_calls(rank):
    trainer, step = trainers.gossip(SGP())
    if rank == 0:
        trainer.flush()
    step()


def pipeline_arguments(rank):
    trainers.pipeline(max_norm=-1)


def pipeline_batch(rank):
    trainers.pipeline(GPipe(), split=[1])[0].step(BATCH, torch.ones(3, 4))


def pipeline_loss(rank):
    def loss(output, target):
        raise LookupError("the user's own")

    trainer = PipelineTrainer(LAYERS, loss, trainers.sgd, GPipe(), num_microbatches=2, split=[1])
    trainer.step(BATCH, BATCH)


def pipeline_calls(rank):
    trainer, step = trainers.pipeline(GPipe(), split=[1])
    step()
    (trainer.step if rank else trainer.evaluate)(BATCH, BATCH)


def subnets_arguments(rank):
    SubnetTrainer(nn.Sequential(*LAYERS), trainers.sgd, Partition(), interval=-rank)


def subnets_calls(rank):
    trainer, step = trainers.subnets()
    step()
    if rank:
        trainer.full_state_dict()
    step()


def hook_arguments(rank):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    compress_ddp(replica, Int8() if rank else "int8")


CASES = [
    gossip_arguments, gossip_nan, gossip_calls, pipeline_arguments, pipeline_batch, pipeline_loss,
    pipeline_calls, subnets_arguments, subnets_calls, hook_arguments,
]  # fmt: skip


def print_errors(rank):
    """Return what Python prints of each mistake, made at the top of a script."""
    printed = []
    for case in CASES:
        try:
            case(rank)
        except Exception as error:
            error.__traceback__ = error.__traceback__.tb_next
            printed.append("".join(traceback.format_exception(error)))
    return printed


@pytest.mark.slow
def test_a_mistake_prints_at_most_twelve_lines_a_rank(ranks, subtests):
    outcomes = ranks.run(2, print_errors, group_timeout=6, time_limit=200)
    for case, *printed in zip(CASES, *outcomes, strict=True):
        for rank, text in enumerate(printed):
            with subtests.test(case.__name__, rank=rank):
                lines = text.splitlines()
                of_user = 4 if case is pipeline_loss else 0  # the user's own error is another one
                assert len(lines) <= MOST_LINES + of_user, text
                assert text.count("in call\n") == 1, text  # the only frame of the package
                assert case is not pipeline_loss or rank == 0 or "in loss\n" in text


@pytest.mark.parametrize("error", [ValueError("a bug"), PeerError("rank 1 died")])
def test_errors_of_other_types_keep_their_frames(error):
    def inner():
        raise error from KeyError("cause")

    with pytest.raises(type(error)) as caught:
        concise(inner)()
    is_own = isinstance(error, PeerError)
    assert ("inner" in [each.name for each in caught.traceback]) is not is_own
    assert (error.__cause__ is None) is is_own
