import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from pyparallel.pipeline import GPipe, OneForwardOneBackward, PipelineTrainer, PipeOptim
from pyparallel.pipeline.messages.channel import Channel
from pyparallel.pipeline.messages.groups import P2PGroups
from pyparallel.pipeline.messages.payloads import NcclPayloads


class Work:
    def __init__(self):
        self.is_sent = self.has_waited = False

    def is_completed(self):
        return self.is_sent

    def wait(self):
        self.has_waited = True


class Group:
    def __init__(self):
        self.works = []

    def send(self, tensors, peer, tag):
        self.works.append(Work())
        return self.works[-1]


def test_a_send_keeps_its_payload_until_it_is_sent_and_nothing_waits_for_it():
    group = Group()
    payloads = NcclPayloads(1, group, group, torch.device("cpu"))
    for _ in range(3):
        payloads.send(0, torch.zeros(4))
    assert len(payloads._sent) == 3
    group.works[1].is_sent = True  # but not the one before it
    payloads.send(0, torch.zeros(4))
    assert len(payloads._sent) == 4
    group.works[0].is_sent = True
    payloads.send(0, torch.zeros(4))
    assert len(payloads._sent) == 3
    assert not any(work.has_waited for work in group.works)
    payloads.flush()
    assert [work.has_waited for work in group.works] == [False, False, True, True, True]
    assert not payloads._sent


def train_with_counted_payloads(rank, schedules):
    """Return how many received payloads live at once at most, with each schedule."""
    receive, most, live = Channel._recv_payload, [], []

    def receive_and_count(self, header, length):
        payload = receive(self, header, length)
        live.append(length)
        most[-1] = max(most[-1], len(live))
        weakref.finalize(payload.untyped_storage(), live.pop)
        return payload

    with (
        mock.patch.object(Channel, "_recv_payload", receive_and_count),
        mock.patch.object(P2PGroups, "supports_inline", False),
    ):
        for schedule in schedules:
            most.append(0)
            trainer = PipelineTrainer(
                [nn.Linear(4, 4) for _ in range(3)], nn.functional.mse_loss,
                lambda parameters: torch.optim.SGD(parameters, lr=0.01), schedule,
                num_microbatches=8, split=(1, 2),
            )  # fmt: skip
            for _ in range(3):
                trainer.step(torch.ones(16, 4), torch.ones(16, 4))
            trainer.flush()
            trainer.close()
    return most


@pytest.mark.slow
def test_on_the_host_payloads_live_while_the_schedule_has_their_microbatches_in_flight(ranks):
    # Activations until their backward, as a stage's inputs are views of them, and a gradient. On a
    # GPU memory returns later, when its work is done.
    expected = {
        GPipe(): [1, 8 + 1, 8],
        OneForwardOneBackward(): [1, 2 + 1, 1],
        PipeOptim(): [1, 2 + 1, 1],
    }
    found = ranks.run(3, train_with_counted_payloads, list(expected))
    assert found == [list(row) for row in zip(*expected.values(), strict=True)]
