"""AD-PSGD of members that die, join, leave and lose replies: both of a pair average, or none."""

import itertools
import time

import pytest
import torch

from pyparallel.comm import PeerError
from pyparallel.gossip import ADPSGD
from pyparallel.gossip.membership import pair_members
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.optim import SGD
from tests.gossip.membership.training import (
    Death,
    averager_of,
    die,
    make,
    on_service,
    step,
    step_on,
)

pytestmark = pytest.mark.slow  # 23 seconds: a member dies at each point of an exchange


def all_pairs(num_ranks):
    return ADPSGD(Complete(num_ranks))


def ring(num_ranks):
    return ADPSGD(Ring(num_ranks), seed=3)


def pairs_of(trainer):
    """Return the averager of the epoch's pairs."""
    return averager_of(trainer).inner.inner


def flat(trainer):
    return torch.cat([each.detach().double() for each in trainer._buckets.buffers])


def add_to_all(trainer, value):
    with torch.no_grad():
        for buffer in trainer._buckets.buffers:
            buffer.add_(value)


def wait_for_change(trainer):
    while not averager_of(trainer)._epochs.should_change:
        time.sleep(0.01)


def step_until(condition, *arguments):
    while not condition():
        step(*arguments)


# ------------------------------------------------------------------------------------------ deaths

# Of all pairs the lower rank is the active one.
MOMENTS = {
    "after sending a request": 0,
    "with a request received": 3,
    "with a reply written": 3,
    "with a reply sent": 3,
    "with a reply to apply": 0,
}


def fail_to_reply(pairs, error):
    """Have the next reply fail once this rank has averaged."""
    swap = pairs.exchange.swap

    def fail(tensors, to, from_, **options):
        if to and not from_:
            raise error
        return swap(tensors, to, from_, **options)

    pairs.exchange.swap = fail


def log_exchanges(trainer, rows):
    """Have rows get the member with which this rank exchanges, and what that adds to its own."""
    pairs, names = pairs_of(trainer), trainer.members
    request, replies, send, chosen = pairs._request, pairs._replies, pairs._request.send, []
    apply, reply = request.apply_reply, replies.reply

    def log_send(peer):
        chosen[:] = [peer]
        send(peer)

    def log(exchange, peer):
        before = flat(trainer)
        try:
            return exchange()
        finally:  # also if it fails
            if not torch.equal(added := flat(trainer) - before, torch.zeros_like(before)):
                rows.append((names[peer], added))

    request.send = log_send
    request.apply_reply = lambda: log(apply, chosen[0])
    replies.reply = lambda: log(reply, replies.active_rank)


def die_at(moment, trainer):
    """Have this rank raise Death at a moment of its next exchange."""
    pairs = pairs_of(trainer)
    request, replies = pairs._request, pairs._replies

    def after(function):
        def run(*arguments):
            function(*arguments)
            raise Death

        return run

    if moment == "after sending a request":
        pairs._send_request = after(pairs._send_request)
    elif moment == "with a request received":

        def receive():
            replies._rounds[replies._slot].wait()

        replies.reply = after(receive)
    elif moment == "with a reply written":
        fail_to_reply(pairs, Death())
    elif moment == "with a reply sent":
        replies.reply = after(replies.reply)
    else:
        request.apply_reply = after(request.wait_if_replied)


def lose_one(address, store, rank, size, algorithm, optimizer, moment):
    """One rank dies in an exchange; return what the others had, exchanged, and have."""
    module, stepped, trainer, membership = make(
        address, rank, algorithm, start=size, deadline=20.0, optimizer=optimizer
    )
    dying, rows = MOMENTS[moment], []
    arguments = module, stepped, trainer
    add_to_all(trainer, rank + 1.0)
    before = flat(trainer)
    log_exchanges(trainer, rows)
    if rank == dying:
        die_at(moment, trainer)
        with pytest.raises(Death):
            step_on(*arguments)
        die(trainer, membership)
        return None
    step_until(lambda: trainer.epoch > 1, *arguments)
    after, change = flat(trainer), membership.changes[-1]
    for _ in range(30):
        step(*arguments)
    trainer.flush()
    last = flat(trainer)
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(size) if each != dying])
    trainer.close()
    return before, rows, after, last, change


def check_loss(found, moment):
    """What survivors have adds up to what they had, and what the dead rank's messages added."""
    survivors = [each for each in found if each is not None]
    before, rows, after, last, changes = zip(*survivors, strict=True)
    gone = f"r{MOMENTS[moment]}"
    expected = sum(before)
    for name, added in itertools.chain(*rows):
        expected = expected + added * (name == gone)
    torch.testing.assert_close(sum(after), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum(last), expected, rtol=1e-6, atol=1e-5)  # of many more steps
    for change in changes:
        assert (change.left, change.lost) == ((gone,), 0)


@pytest.mark.parametrize(
    ("moment", "optimizer"),
    [
        ("after sending a request", torch.optim.SGD),
        ("with a reply sent", SGD),
        ("with a request received", torch.optim.SGD),
        ("with a reply written", torch.optim.SGD),
        ("with a reply sent", torch.optim.SGD),
        ("with a reply to apply", SGD),
    ],
)
def test_a_member_dies_in_an_exchange(ranks, moment, optimizer):
    check_loss(ranks.run(4, on_service, lose_one, all_pairs, optimizer, moment), moment)


# ---------------------------------------------------------------------------------- cut exchanges

CUTS = {  # and whether both have averaged
    "the reply is not seen": False,
    "the reply does not arrive": False,
    "the reply is not sent": False,
    "the reply is applied": True,
    "the next request is sent": True,
    "the reply is not seen, and the active member begins no epoch": False,
    "the reply is not seen, and the passive member begins no epoch": False,
}
NOT_SEEN = [cut for cut in CUTS if cut.startswith("the reply is not seen")]


def fail():
    raise PeerError("the link is down")


def fail_after(function):
    """Return a function that fails when it is called first, once it has done its work."""
    calls = itertools.count()

    def run(*arguments):
        result = function(*arguments)
        if next(calls) == 0:
            fail()
        return result

    return run


def cut_at_active(cut, *arguments):
    """Send a request, and take part in the exchange until it is cut."""
    pairs = pairs_of(arguments[-1])
    step(*arguments)
    assert pairs.unapplied is not None
    if cut in (*NOT_SEEN, "the reply is not sent"):
        if "active" in cut:
            members = averager_of(arguments[-1]).inner
            members.run.barrier = fail_after(members.run.barrier)
        wait_for_change(arguments[-1])
    else:
        step_until(lambda: pairs._request.is_replied, *arguments)
        if cut == "the reply does not arrive":
            pairs._request._wait = fail
        elif cut == "the reply is applied":
            pairs._poll_flags = fail
        else:
            step(*arguments)
            assert pairs.num_requests == list(CUTS).index(cut) + 2
            pairs._poll_flags = fail
    step(*arguments)


def cut_at_passive(cut, *arguments):
    """Accept a request, and take part in the exchange until it is cut."""
    pairs, trainer = pairs_of(arguments[-1]), arguments[-1]
    epoch = trainer.epoch
    step_until(lambda: pairs._replies.active_rank == 0, *arguments)
    if "passive" in cut:
        failing = fail_after(pair_members.gather_from_members)
        pair_members.gather_from_members = failing
    if cut in NOT_SEEN:
        pairs._poll_flags = fail
    elif cut == "the reply is not sent":
        fail_to_reply(pairs, PeerError("the link is down"))
    step(*arguments)  # replies
    if trainer.epoch == epoch:
        if cut != "the next request is sent":  # which it may have accepted
            assert list(pairs.unacknowledged) == [0]
        wait_for_change(trainer)
        step(*arguments)


def cut_exchanges(address, store, rank, size, optimizer):
    """Cut an exchange of ranks 0, active, and 1, passive, in each way; return what they have."""
    module, stepped, trainer, _ = make(
        address, rank, all_pairs, start=size, deadline=20.0, optimizer=optimizer
    )
    arguments, found = (module, stepped, trainer), {}
    gather = pair_members.gather_from_members
    for cut in CUTS:
        begun = trainer.epoch + (2 if "no epoch" in cut else 1)
        with torch.no_grad():
            for buffer in trainer._buckets.buffers:
                buffer.fill_(2.0 + 6.0 * rank)
        (cut_at_active, cut_at_passive)[rank](cut, *arguments)
        step_until(lambda begun=begun: trainer.epoch == begun, *arguments)
        pair_members.gather_from_members = gather
        found[cut] = flat(trainer)
    for _ in range(50):
        step(*arguments)
    trainer.flush()
    found["last"] = flat(trainer)
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])
    trainer.close()
    return found


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, SGD])
def test_an_exchange_that_is_cut_is_of_both_members_or_of_none(ranks, optimizer):
    """Ranks have 2 and 8, and thus 5 and 5 or as before: numbers that do not round."""
    first, second = ranks.run(2, on_service, cut_exchanges, optimizer)
    for cut, are_averaged in CUTS.items():
        expected = (5.0, 5.0) if are_averaged else (2.0, 8.0)
        for found, value in zip((first[cut], second[cut]), expected, strict=True):
            assert torch.equal(found, torch.full_like(found, value)), cut
    for each in (first, second):
        torch.testing.assert_close(each["last"], torch.full_like(each["last"], 5.0))


# ----------------------------------------------------------------------------- joining and leaving


def join_and_leave(address, store, rank, size, algorithm, optimizer):
    """Rank 2 joins while 0 and 1 train, then rank 1 leaves; return what all have at both."""
    if rank == 2:
        store.wait(["trained"])
    module, stepped, trainer, membership = make(
        address, rank, algorithm, start=2, deadline=20.0, optimizer=optimizer
    )
    arguments, rows = (module, stepped, trainer), []
    if rank < 2:
        add_to_all(trainer, rank + 1.0)
        for _ in range(3 + 4 * rank):  # at paces of their own
            step(*arguments)
        trainer.flush()
        add_to_all(trainer, rank)
        rows.append(flat(trainer))
        store.set("trained", "")
        wait_for_change(trainer)
        step(*arguments)
    assert len(trainer.members) == 3
    rows.append(flat(trainer))
    joined, frozen = membership.changes[-1], float(module[2].bias.sum())
    counts = module[1].num_batches_tracked.item()
    for _ in range(4 + rank):
        step(*arguments)
    assert module[1].num_batches_tracked.item() == counts + 4 + rank
    with trainer.consensus():
        mean = flat(trainer)
    trainer.flush()
    add_to_all(trainer, rank)
    rows.append(flat(trainer))
    if rank == 1:  # tries twice to send what it has, which another one averages once

        def send(*arguments):
            average(*arguments)
            time.sleep(0.3)  # until it is received

        average = averager_of(trainer).inner._average
        averager_of(trainer).inner._average = fail_after(send)
        trainer.leave()
        with pytest.raises(RuntimeError, match="must not be used after close"):
            _ = trainer.members
        return rows, joined, frozen, mean
    wait_for_change(trainer)
    step(*arguments)
    assert trainer.members == ("r0", "r2")
    rows.append(flat(trainer))
    left = membership.changes[-1]
    for _ in range(40):
        step(*arguments)
    trainer.flush()
    rows.append(flat(trainer))
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 2"])
    trainer.close()
    return rows, joined, frozen, mean, left


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [(ring, torch.optim.SGD), (all_pairs, SGD)],
)
def test_members_join_and_leave(ranks, algorithm, optimizer):
    """A member that joins has what another one has; one that leaves is averaged with another."""
    first, second, third = ranks.run(3, on_service, join_and_leave, algorithm, optimizer)
    for before, after in (first[0][:2], second[0][:2]):
        assert torch.equal(before, after)
    joiners = third[0][0]
    assert any(torch.equal(joiners, each[0][1]) for each in (first, second))
    for _, joined, frozen, mean, *_ in (first, second, third):
        assert (joined.joined, joined.left, joined.lost) == (("r2",), (), 0)
        assert frozen == first[2]  # frozen parameters come along
        expected = (first[0][1] + second[0][1] + joiners) / 3
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)
    leavers = second[0][2]
    begin, end = ([rows[index] for rows in (first[0][1:], third[0])] for index in (1, 2))
    averaged = [(each + leavers) / 2 for each in begin]
    found = [
        [torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(end, expected, strict=True)]
        for expected in ([averaged[0], begin[1]], [begin[0], averaged[1]])
    ]
    assert [True, True] in found
    for rows in (first, third):
        assert (rows[4].left, rows[4].lost) == (("r1",), 0)
    last = first[0][-1], third[0][-1]
    torch.testing.assert_close(sum(last), sum(end), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*last, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- a silent member


def fall_silent(address, store, rank, size, algorithm):
    """Rank 2 stops for longer than the deadline, and comes back as one that joins."""
    module, stepped, trainer, membership = make(address, rank, algorithm, start=size, deadline=1.0)
    arguments = module, stepped, trainer
    add_to_all(trainer, rank + 1.0)
    for _ in range(4):
        step(*arguments)
    if rank == 2:
        store.wait(["alone"])
    begin = time.monotonic()
    step_until(lambda: trainer.epoch > 1, *arguments)
    seconds = time.monotonic() - begin
    if rank == 0:
        assert trainer.members == ("r0", "r1")
        store.set("alone", "")
    step_until(lambda: len(trainer.members) == 3, *arguments)
    after = flat(trainer)
    trainer.flush()
    last = flat(trainer)
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1", "done 2"])
    trainer.close()
    return after, last, seconds, membership.changes


def test_a_silent_member_is_left_behind(ranks):
    """It waits for no longer than the deadlines of a reply, of its message and of a member."""
    first, second, third = ranks.run(3, on_service, fall_silent, all_pairs)
    assert any(torch.equal(third[0], each[0]) for each in (first, second))
    sums = [sum(each[index] for each in (first, second, third)) for index in (0, 1)]
    torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-6)
    for each in (first, second):
        assert each[2] < 5
        assert [change.left for change in each[3]][:2] == [(), ("r2",)]
        assert each[3][-1].joined == ("r2",)
