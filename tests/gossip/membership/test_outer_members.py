"""Outer steps of members that die, join, lose an answer and leave, against rules written out."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import PeerError
from pyparallel.comm.failures import disconnect
from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import DiLoCo, LocalSGD, NoLoCo, StreamingDiLoCo
from pyparallel.gossip.algorithms.fragments import Fragment
from pyparallel.gossip.algorithms.periodic import PeriodicAverager
from pyparallel.gossip.membership.group import EpochGroup
from pyparallel.gossip.messages.averages import AllRanks
from pyparallel.gossip.topology import RandomMatching
from pyparallel.optim import SGD
from tests.gossip.membership.service import Served
from tests.gossip.membership.training import (
    Death,
    averager_of,
    die,
    exponential,
    on_service,
)

pytestmark = pytest.mark.slow  # 18 seconds: likewise of an outer step

INTERVAL, OUTER_RATE, MOMENTUM = 3, 0.7, 0.9


def make(address, rank, algorithm, optimizer=torch.optim.SGD, **options):
    """Return a step of training, the trainer and the membership."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[2].bias.requires_grad_(False)
    stepped = optimizer([p for p in module.parameters() if p.requires_grad], lr=0.1)
    membership = Served(address, f"r{rank}", deadline=20.0, **options)
    trainer = GossipDataParallel(module, stepped, algorithm, membership=membership)

    def step():
        stepped.zero_grad()
        inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))
        (trainer(inputs) - rank).square().mean().backward()
        stepped.step()

    return step, trainer, membership


def outer_steps_of(trainer):
    return averager_of(trainer).inner.inner


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors]).clone()


@contextmanager
def written(rows, members):
    """Have rows get what this rank sends in outer steps, and what it has after each."""
    start, take = AllRanks.start, Fragment.take_outer_step
    last = {}

    def log_start(average, layouts, tensors, *others, index, weight):
        rows.append(("sent", index + 1, flat(tensors)))
        wait = start(average, layouts, tensors, *others, index=index, weight=weight)
        last.update(number=index + 1, averages=flat(wait()), size=average._run.size)
        return wait

    def log_take(fragment, mix):
        take(fragment, mix)
        rows.append(("took", *last.values(), flat(fragment.weights)))

    with (
        mock.patch.object(AllRanks, "start", log_start),
        mock.patch.object(Fragment, "take_outer_step", log_take),
    ):
        yield


def fail_at_next(trainer, *, sends, error):
    """Have the next average fail on this rank, perhaps once the others have it."""
    average = outer_steps_of(trainer)._average
    start = average.start

    def fail(*arguments, **options):
        if sends:
            start(*arguments, **options)()
        raise error

    average.start = fail


def live_through_changes(address, store, rank, size, algorithm, optimizer, log_into=written):
    """Train; return the log, what each epoch began with, and the changes.

    Rank 4 joins, 3 dies between outer steps, 1 loses the answer of one, 0 cannot send in one, 2
    dies after it has sent in one, 4 leaves.
    """
    rows, begun = [], []
    if rank == 4:
        store.wait(["trained"])
    trainer = None
    with log_into(rows, lambda: trainer.members):
        step, trainer, membership = make(
            address, rank, algorithm, optimizer, start=4, on_change=begun.append
        )
        filled = {trainer.epoch: flat(trainer._buckets.buffers)}
        plan = plan_of(rank, store, trainer, membership, rows)
        while next(plan):
            epoch = trainer.epoch
            try:
                step()
            except Death:
                die(trainer, membership)
                break
            rows.append(("step",))
            if trainer.epoch > epoch:
                filled[trainer.epoch] = flat(trainer._buckets.buffers)
    return rows, filled, begun


def plan_of(rank, store, trainer, membership, rows):
    """Yield True before each step of a rank, and once False, when it has ended."""
    count = lambda: sum(row[0] == "took" for row in rows)  # noqa: E731

    def steps_until(condition):
        while not condition():
            yield True

    def members_are(*names):
        return lambda: trainer.members == names

    def steps_for(number):
        end = count() + number
        return steps_until(lambda: count() >= end)

    if rank < 4:
        yield from steps_for(2)
        store.set("trained", "")
    yield from steps_until(members_are("r0", "r1", "r2", "r3", "r4"))
    if rank == 3:
        yield from steps_for(1)
        die(trainer, membership)
        yield False
    yield from steps_until(members_are("r0", "r1", "r2", "r4"))
    for loser, event in ((1, "lost"), (0, "failed")):
        if rank == loser:
            error = PeerError(f"what rank {rank} sent {event}")
            fail_at_next(trainer, sends=event == "lost", error=error)
            epoch = trainer.epoch
            yield from steps_until(lambda epoch=epoch: trainer.epoch > epoch)
            store.set(event, "")
        yield from steps_until(lambda event=event: store.check([event]))
    if rank == 2:
        fail_at_next(trainer, sends=True, error=Death())
        yield from steps_until(lambda: False)
    yield from steps_until(members_are("r0", "r1", "r4"))
    if rank == 4:
        trainer.leave()
        yield False
    yield from steps_until(members_are("r0", "r1"))
    yield from steps_for(2)
    with trainer.consensus() as averaged:
        rows.append(("consensus", flat(averaged.parameters())))
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])
    trainer.close()
    yield False


def nesterov(theta, gradient, velocity):
    """Return theta and the velocity after a step of SGD with Nesterov momentum (Sutskever)."""
    velocity = gradient if velocity is None else MOMENTUM * velocity + gradient
    return theta - OUTER_RATE * (gradient + MOMENTUM * velocity), velocity


def check_outer_steps(logs, is_diloco):
    sent = {(row[1], rank): row[2] for rank, log in enumerate(logs) for row in log[0]
            if row[0] == "sent"}  # fmt: skip
    took = {}
    for log in logs:
        for row in log[0]:
            if row[0] == "took":
                took.setdefault(row[1], []).append(row[2:])
    theta, velocity = logs[0][1][1].double(), None
    assert sorted(took) == list(range(1, max(took) + 1))
    for number in sorted(took):
        averages, size, new = took[number][0]
        for others in took[number][1:]:
            torch.testing.assert_close(others, (averages, size, new), rtol=0, atol=0)
        messages = [sent[key].double() for key in sorted(sent) if key[0] == number]
        assert len(messages) == size
        mean = torch.stack(messages).mean(0)
        torch.testing.assert_close(averages.double(), mean, rtol=1e-6, atol=1e-6)
        if is_diloco:
            theta, velocity = nesterov(theta, theta - mean, velocity)
            torch.testing.assert_close(new.double(), theta, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(new, averages, rtol=0, atol=0)
    return took


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (DiLoCo(INTERVAL), SGD),
        (LocalSGD(INTERVAL), torch.optim.SGD),
    ],
)
def test_outer_steps_of_members(ranks, algorithm, optimizer):
    logs = ranks.run(5, on_service, live_through_changes, algorithm, optimizer)
    took = check_outer_steps(logs, isinstance(algorithm, DiLoCo))
    lost = [number for number, rows in took.items() if len(rows) == rows[0][1] - 1]
    assert len(lost) == 2  # rank 1 was filled, and rank 2 died
    for _, _, begun in logs[:2]:
        changes = {each.epoch: each for each in begun}
        assert [each.left for each in begun if each.left] == [("r3",), ("r2",), ("r4",)]
        assert any("r4" in each.joined for each in begun)
        assert all(each.lost == each.returned == 0 for each in changes.values())
    # What rank 4 joins with, and what rank 1 is filled with, are another member's.
    for rank in (1, 4):
        epoch = min(logs[rank][1]) if rank == 4 else next(
            each.epoch for each in logs[1][2] if "sent lost" in each.reason
        )  # fmt: skip
        others = [log[1].get(epoch) for number, log in enumerate(logs) if number != rank]
        own = logs[rank][1][epoch]
        assert any(each is not None and torch.equal(each, own) for each in others)
    torch.testing.assert_close(logs[0][0][-1][1], logs[1][0][-1][1], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ pairs


PAIRED = {"momentum": 0.5, "outer_lr": 0.6, "pull": 0.5}


def noloco(compressor=None):
    return NoLoCo(interval=INTERVAL, **PAIRED, compressor=compressor)


@contextmanager
def pairs_written(rows, members):
    """Have rows get theta, phi and the partner of each outer step, and m and theta after it."""
    send, take = PeriodicAverager._send, Fragment.take_outer_step
    last = {}

    def log_send(averager, fragment, index):
        matching, rank = averager._average._matching, averager._average._exchange.rank
        partner = None if matching is None else matching.partner(rank, index)
        name = None if partner is None else members()[partner]
        last.update(number=index + 1, partner=name)
        rows.append(("sent", index + 1, flat(fragment.weights), flat(fragment.rule.slow)))
        send(averager, fragment, index)

    def log_take(fragment, mix):
        momentum = flat(fragment.rule._momentum)
        take(fragment, mix)
        rows.append(("took", *last.values(), momentum, flat(fragment.weights)))

    with (
        mock.patch.object(PeriodicAverager, "_send", log_send),
        mock.patch.object(Fragment, "take_outer_step", log_take),
    ):
        yield


@pytest.mark.parametrize("compressor", [None, ErrorFeedback(TopK(0.3))])
def test_outer_steps_of_pairs_of_members(ranks, compressor):
    """A member whose partner fails takes its outer step alone, and all draw the same pairs."""
    algorithm = noloco(compressor)
    logs = ranks.run(5, on_service, live_through_changes, algorithm, SGD, pairs_written)
    sent = {
        (row[1], f"r{rank}"): row[2:] for rank, (rows, _, _) in enumerate(logs) for row in rows
        if row[0] == "sent"
    }  # fmt: skip
    partners = []
    for rank, (rows, filled, _) in enumerate(logs):
        for _, number, partner, momentum, new in (row for row in rows if row[0] == "took"):
            partners.append((number, f"r{rank}", partner))
            names = [f"r{rank}"] if partner is None else [f"r{rank}", partner]
            found = [sent[number, name] for name in names]
            theta, phi = (torch.stack(each) for each in zip(*found, strict=True))
            m = PAIRED["momentum"] * momentum + PAIRED["outer_lr"] * (theta - phi).mean(0)
            m -= PAIRED["pull"] * (phi[0] - phi.mean(0))
            if compressor is None:
                torch.testing.assert_close(new, phi[0] + m, rtol=1e-5, atol=1e-5)
        if rank == 4:  # filled with another member's weights
            first = min(filled)
            assert any(
                torch.equal(log[1][first], filled[first]) for log in logs[:4] if first in log[1]
            )
    for rows, _, begun in logs[:2]:  # which lose no step, and wait for no other
        assert [each.left for each in begun if each.left] == [("r3",), ("r2",), ("r4",)]
        marks = [row[0] for row in rows if row[0] != "sent"]
        steps = "".join("t" if mark == "took" else "s" for mark in marks).split("t")
        assert {len(each) for each in steps[1:-1]} == {INTERVAL}
    alone = {(number, name) for number, name, partner in partners if partner is None}
    assert [name for _, name in sorted(alone)].count("r1") >= 1
    both = {(number, *sorted((name, partner))) for number, name, partner in partners if partner}
    for name in ("r0", "r1"):
        assert sum(name in each for each in both) > 6


# ------------------------------------------------------------------------- members that come back


def come_back_at_the_second_attempt(address, store, rank, size, algorithm):
    """Rank 2 is left behind, and comes back in an epoch of which the first attempt fails."""
    begun, begin = [], EpochGroup.begin

    def note(change):
        buffers = averager_of(trainer).buffers if trainer else []
        weight = float(trainer.push_sum_weight) if trainer else 1.0
        begun.append((len(change.members), change.lost, weight, [each.clone() for each in buffers]))

    def fail_once(group, epoch, *arguments):
        if epoch.number == 3:
            raise PeerError("a member has died")
        begin(group, epoch, *arguments)

    trainer = None
    step, trainer, membership = make(address, rank, algorithm, start=size, on_change=note)
    for _ in range(2 * INTERVAL):
        step()
    if rank == 2:
        membership.die()
        disconnect(None)
        store.wait(["gone on"])
        membership.service.join(membership.identity)
    with mock.patch.object(EpochGroup, "begin", fail_once):
        while trainer.epoch < 4:
            step()
            if rank == 0 and trainer.epoch == 2:
                store.set("gone on", "")
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(size)])
    trainer.close()
    return begun[-1]


@pytest.mark.parametrize(
    "algorithm",
    [exponential, noloco()],
)
def test_what_a_rank_had_before_it_was_left_behind_is_forgotten(ranks, algorithm):
    found = ranks.run(3, on_service, come_back_at_the_second_attempt, algorithm)
    assert [(members, lost) for members, lost, *_ in found] == [(3, 0.0)] * 3
    assert sum(weight for *_, weight, _ in found) == pytest.approx(3, abs=1e-12)
    others = [flat(each) for *_, each in found[:2]]
    assert any(torch.allclose(flat(found[2][-1]), each, rtol=1e-6, atol=1e-6) for each in others)


# ------------------------------------------------------------------------------ interrupted steps


def fail_after_encoding(trainer):
    """Have the next average fail once error feedback has taken what is sent for sent."""

    def fail(message):
        raise PeerError("nothing was sent")

    outer_steps_of(trainer)._average._collectives.all_gather_each = fail


def interrupted(address, store, rank, size, algorithm, is_interrupted):
    """Return the weights after outer steps of which rank 0 could not send in the second."""
    step, trainer, _ = make(address, rank, algorithm, start=size)
    for index in range(4 * INTERVAL):
        if is_interrupted and rank == 0 and index == 2 * INTERVAL - 1:
            fail_after_encoding(trainer)
        step()
    epoch = trainer.epoch
    store.set(f"done {rank} {is_interrupted}", "")
    store.wait([f"done {each} {is_interrupted}" for each in range(size)])
    trainer.close()
    return epoch, flat(trainer._buckets.buffers)


def test_an_interrupted_outer_step_is_taken_once(ranks):
    """Also with error feedback, which keeps what was not sent, and not what could not be."""
    algorithm = DiLoCo(INTERVAL, compressor=ErrorFeedback(TopK(0.3)))
    runs = [ranks.run(2, on_service, interrupted, algorithm, each) for each in (False, True)]
    for (epoch, calm), (next_epoch, disturbed) in zip(*runs, strict=True):
        assert (epoch, next_epoch) == (1, 2)
        torch.testing.assert_close(disturbed, calm, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (StreamingDiLoCo(), "need all ranks to stay"),
        (DiLoCo(8, fragments=2), "need all ranks to stay"),
        (NoLoCo(fragments=2), "need all ranks to stay"),
        (NoLoCo(RandomMatching(4)), "must be a class or left out with membership"),
    ],
)
def test_outer_steps_that_cannot_change_their_ranks(algorithm, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(("", 0), 0, algorithm)
