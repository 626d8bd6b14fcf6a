import gc
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.comm.errors import PeerError, RemoteError
from pyparallel.pipeline.messages import Channel, P2PGroups
from pyparallel.pipeline.messages.format import Refusal, RefusalKind
from pyparallel.pipeline.messages.payloads import INLINE_BYTES
from tests.workers import call_each, observe_ranks, run_ranks

STREAMS = [0, 1, 0, 0, 1, 0, 0, 0]


REFUSAL = Refusal(RefusalKind.TYPE, "rank 0: no")


class Untagged(P2PGroups):
    """Groups as with NCCL, which matches sends and receives in order."""

    supports_tags = False


def connect(rank, header_group=False, kind=P2PGroups):
    up, down, headers = (Run(dist.new_group([0, 1])) for _ in range(3))
    groups = kind(headers if header_group else None, (up, down), torch.device("cpu"))
    return Channel(1 - rank, groups)


def build_value(stream, number, rank):
    """Return a tensor of the stream's usual length; sometimes another, none, or a tuple of two."""
    shape = [(4, 3), (2, 40)][stream]
    if number in (2, 5):
        shape = (number * 7, 3)
    if number == 3:
        return ()
    value = torch.full(shape, float(100 * rank + number))
    return (value, value.long()) if number == 4 else value


def exchange(rank, header_group, kind, num_via_host):
    channel = connect(rank, header_group, kind)
    channel.expect(STREAMS)
    for number, stream in enumerate(STREAMS):
        via_host = number < num_via_host
        channel.send(stream, number, build_value(stream, number, rank), via_host=via_host)
    for number, stream in enumerate(STREAMS):
        arrived, expected = channel.recv(), build_value(stream, number, 1 - rank)
        assert (arrived.stream, arrived.number) == (stream, number)
        assert len(arrived.value) == len(expected)
        assert all(map(torch.equal, arrived.value, expected))
    channel.flush()
    assert channel.bytes_sent > 0


def messages_of_any_length_arrive_in_order(rank):
    exchange(rank, False, P2PGroups, 0)
    exchange(rank, True, P2PGroups, 0)
    exchange(rank, True, Untagged, 4)
    exchange(rank, False, Untagged, 0)  # all from the host's memory


def what_a_channel_has_sent_arrives_although_it_is_gone(rank):
    """As of a trainer that one rank drops after its last step, while another still takes it."""
    store = dist.group.WORLD.get_group_store()
    for numel in (4, 100_000):
        channel = connect(rank)
        if rank == 1:
            for number in range(3):
                channel.send(0, number, torch.full((numel,), float(number)))
            del channel
            gc.collect()
            store.set(f"gone {numel}", "")
        else:
            store.wait([f"gone {numel}"])
            time.sleep(0.1)
            channel.expect([0, 0, 0])
            assert [channel.recv().value[0].item() for _ in range(3)] == [0, 1, 2]


def a_payload_is_sent_before_its_header_and_received_after_it_on_nccl(rank):
    posted = []

    class Recorded:
        def __init__(self, group, name):
            self.group, self.name = group, name

        def send(self, *arguments):
            posted.append(f"send {self.name}")
            return self.group.send(*arguments)

        def recv(self, *arguments):
            posted.append(f"recv {self.name}")
            return self.group.recv(*arguments)

    channel = connect(rank, True, Untagged)
    payloads = channel._payloads
    channel._send_group = channel._recv_group = Recorded(channel._send_group, "header")
    payloads._send_group = Recorded(payloads._send_group, "payload")
    payloads._recv_group = Recorded(payloads._recv_group, "payload")
    channel.expect([0, 0])
    for number in range(2):
        channel.send(0, number, torch.ones(5 + number))
    for _ in range(2):
        channel.recv()
    channel.flush()
    sent, received = ["send payload", "send header"], ["recv payload"]
    assert posted == ["recv header"] * 2 + sent * 2 + received * 2


LENGTHS = [  # of payloads in bytes, and in how many messages each is sent
    (64, 2),  # none before it
    (64, 2),  # its receive may be posted before the first has arrived
    (64, 1),
    (0, 1),
    (640, 2),
    (640, 2),
    (640, 1),
    (320, 1),
    (INLINE_BYTES + 64, 2),
    (INLINE_BYTES + 64, 2),
    (INLINE_BYTES, 2),
    (640, 1),
    (INLINE_BYTES, 1),
    (INLINE_BYTES + 64, 2),
]


def short_payloads_are_sent_behind_their_headers(rank):
    if sys.platform == "linux":  # elsewhere the default transport of gloo is not TCP
        for late in (False, True):
            count_messages(rank, late)


def count_messages(rank, late):
    """Send all; receive all, with the receives posted before, or each when it is needed."""
    channel = connect(rank)
    values = [torch.full((length,), number).byte() for number, (length, _) in enumerate(LENGTHS)]
    streams = [number % 2 for number in range(len(values))]
    if not late:
        channel.expect(streams)
    for number, (value, (_, count)) in enumerate(zip(values, LENGTHS, strict=True)):
        channel.send(streams[number], number, value)
        assert len(channel._sent[-1]) == count
        if count == 1:
            value.add_(100)  # sent behind its header, it was copied
    for number, stream in enumerate(streams):
        if late:
            channel.expect([stream])
        assert torch.equal(channel.recv().value, torch.full((LENGTHS[number][0],), number).byte())
    channel.abort("rank 0 failed") if rank == 0 else None
    channel.expect([0])
    if rank == 1:
        with pytest.raises(RemoteError, match="rank 0 failed"):
            channel.recv()
    dist.barrier()


def a_send_does_not_wait_for_the_receiver(rank):
    """Send 20 messages before rank 1 receives the first."""
    channel = connect(rank)
    if rank == 0:
        for number in range(20):
            channel.send(0, number, torch.full((1000,), float(number)))
        dist.barrier()
        channel.flush()
    else:
        dist.barrier()
        channel.expect([0] * 20)
        assert [channel.recv().value[0].item() for _ in range(20)] == list(range(20))


def delivered_sends_are_released(rank):
    channel = connect(rank)
    channel.expect([0] * 30)
    for number in range(30):
        if rank == 0:
            channel.send(0, number, torch.ones(10))
            channel.recv()
        else:
            channel.send(0, number, channel.recv().value)
        assert len(channel._sent) <= 2
    channel.flush()


def an_abort_takes_the_place_of_a_message(rank):
    channel = connect(rank)
    if rank == 0:
        channel.send(0, 0, torch.ones(3))
        channel.abort("rank 0 failed")
    else:
        channel.expect([0, 0, 0])
        channel.recv()
        with pytest.raises(RemoteError, match=r"^rank 0 failed$"):
            channel.recv()
        channel.abort("a reply, which is not sent")
    channel.flush_abort()


def a_refusal_is_a_message_after_which_others_follow(rank):
    for header_group, kind in ((False, P2PGroups), (True, P2PGroups), (True, Untagged)):
        refuse(rank, header_group, kind)


def refuse(rank, header_group, kind):
    """Receive a refusal in place of two messages; then others, in receives posted before."""
    channel = connect(rank, header_group, kind)
    channel.send(0, 0, torch.ones(4))
    channel.expect([0])
    assert channel.recv().value.sum() == 4
    if rank == 0:
        channel.send(1, 1, REFUSAL)
        dist.barrier()
    else:
        channel.expect([1, 1, 0])
        found = channel.recv()
        assert (found.stream, found.number, found.value) == (1, 1, REFUSAL)
        channel.forget()
        dist.barrier()
        with pytest.raises(PeerError, match="rank 0 has sent all messages that were expected"):
            channel.recv()
        assert not channel.is_ready
    for number in range(4):
        channel.send(number % 2, number, torch.full((300,), float(number)))
    channel.expect([0, 1])
    channel.expect([0, 1])
    assert [channel.recv().value.mean().item() for _ in range(4)] == [0, 1, 2, 3]
    channel.flush()


CASES = [
    messages_of_any_length_arrive_in_order,
    what_a_channel_has_sent_arrives_although_it_is_gone,
    a_payload_is_sent_before_its_header_and_received_after_it_on_nccl,
    short_payloads_are_sent_behind_their_headers,
    a_send_does_not_wait_for_the_receiver,
    delivered_sends_are_released,
    an_abort_takes_the_place_of_a_message,
    a_refusal_is_a_message_after_which_others_follow,
]


def test_cases(ranks):
    ranks.run(2, call_each, [(case,) for case in CASES])


def receive_after_the_peer_left(rank):
    """Post receives after the peer has left; its abort has arrived."""
    channel, store = connect(rank), dist.group.WORLD.get_group_store()
    if rank == 0:
        channel.send(0, 0, torch.ones(3))
        channel.abort("rank 0 failed")
        channel.flush_abort()
        dist.destroy_process_group()
        store.set("gone", "")
        return None
    channel.expect([0, 0])
    first = channel.recv().value.tolist()
    store.wait(["gone"])
    time.sleep(0.1)
    channel.expect([0, 0])
    with pytest.raises(RemoteError) as caught:
        channel.recv()
    return first, str(caught.value)


def test_what_has_arrived_outlives_the_connection():
    assert run_ranks(2, receive_after_the_peer_left) == [None, ([1.0] * 3, "rank 0 failed")]


def abort_and_exit(rank):
    channel = connect(rank)
    if rank == 1:
        channel.expect([0, 0, 0])
    dist.barrier()
    if rank == 0:
        channel.send(0, 0, ())
        channel.abort("out of memory")
        channel.flush_abort()
        os._exit(3)
    time.sleep(1)
    channel.recv()  # a third header can no longer arrive, but two are here
    with pytest.raises(RemoteError, match="out of memory"):
        channel.recv()
    return True


def test_an_abort_of_a_peer_that_left_is_raised_before_a_peer_error():
    outcomes = observe_ranks(2, abort_and_exit, time_limit=40, group_timeout=20)
    assert outcomes[1].value is True, outcomes[1].error
