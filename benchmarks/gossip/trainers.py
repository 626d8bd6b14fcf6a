"""The compared methods as trainings that take turns, on links and beside slow ranks."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.gossip.models import Compute, RealCompute
from benchmarks.harness import turns
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
    """A method of data parallelism."""

    name: str
    wrap: Wrap
    closure: bool = False  # whether forward and backward are in the closure of ``optimizer.step``


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
        if isinstance(self._module, GossipDataParallel):
            self._module.record_loss(loss)  # only LeaderSGD needs it
        return loss

    def waiting_seconds(self) -> float:
        """Return for how long this rank waited in the last step, of GossipDataParallel."""
        waited: float = self._module.metrics()["rank/waiting_seconds"]
        return waited

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


def in_ddp(hook: Hook | None = None) -> Wrap:
    """Return DDP with default buckets and gradients as views of them, and a hook."""

    def wrap(module: nn.Module, optimizer: Optimizer) -> nn.Module:
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if hook:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def bf16_unchecked(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Call torch's hook, which torch refuses by name without CUDA, though gloo adds bfloat16."""
    return bf16_compress_hook(group, bucket)


def by_gossip(algorithm: gossip.Algorithm) -> Wrap:
    """Return GossipDataParallel with an algorithm."""
    return lambda module, optimizer: GossipDataParallel(module, optimizer, algorithm)


def sgp(overlap: int) -> Wrap:
    return by_gossip(gossip.SGP(overlap=overlap))


ALONE = Method("compute alone", lambda module, optimizer: module)
DDP = Method("DDP", in_ddp())
SGP = Method("SGP", sgp(0))
OVERLAPPED = Method("SGP, overlap=1", sgp(1))
METHODS = [ALONE, DDP, Method("DDP, bf16 hook", in_ddp(bf16_unchecked)), SGP, OVERLAPPED]
WITH_CLOSURES = [
    ALONE,
    SGP,
    Method("SGP, closure", sgp(0), closure=True),
    OVERLAPPED,
    Method("SGP, overlap=1, closure", sgp(1), closure=True),
]
ROUND_ALONE = "round alone"


def measure_steps(
    rank: int, compute: Compute, num_turns: int, num_steps: int, methods: Sequence[Method] = METHODS
) -> dict[str, list[float]]:
    """Return the seconds per step of each method in each turn, on the slowest rank."""
    trainings: dict[str, turns.Training] = {each.name: Training(compute, each) for each in methods}
    trainings[ROUND_ALONE] = RoundAlone(compute)
    for training in trainings.values():  # connects and warms up
        training.step()
        training.finish()
    return turns.time_blocks(trainings, num_turns, num_steps)


def measure_closures(
    rank: int, compute: Compute, num_turns: int, num_steps: int
) -> dict[str, list[float]]:
    """Return the same with closures and without."""
    return measure_steps(rank, compute, num_turns, num_steps, WITH_CLOSURES)


def hidden_fraction(seconds: Mapping[str, Sequence[float]], method: str) -> float:
    """Return the overlapped fraction of the shorter of communication and compute in a method."""
    names = (ROUND_ALONE, ALONE.name, method)
    communication, compute, both = (statistics.median(seconds[name]) for name in names)
    return (communication + compute - both) / min(communication, compute)


BESIDE_STRAGGLERS = [
    DDP,
    SGP,
    OVERLAPPED,
    Method("SGP, overlap=4", sgp(4)),
    Method("ADPSGD", by_gossip(gossip.ADPSGD(Ring))),
]
LEADERS = [
    DDP,
    Method("EASGD", by_gossip(gossip.EASGD(16))),
    Method("LeaderSGD", by_gossip(gossip.LeaderSGD(1, 16, 16))),
    Method("AsynchronousLeaderSGD", by_gossip(gossip.AsynchronousLeaderSGD(1, 16, 16))),
]
SLOWER, SLOW_RANK, PROBABILITY = 3, 3, 0.1
STRAGGLING_MODEL = RealCompute(layers=2, width=64, batch=8)
EVEN, ONE_SLOW = "no straggler", "one rank 3 times slower"
AT_RANDOM = "each step 3 times longer with probability 1/10"
SCENARIOS = [EVEN, ONE_SLOW, AT_RANDOM]


def factor(scenario: str, rank: int, turn: int, step: int) -> int:
    """Return how many times longer a step takes; the same steps for all methods."""
    chance = random.Random(f"{turn} {rank} {step}").random()
    is_slow = {EVEN: False, ONE_SLOW: rank == SLOW_RANK, AT_RANDOM: chance < PROBABILITY}
    return SLOWER if is_slow[scenario] else 1


@dataclass(frozen=True)
class StragglerPlan:
    """Numbers of turns and steps, and the duration of a step."""

    turns: int
    lead: int  # steps before timing starts, until fast ranks are as far ahead as they can get
    steps: int
    seconds: float


def measure_leaders(rank: int, plan: StragglerPlan) -> dict[tuple[str, str], list[float]]:
    """Return the same of methods that follow leaders or a center, beside one slow rank."""
    return measure_stragglers(rank, plan, LEADERS, (EVEN, ONE_SLOW))


def measure_stragglers(
    rank: int,
    plan: StragglerPlan,
    methods: Sequence[Method] = BESIDE_STRAGGLERS,
    scenarios: Sequence[str] = SCENARIOS,
) -> dict[tuple[str, str], list[float]]:
    """Return this rank's seconds per step by method and scenario, one entry for each turn.

    The rank that is always slow is left out of its scenario.
    """
    trainings = {method.name: Training(STRAGGLING_MODEL, method) for method in methods}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(plan.turns):
        for scenario in scenarios:
            for name, training in trainings.items():
                elapsed = time_steps(training, scenario, rank, turn, plan)
                if (scenario, rank) != (ONE_SLOW, SLOW_RANK):
                    seconds.setdefault((name, scenario), []).append(elapsed)
    return seconds


def time_steps(
    training: Training, scenario: str, rank: int, turn: int, plan: StragglerPlan
) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for step in range(plan.lead + plan.steps):
        if step == plan.lead:
            begin = time.perf_counter()
        time.sleep(plan.seconds * factor(scenario, rank, turn, step))
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / plan.steps
