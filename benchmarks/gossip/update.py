"""The cost of a step of SGP with ``overlap=1`` without communication.

Fused and in two passes; and by the policy for gradients that are not finite, which costs torch's
optimizers a pass over the gradients.

Messages that gloo copies meanwhile would take this machine's memory bandwidth: none are sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.gossip.models import Compute
from benchmarks.harness.turns import take_turns, timed
from pyparallel import GossipDataParallel, optim
from pyparallel.gossip import SGP
from pyparallel.gossip.messages import NeighborExchange, Transfer
from pyparallel.gossip.topology import OnePeerExponential

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


def measure(rank: int, compute: Compute, turns: int) -> dict[str, list[float]]:
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
        header = next(transfer.tensor for transfer in sends if transfer.is_header)
        for transfer in receives:
            if transfer.is_header:
                transfer.tensor.copy_(header)
        return self

    def wait(self) -> None:
        """Return at once."""

    wait_for_headers = wait


class Update:
    """Steps of ``GossipDataParallel``, each of which averages with a message."""

    def __init__(self, compute: Compute, build: Callable[[Any], Optimizer], **options: Any) -> None:
        module = compute.build()
        self._inputs = compute.make_inputs()
        self._optimizer = build(module.parameters())
        algorithm = SGP(OnePeerExponential(dist.get_world_size()), overlap=1)
        self._model = GossipDataParallel(module, self._optimizer, algorithm, **options)
        for buffer in self._model._averager._round_buffers:
            buffer._exchange = Silent(buffer._exchange.run)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)

    def run(self) -> float:
        return timed(self._optimizer.step)

    def run_step(self) -> float:
        return timed(self._step)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._inputs).mean().backward()
        self._optimizer.step()
