"""A run resumed from a checkpoint with messages in flight equals one that was not interrupted."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, AllReduce, GossipState
from pyparallel.gossip.topology import Complete, Ring
from tests.cases import slow_unless
from tests.gossip.every_algorithm import COVERING, DETERMINISTIC, EVERY_ALGORITHM
from tests.workers import assert_equal_on_all_ranks, on_ranks


def build(algorithm):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = GossipDataParallel(model, optimizer, algorithm, bucket_cap_mb=0.002)
    return wrapped, optimizer


def train(model, optimizer, rank, steps):
    for index in steps:
        generator = torch.Generator().manual_seed(1000 * rank + index)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, generator=generator)).square().mean()
        model.record_loss(loss)
        loss.backward()
        optimizer.step()


def snapshot(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def resume(rank, name, stop, save, load):
    """Return the final states of an uninterrupted, a saving and a resumed run."""
    algorithm = EVERY_ALGORITHM[name](dist.get_world_size())
    model, optimizer = build(algorithm)
    train(model, optimizer, rank, range(10))
    model.flush()
    uninterrupted = snapshot(model)
    model.close()
    model, optimizer = build(algorithm)
    train(model, optimizer, rank, range(stop))
    save(GossipState(model, optimizer))
    train(model, optimizer, rank, range(stop, 10))
    model.flush()
    saving = snapshot(model)
    model.close()
    model, optimizer = build(algorithm)
    train(model, optimizer, rank, range(100, 102))  # to be overwritten, also in flight
    load(GossipState(model, optimizer))
    train(model, optimizer, rank, range(stop, 10))
    model.flush()
    return uninterrupted, saving, snapshot(model)


def resume_from_distributed_checkpoint(rank, name, folder):
    return resume(
        rank,
        name,
        6,
        lambda state: dcp.save({"gossip": state}, checkpoint_id=folder),
        lambda state: dcp.load({"gossip": state}, checkpoint_id=folder),
    )


def resume_from_files(rank, name, folder):
    path = f"{folder}/{rank}.pt"
    return resume(
        rank,
        name,
        5,
        lambda state: torch.save(state.state_dict(), path),
        lambda state: state.load_state_dict(torch.load(path)),
    )


@pytest.mark.parametrize("name", slow_unless(COVERING, DETERMINISTIC))
def test_a_run_resumes_bit_for_bit(ranks, name, tmp_path):
    way = resume_from_files if name != "osgp-3" else resume_from_distributed_checkpoint
    for uninterrupted, saving, resumed in ranks.run(4, way, name, str(tmp_path)):
        for a, b, c in zip(uninterrupted, saving, resumed, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@on_ranks(2)
def test_another_algorithm_or_number_of_ranks_is_an_error_on_every_rank(rank):
    model, optimizer = build(SGP(Ring(2)))
    saved = copy.deepcopy(GossipState(model, optimizer).state_dict())
    model.close()
    for algorithm, state, sentence in [
        (
            SGP(Complete(2)),
            saved,
            r"of the same algorithm, SGP\(topology=Complete\(2\), .*, got SGP",
        ),
        (AllReduce(), saved, "of the same algorithm, AllReduce"),
        (
            SGP(Ring(2)),
            {"rank-0-of-4": 1} if rank == 0 else saved,
            r"rank 0: state_dict must hold 'rank-0-of-2'.* got \['rank-0-of-4'\]",
        ),
    ]:
        model, optimizer = build(algorithm)
        with pytest.raises(ValueError, match=sentence) as error:
            GossipState(model, optimizer).load_state_dict(state)
        assert_equal_on_all_ranks(str(error.value))
        model.close()
