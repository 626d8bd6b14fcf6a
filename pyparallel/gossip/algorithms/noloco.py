"""NoLoCo: local steps, then an outer step with one random partner instead of an all-reduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...training import FlatBuckets, Place
from ...training.arguments import check_in, check_integer, require
from ...training.consensus import copy_all
from ..messages import NeighborExchange
from ..messages.averages import Pairs
from ..topology import Matching, RandomMatching
from .base import OnTopology, OuterRule, Periodic
from .periodic import PeriodicAverager


def noloco(
    theta: Tensor, phi: Tensor, m: Tensor, momentum: float, outer_lr: float, pull: float
) -> tuple[Tensor, Tensor]:
    """Take an outer step of a pair, or of a rank without a partner; return phi and m after it.

    Args:
        theta: (2, d) parameters after the local steps, a row for each partner; or (1, d).
        phi: slow weights, likewise.
        m: outer momentum, likewise.
    """
    change = (theta - phi).mean(0)  # the pair's outer gradient
    m = momentum * m + outer_lr * change - pull * (phi - phi.mean(0))
    return phi + m, m  # phi <- phi + m, from which theta continues


@dataclass(frozen=True, repr=False)
class NoLoCo(Periodic, OnTopology):
    """DiLoCo without all-reduce (Kolehmainen et al., arXiv 2506.10911).

    Every ``interval`` local steps, which have moved the parameters from the slow weights phi to
    theta, a rank takes an outer step with a partner::

        m   <- momentum * m + outer_lr * mean(theta - phi) - pull * (phi - mean(phi))
        phi <- phi + m
        theta <- phi

    with means over the pair. The last term keeps ranks together in place of a global average; slow
    weights and momentum stay local. Only the sum of both means is needed, so each partner sends one
    message of the size of the model, in float32 or wider without a compressor. A rank without a
    partner (one of an odd number in each round, and a single rank always) is its own mean: it takes
    a local outer step with heavy-ball momentum, as DiLoCo with torch's ``SGD(lr=outer_lr,
    momentum=momentum)``.

    In ``join()`` a rank without batches still exchanges with its partners and takes outer steps.

    Args:
        topology: a ``Matching``, or its class; None: ``RandomMatching``, as in the paper.
        momentum: of the outer steps, in [0, 1).
        pull: in (0, 2 * (1 + momentum)); otherwise a pair that meets repeatedly would diverge. The
            paper's code uses ``outer_lr``.
        pull_turns: with a compressor, which sends ``outer_lr / pull * (theta - phi)``, the pull has
            no message of its own, as phi may differ by more than one. In each outer step one of so
            many slices of phi is sent in float32, in turn, and pulled.
    """

    default = RandomMatching
    interval: int = 50
    momentum: float = 0.5
    outer_lr: float = 0.7
    pull: float = 0.7
    pull_turns: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options(self.interval)
        if self.compressor is not None:
            rule = "compressor must send messages of a fixed length"
            require(self.compressor.fixed_length, rule, str(self.compressor))
        check_integer("pull_turns", self.pull_turns)
        check_in("momentum", self.momentum, "[0, 1)")
        require(0 < self.outer_lr < math.inf, "outer_lr must be positive and finite", self.outer_lr)
        most = 2 * (1 + self.momentum)
        rule = f"pull must be in (0, {most:g}), between 0 and 2 * (1 + momentum)"
        require(0 < self.pull < most, rule, self.pull)

    @override
    def error_at(self, place: Place) -> str | None:
        if isinstance(topology := self.bound_topology, Matching):
            return super().error_at(place)
        return f"topology must be a Matching such as RandomMatching or Hypercube, got {topology!r}"

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PeriodicAverager:
        return PeriodicAverager(self, self.interval, optimizer, module, buckets, run)

    @override
    def make_rule(self, slow: list[Tensor], optimizer: Optimizer, ranks: Collectives) -> OuterRule:
        return NoLoCoRule(self, slow)

    @override
    def start_averages(self, run: Run) -> Pairs:
        topology = self.bound_topology
        assert isinstance(topology, Matching)  # by error_at
        options = self.compressor, self.pull_turns, self.num_fragments
        return Pairs(NeighborExchange(run), topology, *options)


class NoLoCoRule(OuterRule):
    """The outer step of NoLoCo, with slow weights and outer momentum in float32."""

    evaluates_slow = True

    def __init__(self, options: NoLoCo, slow: Sequence[Tensor]) -> None:
        super().__init__(slow)
        self._options = options
        self._momentum = [torch.zeros_like(each) for each in self.slow]

    @override
    def message(self, weights: list[Tensor]) -> list[Tensor]:
        """Return phi + outer_lr / pull * (theta - phi): one mean of it gives both means."""
        ratio = self._options.outer_lr / self._options.pull
        return [torch.lerp(a, each, ratio) for a, each in zip(self.slow, weights, strict=True)]

    @override
    def take(
        self, averages: list[Tensor], frozen: Sequence[tuple[int, slice, bool]]
    ) -> list[Tensor]:
        """Take ``step``, by which parameters that are frozen are pulled together alone."""
        for i, part, _ in frozen:
            self._momentum[i][part] = 0
        return self.step(averages)

    @override
    def step(self, averages: list[Tensor]) -> list[Tensor]:
        for slow, momentum, mean in zip(self.slow, self._momentum, averages, strict=True):
            momentum.mul_(self._options.momentum).add_(mean - slow, alpha=self._options.pull)
            slow.add_(momentum)
        return self.slow

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "momentum": self._momentum}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_all(self.slow, state["slow"])
        copy_all(self._momentum, state["momentum"])

    @override
    def reset(self, weights: list[Tensor]) -> None:
        """Set the slow weights to the parameters and the momentum to zero."""
        super().reset(weights)
        for each in self._momentum:
            each.zero_()
