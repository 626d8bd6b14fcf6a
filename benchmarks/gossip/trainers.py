"""The compared methods, behind one interface that takes steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pyparallel import GossipDataParallel, gossip
from pyparallel.comm import Run
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum import PushSum
from pyparallel.gossip.topology import OnePeerExponential, Ring
from pyparallel.training import FlatBuckets

RANKS = 4
BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel and of GossipDataParallel
COMPUTE = "forward and backward"  # name of the range in a trace


class Compute(Protocol):
    """The model and inputs of a step."""

    def build(self) -> nn.Module:
        """Return a new module."""

    def make_inputs(self) -> Tensor:
        """Return one batch."""


class Stepper(Protocol):
    """One method on one rank."""

    def step(self) -> None:
        """Take one training step."""

    def finish(self) -> None:
        """Complete communication in flight, on all ranks together."""


Wrap = Callable[[nn.Module, Optimizer], nn.Module]


@dataclass(frozen=True)
class Method:
    """A method of data parallelism.

    Args:
        wrap: returns a wrapped module for a module and its optimizer.
        closure: whether forward and backward are in the closure of ``optimizer.step``.
    """

    name: str
    wrap: Wrap
    closure: bool = False

    def start(self, compute: Compute) -> "Training":
        """Start training on this rank."""
        return Training(compute, self.wrap, closure=self.closure)


class Training:
    """A user's training loop."""

    def __init__(self, compute: Compute, wrap: Wrap, *, closure: bool = False) -> None:
        module = compute.build()
        self._inputs = compute.make_inputs()
        self._closure = closure
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        self._module = wrap(module, self._optimizer)

    def step(self) -> None:
        """Run forward, backward and update."""
        if self._closure:
            self._optimizer.step(self._evaluate)
        else:
            self._evaluate()
            self._optimizer.step()

    def _evaluate(self) -> Tensor:
        self._optimizer.zero_grad()
        with torch.profiler.record_function(COMPUTE):
            loss = self._module(self._inputs).mean()
            loss.backward()
        return loss

    def finish(self) -> None:
        """Merge messages in flight."""
        if isinstance(self._module, GossipDataParallel):
            self._module.flush()


class RoundAlone:
    """The rounds of SGP on the same parameters, without training steps."""

    def __init__(self, compute: Compute) -> None:
        buckets = FlatBuckets(compute.build().parameters(), BUCKET_BYTES)
        graph = OnePeerExponential(dist.get_world_size())
        self._averaging = PushSum.of_dense(
            buckets.buffers, NeighborExchange(Run(dist.new_group())), graph
        )

    def step(self) -> None:
        """Take one round."""
        self._averaging.after_step()

    def finish(self) -> None:
        """Do nothing: a round is complete when it returns."""


def alone(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Train without communication."""
    return module


def ddp(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Wrap in DDP with default buckets, with gradients as views of them."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def ddp_halved(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Wrap in DDP with bfloat16 gradient compression."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _halve)
    return wrapped


def _halve(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    # Torch rejects its own hook without CUDA, although gloo can reduce bfloat16.
    return bf16_compress_hook(group, bucket)


@dataclass(frozen=True)
class Gossip:
    """GossipDataParallel with an algorithm created from the one-peer exponential graph."""

    make_algorithm: Callable[[OnePeerExponential], gossip.Algorithm]

    def __call__(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Wrap a module."""
        graph = OnePeerExponential(dist.get_world_size())
        return GossipDataParallel(module, optimizer, self.make_algorithm(graph))


def overlapped(overlap: int) -> Gossip:
    """Return SGP whose rounds are in flight for ``overlap`` steps."""
    return Gossip(lambda graph: gossip.SGP(graph, overlap=overlap))


SGP = Method("SGP", Gossip(gossip.SGP))
OVERLAPPED = Method("SGP, overlap=1", overlapped(1))
SGP_CLOSURE = Method("SGP, closure", Gossip(gossip.SGP), closure=True)
OVERLAPPED_CLOSURE = Method("SGP, overlap=1, closure", overlapped(1), closure=True)
OVERLAPPED_4 = Method("SGP, overlap=4", overlapped(4))
ADPSGD = Method("ADPSGD", Gossip(lambda graph: gossip.ADPSGD(Ring(graph.num_ranks))))
DDP = Method("DDP", ddp)
DDP_HALVED = Method("DDP, bf16 hook", ddp_halved)
ALONE = Method("compute alone", alone)
