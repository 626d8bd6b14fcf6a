import os
import time

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Channel, P2PGroups, PeerError, PeerFailedError
from tests.workers import observe_ranks, run_ranks, store_barrier

STREAMS = [0, 1, 0, 0, 1, 0, 0, 0]


def connect(rank, labels_apart=False):
    up, down, apart = (dist.new_group([0, 1]) for _ in range(3))
    return Channel(
        1 - rank, P2PGroups(apart if labels_apart else None, up, down, torch.device("cpu"))
    )


def parcel(stream, number, rank):
    """Of two usual lengths, and now and then of another, or empty, or two tensors."""
    shape = [(4, 3), (2, 40)][stream]
    if number in (2, 5):
        shape = (number * 7, 3)
    if number == 3:
        return ()
    value = torch.full(shape, float(100 * rank + number))
    return (value, value.long()) if number == 4 else value


def exchange(rank, labels_apart):
    channel = connect(rank, labels_apart)
    channel.expect(STREAMS)
    seen = []
    for number, stream in enumerate(STREAMS):
        channel.send(stream, number, parcel(stream, number, rank))
    for number, stream in enumerate(STREAMS):
        arrived = channel.receive()
        expected = parcel(stream, number, 1 - rank)
        as_sent = len(arrived.value) == len(expected) and all(
            torch.equal(left, right) for left, right in zip(arrived.value, expected, strict=True)
        )
        seen.append((arrived.stream, arrived.number) == (stream, number) and as_sent)
    channel.settle()
    return seen, channel.bytes_sent > 0


@pytest.mark.parametrize("labels_apart", [False, True])
def test_parcels_of_any_length_arrive_in_order(labels_apart):
    assert run_ranks(2, exchange, labels_apart) == [([True] * len(STREAMS), True)] * 2


class Untagged(P2PGroups):
    """As on NCCL, where the first send between two ranks meets the first receive."""

    tagged = False


class Recording(Channel):
    """Notes for which streams payloads are received, in the order in which that is begun."""

    def _irecv(self, tensor, group, tag):
        if tag:
            self.begun.append((tag - 1) // 2)
        return super()._irecv(tensor, group, tag)


def exchange_untagged(rank):
    up, down, apart = (dist.new_group([0, 1]) for _ in range(3))
    channel = Recording(1 - rank, Untagged(apart, up, down, torch.device("cpu")))
    channel.begun = []
    streams = [2, 0, 0, 2, 0, 1, 2, 0]
    channel.expect(streams)
    for number, stream in enumerate(streams):
        channel.send(stream, number, torch.zeros(10 * (stream + 1)))
    for _ in streams:
        channel.receive()
    channel.settle()
    return channel.begun == streams


def test_without_tags_receives_begin_in_the_order_of_the_sends():
    assert all(run_ranks(2, exchange_untagged))


def send_ahead(rank):
    """Rank 1 receives nothing until rank 0 has sent it all."""
    channel = connect(rank)
    if rank == 0:
        for number in range(20):
            channel.send(0, number, torch.full((1000,), float(number)))
        dist.barrier()
        channel.settle()
        return True
    dist.barrier()
    channel.expect([0] * 20)
    return [channel.receive().value[0].item() for _ in range(20)] == list(range(20))


def test_a_send_waits_for_nobody():
    assert run_ranks(2, send_ahead) == [True, True]


def let_go(rank):
    """What has been counted as received is no longer held."""
    channel = connect(rank)
    channel.expect([0] * 30)
    held = []
    for number in range(30):
        if rank == 0:
            channel.send(0, number, torch.ones(10))
            channel.receive()
        else:
            channel.send(0, number, channel.receive().value)
        held.append(len(channel._sent))
    channel.settle()
    return max(held)


def test_what_has_arrived_is_let_go():
    assert max(run_ranks(2, let_go)) <= 2


def fail(rank):
    channel = connect(rank)
    if rank == 0:
        channel.send(0, 0, torch.ones(3))
        channel.fail("rank 0 has had enough")
        channel.flush_abort()
        return None
    channel.expect([0, 0, 0])
    channel.receive()
    try:
        channel.receive()
    except PeerFailedError as error:
        channel.fail("an answer, which is not sent")
        channel.flush_abort()
        return str(error)


def test_a_failure_takes_the_place_of_a_parcel():
    assert run_ranks(2, fail) == [None, "rank 0 has had enough"]


def hear_of_it_late(rank):
    """The peer has left when the next receives are posted; its last words are here."""
    channel = connect(rank)
    if rank == 0:
        channel.send(0, 0, torch.ones(3))
        channel.fail("rank 0 has had enough")
        channel.flush_abort()
        dist.destroy_process_group()
        return None
    channel.expect([0, 0])
    first = channel.receive().value.tolist()
    time.sleep(1)
    channel.expect([0, 0])
    with pytest.raises(PeerFailedError) as caught:
        channel.receive()
    return first, str(caught.value)


def test_what_has_arrived_outlives_the_connection():
    said = "rank 0 has had enough"
    assert run_ranks(2, hear_of_it_late) == [None, ([1.0] * 3, said)]


def die(rank):
    channel = connect(rank)
    store_barrier("channels")  # before it, the death would cut off a rank still connecting
    if rank == 0:
        os._exit(1)
    channel.expect([0])
    channel.receive()


def test_a_death_is_named():
    outcomes = observe_ranks(2, die, time_limit=40, group_timeout=10)
    sentence = "PeerError: rank 0 died or was silent for the process group's timeout"
    assert outcomes[1].error.startswith(sentence)


def mix_up(rank):
    channel = connect(rank)
    if rank == 0:
        channel.send(1, 0, torch.ones(3))
        dist.barrier()
        return
    channel.expect([0])
    with pytest.raises(PeerError, match="stream 1 where 0 was expected: do all ranks make"):
        channel.receive()
    dist.barrier()  # nobody leaves before


def test_another_stream_than_expected_is_refused():
    run_ranks(2, mix_up)


def leave_after_a_word(rank):
    channel = connect(rank)
    if rank == 1:
        channel.expect([0, 0, 0])
    dist.barrier()
    if rank == 0:
        channel.send(0, 0, ())
        channel.fail("out of paper")
        channel.flush_abort()
        os._exit(3)
    time.sleep(1)
    channel.receive()  # a third label can no longer be awaited, but two are here
    with pytest.raises(PeerFailedError, match="out of paper"):
        channel.receive()
    return True


def test_who_has_left_is_quoted_before_it_is_called_dead():
    outcomes = observe_ranks(2, leave_after_a_word, time_limit=40, group_timeout=20)
    assert outcomes[1].value is True, outcomes[1].error
