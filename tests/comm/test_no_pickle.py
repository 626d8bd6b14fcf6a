"""Nothing that a rank receives is unpickled: a pickle can run any code of its sender."""

import contextlib
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pyparallel.compression import Int8, TopK, compress_fsdp, ddp_hook
from pyparallel.gossip import GossipState
from pyparallel.pipeline import OneForwardOneBackward, PipelineTrainer, PipeOptim
from pyparallel.subnets import Partition, SubnetTrainer
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.gossip.loops import step, wrap


def fail(*_, **__):
    raise AssertionError("a rank pickles or unpickles")


@contextlib.contextmanager
def without_pickle():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):  # of torch's object collectives
            patch.setattr(dist.distributed_c10d, name, fail)
        for name in ("load", "loads", "dumps"):
            patch.setattr(pickle, name, fail)
        yield


def gossip(name, num_ranks):
    model, optimizer = wrap(EVERY_ALGORITHM[name](num_ranks), nn.Linear(4, 2))
    step(model, optimizer)
    model.flush()
    state = GossipState(model, optimizer)
    state.load_state_dict(state.state_dict())
    model.load_state_dict(model.state_dict())
    with model.consensus():
        pass
    model.close()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def subnets():
    trainer = SubnetTrainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), sgd, Partition(), 1
    )
    trainer(torch.randn(2, 4)).sum().backward()
    trainer.optimizer.step()
    trainer.load_state_dict(trainer.state_dict())
    with trainer.full_model():
        pass


def pipeline(schedule, split):
    layers = [nn.Linear(4, 4) for _ in range(5)]
    batch = torch.randn(4, 4), torch.randn(4, 4)
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, sgd, schedule, num_microbatches=2, split=split
    )
    trainer.prepare(*batch)
    trainer.step(*batch)
    trainer.flush()
    trainer.load_state_dict(trainer.state_dict())
    return trainer.split


def hooks():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    state, hook = ddp_hook(TopK(0.5))
    model.register_comm_hook(state, hook)
    model(torch.randn(2, 4)).sum().backward()
    state.load_state_dict(state.state_dict())
    sharded = nn.Linear(4, 2)
    fully_shard(sharded)
    compress_fsdp(sharded, gradients=Int8())
    sharded(torch.randn(2, 4)).sum().backward()


def train_everything(rank, num_ranks):
    with without_pickle():
        for name in EVERY_ALGORITHM:
            gossip(name, num_ranks)
        subnets()
        splits = [pipeline(OneForwardOneBackward(), None), pipeline(PipeOptim(), (2,))]
        hooks()
    return splits


def test_no_rank_unpickles_what_another_sent(ranks):
    first, second = ranks.run(2, train_everything, 2)
    assert first == second
