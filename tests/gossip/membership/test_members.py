"""Members that die, join and leave, over gloo: what they have, and what others have then."""

import itertools
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from pyparallel.comm import PeerError, Run
from pyparallel.gossip import SGP
from pyparallel.gossip.algorithms.sgp import combine_while_adapt
from pyparallel.gossip.membership.decision import Epoch, name_of
from pyparallel.gossip.membership.group import EpochGroup
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.topology import OnePeerExponential
from pyparallel.optim import SGD
from tests.gossip.membership.training import (
    Death,
    accounts,
    averager_of,
    compressing,
    delayed,
    die,
    die_at,
    exponential,
    flat_of,
    held,
    make,
    on_service,
    overlapping,
    step,
    step_on,
    symmetric,
)

# ------------------------------------------------------------------------------------------ deaths

MOMENTS = ("before the round", "after sending", "after merging", "after the receipts")


def sent_of(account, rounds):
    """Return the last round's number, its unacknowledged masses by receiver, and its message."""
    masses = {name_of(key): mass * 2.0**-account.exponent for key, mass in account.sent.items()}
    return account.round, masses, torch.cat([each.double() for each in rounds.sent_messages])


def lose_one_after_another(address, store, rank, size, algorithm, optimizer):
    """All but one rank die, each at another moment; return what each has had, and what is left."""
    module, stepped, trainer, membership = make(
        address, rank, algorithm, start=size, deadline=20.0, optimizer=optimizer
    )
    with torch.no_grad():
        for buffer in trainer._buckets.buffers:
            buffer.add_(rank + 1.0)
    log = []
    for moment in MOMENTS[: size - 1]:
        dying = size - 1 - MOMENTS.index(moment)
        for _ in range(3):
            step(module, stepped, trainer)
        epoch = trainer.epoch
        trainer.flush()
        averager_of(trainer).inner.current.await_receipts()
        before = held(trainer)
        if rank == dying:
            die_at(moment, trainer)
            account, rounds = averager_of(trainer).inner.account, averager_of(trainer).inner.current
            with pytest.raises(Death):
                step_on(module, stepped, trainer)
            sent = sent_of(account, rounds)
            die(trainer, membership)
            merged = {name_of(key): each for key, each in account.merged[str(epoch)].items()}
            log.append((before, held(trainer), merged, sent))
            return log
        while trainer.epoch == epoch:
            rounds = averager_of(trainer).inner.current
            step(module, stepped, trainer)
        account = accounts[membership.name]
        merged = {name_of(key): each for key, each in account.merged[str(epoch)].items()}
        sent = sent_of(account, rounds)
        log.append((before, held(trainer), merged, sent, membership.changes[-1]))
    assert trainer.members == (f"r{rank}",)
    assert float(trainer.push_sum_weight) == pytest.approx(1)
    trainer.leave()
    return log


def check_losses(logs):
    """Compare what survivors have with all that there was, without what the dead rank had."""
    size = len(logs)
    for number, dying in enumerate(range(size - 1, 0, -1)):
        rows = [log[number] for log in logs[: dying + 1]]
        weights, numerators = zip(*(row[0] for row in rows), strict=True)
        _, (w, x), merged_by_dead, (last, lost, message) = rows[-1]
        total = sum(weights)
        for rank, (_, _, merged, (index, masses, value), _) in enumerate(rows[:-1]):
            mass = lost.get(f"r{rank}", 0.0)
            if merged.get(f"r{dying}", -1) < last:  # in flight, and lost
                w, x = w + mass, x + mass * message
            mass = masses.get(f"r{dying}", 0.0)
            if merged_by_dead.get(f"r{rank}", -1) >= index:  # and taken back
                w, x = w - mass, x - mass * value
        after_w, after_x = zip(*(row[1] for row in rows[:-1]), strict=True)
        assert sum(after_w) == pytest.approx(total - w, abs=1e-12)
        expected = sum(numerators) - x
        torch.testing.assert_close(sum(after_x), expected, rtol=1e-6, atol=1e-6)
        for row in rows[:-1]:
            assert row[4].lost == pytest.approx(w / total, abs=1e-12)
            assert row[4].left == (f"r{dying}",)


# --------------------------------------------------------------------- updates beside the messages

RATE, NUM_STEPS = 0.25, 7


def update_beside_messages(address, store, rank, size, overlap, optimizer):
    """Rank 2 leaves after some steps, whose gradients are known; return what there was and is."""
    algorithm = SGP(OnePeerExponential, overlap=overlap)
    _, stepped, trainer, _ = make(
        address, rank, algorithm, start=size, deadline=20.0, optimizer=optimizer
    )
    stepped.param_groups[0]["lr"] = RATE
    with torch.no_grad():
        for buffer in trainer._buckets.buffers:
            buffer.add_(rank + 1.0)
    steps = [0, 0]  # with rank 2, and without it
    rows = [flat_of(trainer)]

    def take_step():
        for parameter in stepped.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        steps[trainer.epoch > 1] += 1
        stepped.step()
        rows.append(flat_of(trainer))

    for _ in range(NUM_STEPS):
        take_step()
    if rank == 2:
        trainer.leave()
        return rows[: NUM_STEPS + 1], steps, 0.0
    while trainer.epoch == 1:
        take_step()
    for _ in range(3):
        take_step()
    trainer.flush()
    last = float(trainer.push_sum_weight), float(trainer.push_sum_weight) * flat_of(trainer)
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])
    trainer.close()
    return rows[: NUM_STEPS + 1], steps, last


def update(z):
    return RATE * torch.arange(1.0, 4).double().view(3, 1).expand_as(z)


def follow_the_rule(z, overlap):
    """Return z of all three ranks after each step, by the rule for all of them at once."""
    x, w, in_flight, topology = z, torch.ones(3, 1).double(), None, OnePeerExponential(3)
    since, number, rows = 0, 0, []
    for _ in range(NUM_STEPS):
        since += 1
        merges = in_flight is not None and since >= overlap
        sends = merges or in_flight is None
        mixing = torch.as_tensor(topology.mixing_matrix(number)).double() if sends else None
        x, w, in_flight = combine_while_adapt(x, w, in_flight, update, mixing, merges=merges)
        number, since = number + sends, 0 if sends else since
        rows.append(x / w)
    return rows


@pytest.mark.parametrize(
    ("overlap", "optimizer"),
    [
        (1, SGD),
        pytest.param(1, torch.optim.SGD, marks=pytest.mark.slow),
        pytest.param(2, SGD, marks=pytest.mark.slow),
    ],
)
def test_updates_beside_messages(ranks, overlap, optimizer):
    """Steps follow the rule, and numerators add up to those at the beginning without the updates.

    In its last steps another rank may know already that rank 2 leaves.
    Weights of three sum to 3, and of two to 2: without rank 2 they are 2/3 of what they were.
    """
    logs = ranks.run(3, on_service, update_beside_messages, overlap, optimizer)
    begin, *steps = (torch.stack(rows) for rows in zip(*(log[0] for log in logs), strict=True))
    for z, expected in zip(steps[:-overlap], follow_the_rule(begin, overlap), strict=False):
        torch.testing.assert_close(z, expected, rtol=1e-6, atol=1e-6)
    updates = [sum(log[1][e] * RATE * (r + 1) for r, log in enumerate(logs)) for e in (0, 1)]
    expected = (begin.sum(0) - updates[0]) * 2 / 3 - updates[1]
    assert sum(log[2][0] for log in logs[:2]) == pytest.approx(2, abs=1e-12)
    torch.testing.assert_close(sum(log[2][1] for log in logs[:2]), expected, rtol=1e-6, atol=1e-5)


# ----------------------------------------------------------------------------- joining and leaving


def join_and_leave(address, store, rank, size, algorithm, optimizer):
    """Rank 2 joins while 0 and 1 train, then rank 1 leaves; masses and means stay.

    What a joiner has is not in them: its parameters were never set, as after ``to_empty``.
    """
    if rank == 2:
        store.wait(["trained"])
    module, stepped, trainer, membership = make(
        address, rank, algorithm, start=2, deadline=20.0, optimizer=optimizer,
        trained=math.nan if rank == 2 else None,
    )  # fmt: skip
    frozen = float(module[2].bias.sum())
    if rank < 2:
        # A buffer of its own from now on, as ``self.buffer = ...`` makes.
        module[1].num_batches_tracked = module[1].num_batches_tracked + 1000
        with torch.no_grad():
            for buffer in trainer._buckets.buffers:
                buffer.add_(rank + 1.0)
        for _ in range(3):
            step(module, stepped, trainer)
        store.set("trained", "")
        while len(trainer.members) == 2:
            step(module, stepped, trainer)
    assert len(trainer.members) == 3
    joined = held(trainer), membership.changes[-1], frozen
    counts = module[1].num_batches_tracked.item()
    assert counts >= 1000
    for _ in range(4):
        step(module, stepped, trainer)
    assert module[1].num_batches_tracked.item() == counts + 4
    if rank == 1:
        trainer.leave()
        with pytest.raises(RuntimeError, match="must not be used after close"):
            _ = trainer.members
        return joined, None, None
    while len(trainer.members) == 3:
        step(module, stepped, trainer)
    left = held(trainer), membership.changes[-1]
    for _ in range(2):
        step(module, stepped, trainer)
    with trainer.consensus() as averaged:
        mean = torch.cat([p.detach().flatten() for p in averaged.parameters()])
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 2"])
    trainer.close()
    return joined, left, mean


def check_joined(found):
    joined = [each[0] for each in found]
    weights, numerators = zip(*(each[0] for each in joined), strict=True)
    assert sum(weights) == pytest.approx(2, abs=1e-12)
    assert min(weights) > 0
    last = [each[1] for each in joined]
    assert all(change.joined == ("r2",) and change.lost == 0 for change in last)
    assert joined[2][2] == joined[0][2]  # frozen parameters come along
    (a, change), (c, _) = found[0][1], found[2][1]
    assert a[0] + c[0] == pytest.approx(2, abs=1e-12)
    # Steps round, and a loaded machine takes hundreds of them before rank 1 has left.
    torch.testing.assert_close(a[1] + c[1], sum(numerators), rtol=1e-4, atol=1e-4)
    assert change.left == ("r1",)
    assert change.lost == 0
    torch.testing.assert_close(found[0][2], found[2][2], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (exponential, torch.optim.SGD),
        (overlapping, SGD),
        (compressing, torch.optim.SGD),
        pytest.param(symmetric, SGD, marks=pytest.mark.slow),
        pytest.param(delayed, torch.optim.SGD, marks=pytest.mark.slow),
        pytest.param(overlapping, torch.optim.SGD, marks=pytest.mark.slow),
        pytest.param(compressing, SGD, marks=pytest.mark.slow),
    ],
)
def test_members_die(ranks, algorithm, optimizer):
    check_losses(ranks.run(5, on_service, lose_one_after_another, algorithm, optimizer))


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (symmetric, SGD),
        pytest.param(overlapping, torch.optim.SGD, marks=pytest.mark.slow),
        pytest.param(compressing, SGD, marks=pytest.mark.slow),
    ],
)
def test_members_join_and_leave(ranks, algorithm, optimizer):
    check_joined(ranks.run(3, on_service, join_and_leave, algorithm, optimizer))


# ------------------------------------------------------------------------------- a silent member


def fall_silent(address, store, rank, size):
    """Rank 2 stops for longer than the deadline, in a round, and comes back as one that joins."""
    module, stepped, trainer, membership = make(
        address, rank, exponential, start=size, deadline=1.0
    )
    with torch.no_grad():
        for buffer in trainer._buckets.buffers:
            buffer.add_(rank + 1.0)
    for _ in range(4):
        step(module, stepped, trainer)
    if rank == 2:
        store.wait(["alone"])
    while trainer.epoch == 1:
        step(module, stepped, trainer)
    if rank == 0:
        assert trainer.members == ("r0", "r1")
        store.set("alone", "")
    while len(trainer.members) < 3:
        step(module, stepped, trainer)
    after = held(trainer)
    for _ in range(2):
        step(module, stepped, trainer)
    trainer.flush()
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1", "done 2"])
    trainer.close()
    return after, [change.lost for change in membership.changes]


@pytest.mark.slow
def test_a_silent_member(ranks):
    """It is left behind with what it has, and all that is left is what all three have at last."""
    (first, lost), (second, others_lost), (third, _) = ranks.run(3, on_service, fall_silent)
    assert lost == others_lost
    assert sum(each[0] for each in (first, second, third)) == pytest.approx(
        3 * (1 - sum(lost)), abs=1e-12
    )
    assert 0 < sum(lost) < 1
    assert third[0] > 0


# ------------------------------------------------------------------------- groups that are not made


def begin_after_a_failure(address, store, rank, size):
    """Rank 1 dies before it comes, then comes and makes no group; the next one must be made."""
    group = EpochGroup()
    store.set(f"port {rank}", str(group.server.port))
    host = "127.0.0.1", int(store.get("port 0"))
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(PeerError, match="not all members have come: r1 left or died"):
            group.begin(Epoch(1, ("r0", "r1"), host), "r0", 60.0, lambda: "r1 left or died")
        with pytest.raises(PeerError, match="not all members have come: Timed out"):
            group.begin(Epoch(1, ("r0", "r1"), host), "r0", 0.1)
        with (
            mock.patch.object(PrefixStore, "check", return_value=True),
            pytest.raises(RuntimeError),
        ):
            group.begin(Epoch(1, ("r0", "r1"), host), "r0", 1.0)
        assert time.monotonic() - begin < 30
    group.begin(Epoch(2, ("r0", "r1"), host), f"r{rank}", 20.0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    group.end()
    return tensor.item()


def test_a_group_is_made_after_one_that_was_not(ranks):
    assert ranks.run(2, on_service, begin_after_a_failure) == [2.0, 2.0]


class DyingStore(dist.Store):
    """A store in which a rank publishes its address, and then ends."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, *_):
        raise RuntimeError("gloo's last moment")


def connect_without_one(address, store, rank, size):
    """Rank 2 dies while gloo connects, until another one has waited for its connection.

    Which of two ranks begins a connection is by chance; where the dead one does not, it is refused.
    """
    group, make, rounds = EpochGroup(), dist.init_process_group, itertools.count(1)
    store.set(f"port {rank}", str(group.server.port))
    host, members = ("127.0.0.1", int(store.get("port 0"))), ("r0", "r1", "r2")

    def end(*arguments, store, world_size, **options):
        store = DyingStore(store) if world_size == 3 else store
        make(*arguments, store=store, world_size=world_size, **options)

    for number in rounds:
        text = ""
        try:
            with mock.patch.object(dist, "init_process_group", end if rank == 2 else make):
                group.begin(Epoch(number, members, host), members[rank], 600.0)
        except RuntimeError as error:
            text = str(error)
        group.end()
        store.set(f"{number} {rank}", text)
        if any(b"Connect timeout" in store.get(f"{number} {each}") for each in range(size)):
            break
    if rank < 2:
        group.begin(Epoch(number + 1, members[:2], host), members[rank], 600.0)
        time.sleep(rank)  # longer than a message may take while members connect
        exchange, peer = NeighborExchange(Run()), [1 - rank]
        received = exchange.swap([torch.tensor([rank + 1.0])], peer, peer).wait()
        group.end()
        return received.messages[0][0].item()
    return None


@pytest.mark.slow
def test_a_member_dies_while_all_connect(ranks):
    """Its death is found long before the deadline, which is then that of messages."""
    assert ranks.run(3, on_service, connect_without_one) == [2.0, 1.0, None]
