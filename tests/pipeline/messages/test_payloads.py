import torch

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
