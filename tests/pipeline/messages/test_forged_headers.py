"""Headers that are corrupt or forged: an error on both ranks that names the sender."""

import pytest
import torch
from torch import nn

from pyparallel.pipeline import GPipe, PipelineTrainer, StageError
from pyparallel.pipeline.messages import format as wire_format
from pyparallel.pipeline.messages.format import Header, RefusalKind
from tests.pipeline.messages.headers import write_checksum

NUM_MICROBATCHES = 2
STREAM, NUMBER, RECEIVED, COUNT, VIA_HOST = range(5)
DTYPE, GRADIENT, DIMENSIONS, SIZE = range(11, 15)
# More of them: test_format.py.
# A word of the header of a float32 tensor (3, 4) that requires a gradient, and what it becomes.
# Corrupt: its checksum is that of the header before. Every word: test_format.py.
CORRUPT = {"another number": (NUMBER, 1), "2**62 tensors": (COUNT, 2**62)}
# Forged: with the checksum that belongs to it.
FORGED = {
    "another stream": (STREAM, 0, "sent a message of stream 0 where 3 was expected"),
    "a negative count of received messages": (RECEIVED, -1, "got one with -1 messages received"),
    "more messages received than sent": (RECEIVED, 10**9, "1000000000 messages"),
    "2**62 tensors": (COUNT, 2**62, f"got one with a count of {2**62}"),
    "a refusal of no kind": (COUNT, -2 - len(RefusalKind), "got one with a count of -6"),
    "another place": (VIA_HOST, 7, "and a place of 7"),
    "an unknown dtype": (DTYPE, 99, "got one with a tensor of dtype 99"),
    "neither with nor without a gradient": (GRADIENT, 2, "got one with a tensor of"),
    "124 dimensions": (DIMENSIONS, 124, "got one with a tensor of"),
    "a size of 2**40": (SIZE, 2**40, "bytes, more than this machine's memory"),
}


class Forger:
    """Changes a word of this rank's first header that precedes a tensor."""

    def __init__(self, index, word, is_sealed):
        self.index, self.word, self.is_sealed = index, word, is_sealed
        self.is_done = False

    def to_tensor(self, header, capacity=0):
        tensor = TO_TENSOR(header, capacity)
        if header.tensors and not self.is_done:
            self.is_done = True
            word = self.word
            tensor[self.index] = word(int(tensor[self.index])) if callable(word) else word
            if self.is_sealed:
                write_checksum(tensor)
        return tensor


TO_TENSOR = Header.to_tensor


def train(rank, sender, forger):
    """Return the error of this rank."""
    torch.manual_seed(0)
    trainer = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), GPipe(),
        num_microbatches=NUM_MICROBATCHES, split=[1],
    )  # fmt: skip
    if rank == sender:
        Header.to_tensor = lambda header, capacity=0: forger.to_tensor(header, capacity)
    try:
        with pytest.raises(StageError) as caught:
            trainer.step(torch.ones(6, 4), torch.ones(6, 4))
    finally:
        Header.to_tensor = TO_TENSOR
    return str(caught.value)


def try_all(rank):
    """Return the errors by kind and sender; allocations of a claimed size would fail."""
    allocated = []
    empty = torch.empty

    def recording(*sizes, **options):
        tensor = empty(*sizes, **options)
        allocated.append(tensor.nbytes)
        return tensor

    torch.empty = recording
    found = {}
    for kind, cases in (("corrupt", CORRUPT), ("forged", FORGED)):
        for number, (name, (index, word, *_)) in enumerate(cases.items()):
            sender = number % 2  # of activations, or of gradients
            forger = Forger(index, word, is_sealed=kind == "forged")
            found[kind, name, sender] = train(rank, sender, forger)
    torch.empty = empty
    return found, max(allocated)


def test_a_forged_header_is_an_error_that_names_its_sender_on_both_ranks(ranks, subtests):
    (first, first_bytes), (second, second_bytes) = ranks.run(2, try_all, time_limit=120)
    for (kind, name, sender), error in first.items():
        with subtests.test(f"{kind}: {name}, by rank {sender}"):
            receiver = 1 - sender
            assert second[kind, name, sender] == error
            assert error.startswith(f"rank {receiver} waited for the ")
            assert f"rank {sender} must send the headers of this" in error or (
                f"rank {sender} sent a message of stream" in error
            )
            assert "failed in" not in error, "no stage is to blame"
            wanted = "a wrong checksum" if kind == "corrupt" else FORGED[name][2]
            assert wanted in error
    # Headers, and the payloads of six samples behind them.
    assert max(first_bytes, second_bytes) < 1 << 20
    assert wire_format.read_header(Header(0, 0, 0).to_tensor()) == Header(0, 0, 0)
