"""A run of each trainer with as many of its features as compute the same bits on every CPU."""

import abc
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.compression import (
    Cast,
    Chain,
    ErrorFeedback,
    Int8,
    PerParameter,
    PowerSGD,
    RandomK,
    Switch,
    TopK,
    compress_ddp,
)
from pyparallel.gossip import SGP, GossipState, SlowMo
from pyparallel.gossip.topology import Lazy, Star
from pyparallel.pipeline import PipeOptim
from pyparallel.subnets import Averaged, Partition, SequentialChain
from tests.golden.models import WIDTH, Linear, Scale, Small, batch, squared_error

LOW_RANK, SPARSE = PowerSGD(1, min_ratio=0), Chain(TopK(0.5), Int8())
sgd = partial(torch.optim.SGD, lr=0.125, momentum=0.75)
small_steps = partial(torch.optim.SGD, lr=0.0078125, momentum=0.5, weight_decay=0.125)


class Run(abc.ABC):
    """A training run on one rank, whose ``load`` resumes from what ``save`` has returned."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, step: int) -> float | None:
        """Train on the batch of a step; return the loss, if this rank has it."""
        inputs, targets = batch(step)
        self.optimizer.zero_grad()
        loss = squared_error(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @abc.abstractmethod
    def finish(self) -> dict[str, Tensor]:
        """End the training; return what it has trained."""


class Gossip(Run):
    """Two buckets of compressed messages in flight, unequal push-sum weights, outer steps."""

    def __init__(self) -> None:
        model = Small()
        mixed = PerParameter({"first.*": LOW_RANK, "*.scale": RandomK(0.5), "*": SPARSE})
        inner = SGP(Lazy(Star(4), 0.25), overlap=2, compressor=mixed)
        algorithm = SlowMo(inner, interval=4, momentum=0.4)
        self.optimizer = sgd(model.parameters())
        two_buckets = 36 / 2**20  # MiB: the matrix in one, the vectors in the other
        self.model = GossipDataParallel(model, self.optimizer, algorithm, bucket_cap_mb=two_buckets)
        state = GossipState(self.model, self.optimizer)
        self.save, self.load = state.state_dict, state.load_state_dict

    def finish(self) -> dict[str, Tensor]:
        self.model.flush()
        return {**self.model.state_dict(), "weight": self.model.push_sum_weight}


class Pipeline(Run):
    """Four stages of predicted weights on two ranks, schedulers, compressed messages."""

    def __init__(self) -> None:
        layers = [Scale("0"), Linear(WIDTH, WIDTH, name="1"), Scale("2"), Scale("3")]
        self.layers = nn.ModuleList(nn.Sequential(nn.LeakyReLU(0.25), each) for each in layers)
        self.trainer = PipelineTrainer(
            list(self.layers),
            squared_error,
            partial(torch.optim.SGD, lr=0.03125, momentum=0.5, weight_decay=0.125),
            PipeOptim(),
            num_microbatches=2,
            split=(1, 2, 3),
            scheduler_fn=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
            compress_activations=Int8(seed=1),
            compress_gradients=TopK(0.75),
        )
        self.load = self.trainer.load_state_dict

    def step(self, step: int) -> float | None:
        loss = self.trainer.step(*batch(step, 2, rank=0))
        return loss if self.trainer.stages[-1].index == len(self.trainer.split) else None

    def save(self) -> Any:
        self.trainer.flush()
        return self.trainer.state_dict()

    def finish(self) -> dict[str, Tensor]:
        self.trainer.flush()
        return self.layers.state_dict()


class Subnets(Run):
    """Units of a chain in subnets that change, whose optimizer states and means are kept."""

    def __init__(self) -> None:
        first, middle = Linear(WIDTH, 4, bias=True, name="0"), Linear(4, 3, name="2")
        last, activation = Linear(3, WIDTH, bias=True, name="4"), nn.LeakyReLU(0.25)
        model = nn.Sequential(first, activation, middle, activation, last)
        partition = Partition({"": SequentialChain()}, seed=5)
        self.model = SubnetTrainer(model, small_steps, partition, 3, scale=Averaged())
        self.optimizer = self.model.optimizer
        self.save, self.load = self.model.state_dict, self.model.load_state_dict

    def finish(self) -> dict[str, Tensor]:
        self.model.flush()
        with self.model.full_model() as module:
            found = {name: each.clone() for name, each in module.state_dict().items()}
        return found | {f"units of {name}": units for name, units in self.model.units.items()}


class Compression(Run):
    """DDP whose compressor has changed: residuals, factors, draws that depend on the step."""

    def __init__(self) -> None:
        later = PerParameter({"first.*": LOW_RANK, "*": Chain(RandomK(0.3), Int8(seed=1))})
        switch = Switch({0: Cast(), 2: ErrorFeedback(later)})
        self.model = DistributedDataParallel(Small())
        self.optimizer = sgd(self.model.parameters())
        self.compression = compress_ddp(self.model, switch)

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model.module, "sgd": self.optimizer, "hook": self.compression}

    def save(self) -> Any:
        return {name: each.state_dict() for name, each in self._parts().items()}

    def load(self, saved: Any) -> None:
        for name, each in self._parts().items():
            each.load_state_dict(saved[name])

    def finish(self) -> dict[str, Tensor]:
        return self.model.module.state_dict()


RUNS: dict[str, tuple[type[Run], int]] = {  # with the number of ranks
    "gossip": (Gossip, 4),
    "pipeline": (Pipeline, 2),
    "subnets": (Subnets, 2),
    "compression": (Compression, 2),
}
