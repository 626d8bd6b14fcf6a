"""Runs of every trainer, with what models and optimizers have, resume bit for bit when saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pyparallel import SGP, GossipDataParallel, PipelineTrainer, SubnetTrainer, topology
from pyparallel.compression import ErrorFeedback, TopK, compress_ddp
from pyparallel.gossip import GossipState
from pyparallel.pipeline import PipeDream2BW
from pyparallel.subnets import Partition
from tests.cases import slow

WORDS, WIDTH = 7, 8


class Scaled(nn.Module):
    """A layer with a table that is not saved, and statistics that are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            self.seen += inputs.detach().abs().mean()
        return inputs * self.scale


def make_layers(case):
    """Layers of a model over words, at the same initial values on all ranks."""
    torch.manual_seed(0)
    hidden = nn.LazyLinear(WIDTH) if case == "lazy" else nn.Linear(WIDTH, WIDTH)
    layers = [nn.Embedding(WORDS, WIDTH), hidden, nn.Tanh(), nn.Linear(WIDTH, WORDS)]
    if case == "lazy":
        hidden(torch.zeros(1, WIDTH))
    if case == "buffers":
        layers[2] = Scaled()
    if case == "tied":
        layers[3].weight = layers[0].weight
    if case == "frozen":
        layers[1].requires_grad_(False)
    if case == "compiled":
        layers[1].compile(backend="eager")
    return layers


def make_optimizer(case, parameters):
    """An optimizer, or a list of two."""
    parameters = [*parameters]
    if case == "two optimizers":
        matrices = [each for each in parameters if each.dim() == 2]
        others = [each for each in parameters if each.dim() != 2]
        made = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9)] if matrices else []
        return [*made, torch.optim.AdamW(others, lr=0.01)] if others else made
    if case == "empty group":
        parameters = [{"params": []}, {"params": parameters, "weight_decay": 0.1}, {"params": []}]
    if case == "a group added":
        optimizer = torch.optim.AdamW(parameters[:1], lr=0.01)
        if parameters[1:]:
            optimizer.add_param_group({"params": parameters[1:], "lr": 0.02})
        return optimizer
    return torch.optim.AdamW(parameters, lr=0.01)


def batch(rank, index):
    words = torch.randint(WORDS, (8,), generator=torch.Generator().manual_seed(10 * index + rank))
    return words, words.roll(1)


class InLoop:
    """A module that the user's loop trains; ``state`` is all that is saved."""

    def __init__(self, rank, case):
        self.rank, self.index, self.module = rank, 0, nn.Sequential(*make_layers(case))
        optimizer = make_optimizer(case, self.module.parameters())
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

    def step(self):
        inputs, targets = batch(self.rank, self.index)
        self.index += 1
        loss = nn.functional.cross_entropy(self.called(inputs), targets)
        for each in self.optimizers:
            each.zero_grad()
        loss.backward()
        for each in self.optimizers:
            each.step()
        return loss.item()

    def weights(self):
        return self.module.state_dict()


class Gossip(InLoop):
    def __init__(self, rank, case, folder):
        super().__init__(rank, case)
        algorithm = SGP(topology.Ring(2), overlap=1)
        given = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.called = GossipDataParallel(self.module, given, algorithm)
        self.state, self.path = GossipState(self.called, given), Path(folder, f"{rank}.pt")

    def save(self):
        torch.save(self.state.state_dict(), self.path)

    def load(self):
        self.state.load_state_dict(torch.load(self.path))


class GossipByDCP(Gossip):
    def __init__(self, rank, case, folder):
        super().__init__(rank, case, folder)
        self.path = folder

    def save(self):
        dcp.save({"gossip": self.state}, checkpoint_id=self.path)

    def load(self):
        self.state.load(self.path)


class Compressed(InLoop):
    def __init__(self, rank, case, folder):
        super().__init__(rank, case)
        self.called = nn.parallel.DistributedDataParallel(self.module)
        self.hook = compress_ddp(self.called, ErrorFeedback(TopK(0.2)))
        self.path = Path(folder, f"{rank}.pt")

    def save(self):
        parts = [self.module, self.hook, *self.optimizers]
        torch.save([each.state_dict() for each in parts], self.path)

    def load(self):
        parts = [self.module, self.hook, *self.optimizers]
        for each, state in zip(parts, torch.load(self.path), strict=True):
            each.load_state_dict(state)


class Subnet(InLoop):
    def __init__(self, rank, case, folder):
        super().__init__(rank, case)
        self.called = SubnetTrainer(
            self.module,
            lambda parameters: make_optimizer(case, parameters),
            Partition(),
            interval=2,
        )
        self.optimizers, self.path = [self.called.optimizer], Path(folder, f"{rank}.pt")

    def weights(self):
        with self.called.full_model() as module:
            return {key: value.clone() for key, value in module.state_dict().items()}

    def save(self):
        torch.save(self.called.state_dict(), self.path)

    def load(self):
        self.called.load_state_dict(torch.load(self.path))


class Pipeline:
    def __init__(self, rank, case, folder):
        self.index, self.path = 0, Path(folder, f"{rank}.pt")
        self.trainer = PipelineTrainer(
            make_layers(case), nn.functional.cross_entropy,
            lambda parameters: make_optimizer(case, parameters), PipeDream2BW(),
            num_microbatches=2, split=[1],
        )  # fmt: skip

    def step(self):
        self.index += 1
        loss = self.trainer.step(*batch(0, self.index - 1))
        return loss if self.trainer.stages[-1].index == len(self.trainer.split) else None

    def weights(self):
        return {
            f"{i}.{k}": v
            for i, each in enumerate(self.trainer.stages)
            for k, v in each.module.state_dict().items()
        }

    def save(self):
        self.trainer.flush()
        torch.save(self.trainer.state_dict(), self.path)

    def load(self):
        self.trainer.load_state_dict(torch.load(self.path))


class PipelineByDCP(Pipeline):
    def __init__(self, rank, case, folder):
        super().__init__(rank, case, folder)
        self.path = folder

    def save(self):
        self.trainer.flush()
        dcp.save(self.trainer.sharded_state_dict(), checkpoint_id=self.path)

    def load(self):
        self.trainer.load_checkpoint(self.path)


KINDS = {
    each.__name__: each
    for each in (Gossip, GossipByDCP, Compressed, Subnet, Pipeline, PipelineByDCP)
}
CASES = [
    "empty group",
    "frozen",
    "a group added",
    "two optimizers",
    "tied",
    "buffers",
    "lazy",
    "compiled",
]


def resume(rank, kind, case, folder):
    first = KINDS[kind](rank, case, folder)
    for _ in range(3):
        first.step()
    first.save()
    expected = [first.step() for _ in range(3)], {k: v.clone() for k, v in first.weights().items()}
    second = KINDS[kind](rank, case, folder)
    second.load()
    second.index = 3
    losses = [second.step() for _ in range(3)]
    assert losses == expected[0]
    found = second.weights()
    assert found.keys() == expected[1].keys()
    for key, tensor in expected[1].items():
        assert torch.equal(found[key], tensor), key


REFUSED = [("Subnet", each) for each in ("two optimizers", "tied", "buffers")]  # one sentence each
FAST = ("PipelineByDCP", "empty group")
ALL = [(kind, case) for kind in KINDS for case in CASES if (kind, case) not in REFUSED]


@pytest.mark.parametrize(("kind", "case"), [FAST, *(slow(*each) for each in ALL if each != FAST)])
def test_a_run_resumes_bit_for_bit(ranks, tmp_path, kind, case):
    ranks.run(2, resume, kind, case, str(tmp_path))
