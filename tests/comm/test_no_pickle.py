"""Nothing that a rank receives is unpickled: a pickle can run any code of its sender."""

import contextlib
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from pyparallel.comm import DisagreementError
from pyparallel.compression import Int8, TopK, compress_fsdp
from pyparallel.gossip import SGP, GossipState
from pyparallel.gossip.topology import OnePeerExponential
from pyparallel.pipeline import OneForwardOneBackward, PipeOptim
from tests.comm import trainers
from tests.gossip.every_algorithm import COVERING, EVERY_ALGORITHM
from tests.gossip.loops import step, wrap


def fail(*_, **__):
    raise AssertionError("a rank pickles or unpickles")


@contextlib.contextmanager
def without_objects():
    """Fail in the collectives that send objects; files may be pickles."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(dist.distributed_c10d, name, fail)
        yield


@contextlib.contextmanager
def without_pickle():
    with without_objects(), pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "dumps"):
            patch.setattr(pickle, name, fail)
        yield


def gossip(name, num_ranks):
    model, optimizer = wrap(
        EVERY_ALGORITHM[name](num_ranks), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    )
    step(model, optimizer)
    model.flush()
    state = GossipState(model, optimizer)
    state.load_state_dict(state.state_dict())
    model.load_state_dict(model.state_dict())
    with model.consensus():
        pass
    model.close()


def subnets():
    trainer, step = trainers.subnets()
    step()
    trainer.load_state_dict(trainer.state_dict())
    with trainer.full_model():
        pass


def pipeline(schedule, split):
    batch = torch.ones(4, 4), torch.ones(4, 4)
    trainer, _ = trainers.pipeline(schedule, num_layers=5, split=split)
    trainer.prepare(*batch)
    trainer.step(*batch)
    trainer.export_chrome_trace(os.devnull)
    trainer.flush()
    trainer.load_state_dict(trainer.state_dict())
    trainer.sharded_state_dict()
    trainer.full_state_dict()
    return trainer.split


def hooks():
    state, step = trainers.hook(TopK(0.5))
    step()
    state.load_state_dict(state.state_dict())
    sharded = nn.Linear(4, 2)
    fully_shard(sharded)
    compress_fsdp(sharded, gradients=Int8())
    trainers.backward(sharded)


def train_everything(rank, num_ranks):
    with without_pickle():
        for name in [*COVERING, "adpsgd"]:
            gossip(name, num_ranks)
        subnets()
        splits = [pipeline(OneForwardOneBackward(), None), pipeline(PipeOptim(), (2,))]
        hooks()
    return splits


def test_no_rank_unpickles_what_another_sent(ranks):
    first, second = ranks.run(2, train_everything, 2)
    assert first == second


def save_folders(folder):
    """Return a pipeline and a gossip trainer with its state, both of which are saved."""
    torch.manual_seed(0)
    trainer, _ = trainers.pipeline(split=[1])
    trainer.prepare(torch.randn(4, 4), torch.randn(4, 4))
    model, optimizer = wrap(SGP(OnePeerExponential(2)), nn.Linear(4, 2))
    step(model, optimizer)
    state = GossipState(model, optimizer)
    dcp.save(trainer.sharded_state_dict(), checkpoint_id=f"{folder}/pipeline")
    dcp.save({"gossip": state}, checkpoint_id=f"{folder}/gossip")
    return trainer, model, state


def load_folders(rank, folder):
    trainer, model, state = save_folders(folder)
    parameters = [*trainer.stages[0].module.parameters(), *model.parameters()]
    trained = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        nn.init.zeros_(parameter)
    with without_objects():
        trainer.load_checkpoint(f"{folder}/pipeline")
        state.load(f"{folder}/gossip")
    model.close()
    return all(torch.equal(*pair) for pair in zip(parameters, trained, strict=True))


def test_checkpoints_are_loaded_without_objects_of_other_ranks(ranks, tmp_path):
    assert ranks.run(2, load_folders, str(tmp_path)) == [True, True]


def load_damaged(rank, folder):
    """Return the errors for folders in which the file of rank 1 is empty, and for none."""
    trainer, model, state = save_folders(folder)
    for name in ("pipeline", "gossip") if rank == 1 else ():
        Path(folder, name, "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    errors = []
    for load, name in (
        (trainer.load_checkpoint, "pipeline"),
        (state.load, "gossip"),
        (state.load, "none"),
    ):
        with pytest.raises(DisagreementError) as error:
            load(f"{folder}/{name}")
        errors.append(str(error.value))
    model.close()
    return errors


def test_a_damaged_folder_is_one_error_on_all_ranks(ranks, tmp_path):
    first, second = ranks.run(2, load_damaged, str(tmp_path))
    assert first == second
    for error in first[:2]:
        assert ": checkpoint_id must be a whole checkpoint, got " in error
    assert first[1].startswith("rank 1: ")  # the other one reads its own file alone
    assert "checkpoint_id must be a folder that torch.distributed.checkpoint has saved" in first[2]
