"""The compared methods, behind one interface that takes steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.gossip.models import Compute
from pyparallel import GossipDataParallel, gossip
from pyparallel.comm import Run
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum import PushSum
from pyparallel.gossip.topology import OnePeerExponential, Ring
from pyparallel.training import FlatBuckets

RANKS = 4
BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel and of GossipDataParallel

Wrap = Callable[[nn.Module, Optimizer], nn.Module]
Hook = Callable[..., torch.futures.Future[Tensor]]


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
        return Training(compute, self)


class Training:
    """A user's training loop."""

    def __init__(self, compute: Compute, method: Method) -> None:
        module = compute.build()
        self._inputs = compute.make_inputs()
        self._closure = method.closure
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        self._module = method.wrap(module, self._optimizer)

    def step(self) -> None:
        if self._closure:
            self._optimizer.step(self._evaluate)
        else:
            self._evaluate()
            self._optimizer.step()

    def _evaluate(self) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._module(self._inputs).mean()
        loss.backward()
        return loss

    def finish(self) -> None:
        if isinstance(self._module, GossipDataParallel):
            self._module.flush()


class RoundAlone:
    """The rounds of SGP on the same parameters, without training steps."""

    def __init__(self, compute: Compute) -> None:
        buckets = FlatBuckets(compute.build().parameters(), BUCKET_BYTES)
        graph = OnePeerExponential(dist.get_world_size())
        exchange = NeighborExchange(Run(dist.new_group()))
        self.step = PushSum.of_dense(buckets.buffers, exchange, graph).after_step

    def finish(self) -> None:
        """Do nothing: a round is complete when it returns."""


def alone(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    return module


@dataclass(frozen=True)
class DataParallel:
    """DDP with default buckets and gradients as views of them, and a hook."""

    hook: Hook | None = None

    def __call__(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if self.hook:
            wrapped.register_comm_hook(None, self.hook)
        return wrapped


def bf16_unchecked(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Call torch's hook, which torch refuses by name without CUDA, though gloo adds bfloat16."""
    return bf16_compress_hook(group, bucket)


@dataclass(frozen=True)
class Gossip:
    """GossipDataParallel with an algorithm for a number of ranks."""

    make_algorithm: Callable[[int], gossip.Algorithm]

    def __call__(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        algorithm = self.make_algorithm(dist.get_world_size())
        return GossipDataParallel(module, optimizer, algorithm)


def sgp(overlap: int) -> Gossip:
    return Gossip(lambda n: gossip.SGP(OnePeerExponential(n), overlap=overlap))


SGP = Method("SGP", sgp(0))
OVERLAPPED = Method("SGP, overlap=1", sgp(1))
SGP_CLOSURE = Method("SGP, closure", sgp(0), closure=True)
OVERLAPPED_CLOSURE = Method("SGP, overlap=1, closure", sgp(1), closure=True)
OVERLAPPED_4 = Method("SGP, overlap=4", sgp(4))
ADPSGD = Method("ADPSGD", Gossip(lambda n: gossip.ADPSGD(Ring(n))))
DDP = Method("DDP", DataParallel())
DDP_HALVED = Method("DDP, bf16 hook", DataParallel(bf16_unchecked))
ALONE = Method("compute alone", alone)
