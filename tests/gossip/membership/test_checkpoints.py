"""Checkpoints of members that come and go, and members that begin as new ones."""

import re
import time

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import PeerError
from tests.gossip.membership.service import Served
from tests.gossip.membership.training import (
    Death,
    averager_of,
    die,
    die_at,
    exponential,
    flat_of,
    held,
    make,
    on_service,
    step,
    step_on,
)


def save_while_one_joins(address, store, rank, size):
    """Rank 2 comes while a consensus is saved; return that, and what there is afterwards."""
    if rank == 2:
        store.wait(["saving 0", "saving 1"])
    module, stepped, trainer, membership = make(address, rank, exponential, start=2, deadline=20.0)
    saved = None
    if rank < 2:
        with torch.no_grad():
            for buffer in trainer._buckets.buffers:
                buffer.add_(rank + 1.0)
        for _ in range(3):
            step(module, stepped, trainer)
        before = flat_of(trainer), float(trainer.push_sum_weight)
        with trainer.consensus() as averaged:
            store.set(f"saving {rank}", "")
            while not averager_of(trainer)._epochs.should_change:
                time.sleep(0.01)
            saved = torch.cat([each.flatten() for each in averaged.state_dict().values()])
        assert trainer.epoch == 1  # the joiner waits
        assert torch.equal(flat_of(trainer), before[0])
        assert float(trainer.push_sum_weight) == before[1]
        while len(trainer.members) == 2:
            step(module, stepped, trainer)
    after = held(trainer)
    for _ in range(2):
        step(module, stepped, trainer)
    with trainer.consensus():
        mean = torch.cat([buffer.double() for buffer in trainer._buckets.buffers])
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1", "done 2"])
    trainer.close()
    return saved, after, mean, membership.changes[-1].lost


def test_a_process_that_joins_waits_until_a_checkpoint_is_saved(ranks):
    """The checkpoint is one of two, and their mean is that of all three later: lr is 0."""
    first, second, third = ranks.run(3, on_service, save_while_one_joins)
    assert torch.equal(first[0], second[0])
    weights, numerators = zip(*(each[1] for each in (first, second, third)), strict=True)
    assert sum(weights) == pytest.approx(2, abs=1e-12)
    torch.testing.assert_close(sum(numerators) / sum(weights), first[2], rtol=1e-6, atol=1e-6)
    assert torch.equal(first[2], third[2])
    assert first[3] == second[3] == 0


def save_after_another_has_left_the_epoch(address, store, rank, size):
    """Rank 1 finds that rank 2 joins, and leaves the epoch, while rank 0 begins to save."""
    if rank == 2:
        store.wait(["trained"])
    module, stepped, trainer, _ = make(address, rank, exponential, start=2, deadline=20.0)
    text = ""
    if rank < 2:
        for _ in range(3):
            step(module, stepped, trainer)
        store.set("trained", "")
        while not averager_of(trainer)._epochs.should_change:
            time.sleep(0.01)
        if rank == 0:
            before = flat_of(trainer)
            with pytest.raises(PeerError) as caught, trainer.consensus():
                pass
            text = str(caught.value)
            assert torch.equal(flat_of(trainer), before)
        while len(trainer.members) == 2:
            step(module, stepped, trainer)
    with trainer.consensus():
        mean = flat_of(trainer)
    after = held(trainer)
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1", "done 2"])
    trainer.close()
    return text, mean, after[0]


@pytest.mark.slow
def test_a_checkpoint_for_which_another_member_does_not_come(ranks):
    found = ranks.run(3, on_service, save_after_another_has_left_the_epoch)
    text = r"rank 0, step 3: the all-gather failed \(.*Connection (closed|reset)"
    assert re.match(text, found[0][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], found[2][1])
    assert sum(each[2] for each in found) == pytest.approx(2, abs=1e-12)


def die_together(address, store, rank, size):
    """All die in a step; those that start again begin from what was saved, or from new weights."""
    module, stepped, trainer, membership = make(
        address, rank, exponential, start=size, deadline=20.0, width=7
    )
    for _ in range(3):
        step(module, stepped, trainer)
    with trainer.consensus() as averaged:
        saved = {key: each.clone() for key, each in averaged.state_dict().items()}
    die_at("after sending", trainer)
    with pytest.raises(Death):
        step_on(module, stepped, trainer)
    store.set(f"died {rank}", "")
    store.wait([f"died {each}" for each in range(size)])
    die(trainer, membership)
    store.set(f"dead {rank}", "")
    store.wait([f"dead {each}" for each in range(size)])
    found = []
    for attempt, loads in enumerate((False, True)):
        torch.manual_seed(10 + rank)
        again = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        again[2].bias.requires_grad_(False)
        own = torch.cat([p.detach().flatten() for p in again.parameters() if p.requires_grad])
        if loads:
            again.load_state_dict(saved)
        stepped = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.0)
        membership = Served(address, f"r{rank}", start=size, deadline=20.0)
        trainer = GossipDataParallel(again, stepped, exponential, membership=membership)
        change = membership.changes[-1]
        assert (trainer.epoch, change.joined, change.lost) == (1, ("r0", "r1"), 0)
        assert float(trainer.push_sum_weight) == 1
        found.append(flat_of(trainer))
        step(again, stepped, trainer)
        store.set(f"stepped {attempt} {rank}", "")
        store.wait([f"stepped {attempt} {each}" for each in range(size)])
        die(trainer, membership)
        store.set(f"ended {attempt} {rank}", "")
        store.wait([f"ended {attempt} {each}" for each in range(size)])
    flat = torch.cat([saved[key].flatten().double() for key, p in again.named_parameters()
                      if p.requires_grad])  # fmt: skip
    return own.double(), flat, found


def test_all_members_die_and_begin_as_new_ones(ranks):
    first, second = ranks.run(2, on_service, die_together)
    for each in (first, second):
        assert torch.equal(each[2][0], first[0])  # the first one's module
        assert torch.equal(each[2][1], first[1])  # what was saved
    assert not torch.equal(first[0], first[1])
