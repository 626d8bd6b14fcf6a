"""The cost of a round and of a step of SGP without communication.

A round is compared with its ``mix_`` calls alone. A step with ``overlap=1`` is fused, or in two
passes, and has a policy for gradients that are not finite, which costs torch's optimizers a pass
over the gradients. Messages that gloo copies meanwhile would take this machine's memory bandwidth:
the steps send none.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.gossip.models import Compute
from benchmarks.gossip.trainers import BUCKET_BYTES
from benchmarks.harness.turns import take_turns, timed
from pyparallel import GossipDataParallel, optim
from pyparallel.comm import Run
from pyparallel.comm.p2p import Transfer
from pyparallel.gossip import SGP
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.messages.exchange import HEADER
from pyparallel.gossip.push_sum import DenseBuffer, PushSum
from pyparallel.gossip.topology import OnePeerExponential
from pyparallel.ops import mix_
from pyparallel.training import FlatBuckets

MIX_ALONE = "its mix_ calls alone"


class TimedExchange(NeighborExchange):
    """An exchange that adds up the seconds of starts and waits, which are communication.

    Gloo begins to copy to sockets in a start.
    """

    seconds = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and count its time as communication."""
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin

    def start(self, *arguments: Any) -> Any:
        pending = self.call(super().start, *arguments)
        pending.wait = partial(self.call, pending.wait)
        return pending


def measure_rounds(rank: int, compute: Compute, turns: int, pause: float) -> dict[str, list[float]]:
    def settle() -> None:
        dist.barrier()
        time.sleep(pause)  # the other rank's threads have left the barrier

    runs = {
        "round, overlap 0 or 1": make_round(compute, pause, snapshot=False),
        "round, overlap above 1": make_round(compute, pause, snapshot=True),
        MIX_ALONE: make_mixing(compute),
    }
    return take_turns(runs, turns, before=settle)


def make_round(compute: Compute, pause: float, *, snapshot: bool) -> Callable[[], float]:
    """Return a round, with time for messages to arrive; its seconds are those outside of that."""
    exchange, graph = TimedExchange(Run()), OnePeerExponential(dist.get_world_size())
    buffers = [DenseBuffer(b, exchange, snapshot=snapshot) for b in make_buffers(compute)]
    averaging = PushSum(buffers, exchange, graph)

    def run() -> float:
        exchange.seconds = 0.0
        begin = time.perf_counter()
        averaging.send()
        exchange.call(time.sleep, pause)
        averaging.merge()
        return time.perf_counter() - begin - exchange.seconds

    return run


def make_mixing(compute: Compute) -> Callable[[], float]:
    """Return the ``mix_`` calls of such a round: as many calls on as many elements."""
    buffers = make_buffers(compute)
    messages = [torch.zeros_like(buffer) for buffer in buffers]
    masses = torch.full((1,), 0.5, dtype=torch.float64)

    def run() -> float:
        weights = [torch.tensor(0.5, dtype=torch.float64) for _ in buffers]
        begin = time.perf_counter()
        for buffer, weight, message in zip(buffers, weights, messages, strict=True):
            mix_(buffer, weight, [message], masses)
        return time.perf_counter() - begin

    return run


def make_buffers(compute: Compute) -> Sequence[Tensor]:
    return FlatBuckets(compute.build().parameters(), BUCKET_BYTES).buffers


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "torch.optim.AdamW(fused=True), then mix_": lambda p: torch.optim.AdamW(p, fused=True),
    "pyparallel.optim.AdamW": optim.AdamW,
    "torch.optim.SGD(fused=True), then mix_": lambda p: torch.optim.SGD(
        p, lr=1e-3, momentum=0.9, fused=True
    ),
    "pyparallel.optim.SGD": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9),
}
POLICY_OPTIMIZERS = ("torch.optim.SGD(fused=True), then mix_", "pyparallel.optim.SGD")
POLICIES = ("allow", "raise", "skip")


def measure_updates(rank: int, compute: Compute, turns: int) -> dict[str, list[float]]:
    runs = {name: Update(compute, build).run for name, build in OPTIMIZERS.items()}
    return take_turns(runs, turns, before=dist.barrier)


def measure_policies(rank: int, compute: Compute, turns: int) -> dict[tuple[str, str], list[float]]:
    runs = {
        (name, policy): Update(compute, OPTIMIZERS[name], nonfinite=policy).run_step
        for name in POLICY_OPTIMIZERS
        for policy in POLICIES
    }
    return take_turns(runs, turns, before=dist.barrier)


class Silent(NeighborExchange):
    """An exchange that sends nothing: receive buffers keep what they hold, headers are its own."""

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Any:
        """Start nothing; a header received is one of those to be sent."""
        header = next(transfer.tensor for transfer in sends if transfer.kind == HEADER)
        for transfer in receives:
            if transfer.kind == HEADER:
                transfer.tensor.copy_(header)
        return self

    def wait(self, kind: int = HEADER) -> None:
        """Return at once."""

    wait_for = wait


class Update:
    """Steps of ``GossipDataParallel``, each of which averages with a message."""

    def __init__(self, compute: Compute, build: Callable[[Any], Optimizer], **options: Any) -> None:
        module = compute.build()
        self._inputs = compute.make_inputs()
        self._optimizer = build(module.parameters())
        algorithm = SGP(overlap=1)
        self._model = GossipDataParallel(module, self._optimizer, algorithm, **options)
        for buffer in self._model._averager._round_buffers:
            buffer._exchange = Silent(buffer._exchange.run)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)

    def run(self) -> float:
        return timed(self._optimizer.step)

    def run_step(self) -> float:
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._inputs).mean().backward()
        self._optimizer.step()
        return time.perf_counter() - begin
