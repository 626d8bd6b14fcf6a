"""States of sharded replicas: resumed to the bit, and exchanged with plain FSDP2 through DCP."""

import io
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from pyparallel.comm import DisagreementError
from pyparallel.gossip import GossipState
from tests.gossip.sharded.test_shards import (
    ADAMW,
    ALGORITHMS,
    FUSED_ADAMW,
    build,
    make_mesh,
    shard,
    start,
    train,
)
from tests.workers import call_each


def snapshot(module):
    return [p.to_local().clone() for p in module.parameters()]


def full(module):
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def shared_folder():
    """Return a new folder, the same on all ranks."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def resumes_to_the_bit(rank, name, kind):
    mesh, folder = make_mesh(), shared_folder()
    algorithm, file = ALGORITHMS[name](2), io.BytesIO()
    module, optimizer, trainer = start(mesh, algorithm, kind)
    train(mesh, trainer, optimizer, range(3))
    state = GossipState(trainer, optimizer)
    dcp.save({"gossip": state}, checkpoint_id=folder)
    saved = state.state_dict()
    torch.save(saved, file)
    tensors = saved[state._key].values["module"].values()
    assert not any(isinstance(each, DTensor) for each in tensors)
    train(mesh, trainer, optimizer, range(3, 6))
    expected = snapshot(module)
    whole = trainer.full_state_dict()
    with trainer.consensus() as averaged:
        average = full(averaged)
    assert_same(whole, {} if rank else average)
    for how in ("dcp", "torch"):
        module, optimizer, resumed = start(mesh, algorithm, kind)
        train(mesh, resumed, optimizer, range(10, 11))  # to be overwritten
        state = GossipState(resumed, optimizer)
        if how == "dcp":
            state.load(folder)
        else:
            state.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        train(mesh, resumed, optimizer, range(3, 6))
        assert all(map(torch.equal, expected, snapshot(module))), how
        resumed.close()
    trainer.close()


def refuses_another_shard(rank):
    """The states of the other shard of a replica load nowhere; nothing has changed then."""
    mesh = make_mesh()
    module, optimizer, trainer = start(mesh, ALGORITHMS["sgp"](2), ADAMW)
    train(mesh, trainer, optimizer, range(1))
    state = GossipState(trainer, optimizer)
    if rank == 1:
        state._key = state._key.replace("shard-1", "shard-0")
    saved = state.state_dict()
    state._key = state._key.replace("shard-0", f"shard-{rank % 2}")
    before = snapshot(module)
    with pytest.raises(DisagreementError, match="state_dict must hold 'rank-0-of-2-shard-1-of-2'"):
        state.load_state_dict(saved)
    assert all(map(torch.equal, before, snapshot(module)))
    trainer.close()


def exchanges_with_fsdp2(rank, kind):
    """The consensus goes to FSDP2 on another mesh; model and optimizer of FSDP2 come back."""
    mesh, folder = make_mesh(), shared_folder()
    module, optimizer, trainer = start(mesh, ALGORITHMS["sgp-overlap-1"](2), kind)
    train(mesh, trainer, optimizer, range(3))
    with trainer.consensus() as average:
        consensus = full(average)
        dcp.save({"model": get_model_state_dict(average)}, checkpoint_id=folder / "consensus")
    whole = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = shard(build(), whole)
    state = get_model_state_dict(plain)
    dcp.load({"model": state}, checkpoint_id=folder / "consensus")
    set_model_state_dict(plain, state)
    assert_same(full(plain), consensus)
    own = ADAMW(plain.parameters(), lr=0.05)
    for step in range(2):
        plain(torch.full((3, 6), step + 1.0)).square().mean().backward()
        own.step()
    model_state, optimizer_state = get_state_dict(plain, own)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "fsdp2")
    trainer.flush()  # before DCP writes into the live tensors
    model_state, optimizer_state = get_state_dict(trainer, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(saved, checkpoint_id=folder / "fsdp2")
    set_state_dict(
        trainer, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert_same(full(module), full(plain))
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        for key, value in own.state[theirs].items():
            found = optimizer.state[mine][key]
            pair = (
                each.full_tensor() if isinstance(each, DTensor) else each for each in (found, value)
            )
            assert torch.equal(*pair), key
    options = StateDictOptions(full_state_dict=True)
    everything = get_model_state_dict(trainer, options=options)
    assert_same(dict(everything), full(plain))
    set_model_state_dict(trainer, {n: each * 2 for n, each in everything.items()}, options=options)
    assert_same(full(module), {name: each * 2 for name, each in everything.items()})
    train(mesh, trainer, optimizer, range(1))  # the next all-gathers read what was loaded
    trainer.close()


def test_a_run_resumes_to_the_bit(ranks):
    ranks.run(4, resumes_to_the_bit, "sgp-overlap-1", FUSED_ADAMW)


@pytest.mark.slow
def test_every_algorithm_resumes(ranks):
    rows = [(resumes_to_the_bit, name, ADAMW) for name in ALGORITHMS]
    rows += [(refuses_another_shard,)]
    rows += [(exchanges_with_fsdp2, kind) for kind in (ADAMW, FUSED_ADAMW)]
    ranks.run(4, call_each, rows, time_limit=180)
