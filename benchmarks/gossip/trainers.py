"""The methods that are compared, each seen as something that takes steps."""

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
from pyparallel.comm import FlatBuckets, NeighborExchange
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import OnePeerExponential, Ring

BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel and of GossipDataParallel
COMPUTE = "forward and backward"  # its range in a trace


class Compute(Protocol):
    """What a step computes."""

    def build(self) -> nn.Module:
        """A new module."""

    def make_inputs(self) -> Tensor:
        """One batch."""


class Stepper(Protocol):
    """One method on one rank."""

    def step(self) -> None:
        """One step of training."""

    def finish(self) -> None:
        """End what is under way; all ranks together."""


Wrap = Callable[[nn.Module, Optimizer], nn.Module]


@dataclass(frozen=True)
class Method:
    """A way to keep ranks together.

    Args:
        wrap: given module and optimizer, what to call in place of the module.
    """

    name: str
    wrap: Wrap

    def start(self, compute: Compute) -> "Training":
        """Begin on this rank."""
        return Training(compute, self.wrap)


class Training:
    """The user's own loop."""

    def __init__(self, compute: Compute, wrap: Wrap) -> None:
        module = compute.build()
        self._inputs = compute.make_inputs()
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        self._module = wrap(module, self._optimizer)

    def step(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        with torch.profiler.record_function(COMPUTE):
            self._module(self._inputs).mean().backward()
        self._optimizer.step()

    def finish(self) -> None:
        """Merge what travels."""
        if isinstance(self._module, GossipDataParallel):
            self._module.flush()


class RoundAlone:
    """The rounds of SGP on the same parameters, without a step around them."""

    def __init__(self, compute: Compute) -> None:
        buckets = FlatBuckets(compute.build().parameters(), BUCKET_BYTES)
        graph = OnePeerExponential(dist.get_world_size())
        self._averaging = PushSum(buckets.buffers, NeighborExchange(dist.new_group()), graph)

    def step(self) -> None:
        """One round."""
        self._averaging.mix()

    def finish(self) -> None:
        """Nothing: a round is complete when it returns."""


def alone(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Compute and update, and speak with nobody."""
    return module


def ddp(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Torch's own, with its default buckets, of which the gradients are views."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def ddp_halved(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """The same, with gradients in bfloat16 on their way."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _halve)
    return wrapped


def _halve(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    # Without CUDA torch refuses its hook by name, although gloo adds bfloat16 as well.
    return bf16_compress_hook(group, bucket)


@dataclass(frozen=True)
class Gossip:
    """GossipDataParallel with an algorithm that is made from the one-peer exponential graph."""

    make_algorithm: Callable[[OnePeerExponential], gossip.Algorithm]

    def __call__(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Wrap a module."""
        graph = OnePeerExponential(dist.get_world_size())
        return GossipDataParallel(module, optimizer, self.make_algorithm(graph))


def osgp(overlap: int) -> Gossip:
    """SGP whose rounds travel for that many steps."""
    return Gossip(lambda graph: gossip.SGP(graph, overlap=overlap))


SGP = Method("SGP", Gossip(gossip.SGP))
OSGP = Method("OSGP", osgp(1))
OSGP_4 = Method("OSGP, overlap=4", osgp(4))
ADPSGD = Method("ADPSGD", Gossip(lambda graph: gossip.ADPSGD(Ring(graph.num_ranks))))
DDP = Method("DDP", ddp)
DDP_HALVED = Method("DDP, bf16 hook", ddp_halved)
ALONE = Method("compute alone", alone)
