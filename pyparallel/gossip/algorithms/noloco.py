"""NoLoCo: local steps, then an outer step with one random partner instead of an all-reduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, ModelAverager
from ...training.arguments import check_in, require
from ..messages import NeighborExchange
from ..topology import Matching
from .base import OnTopology, copy_all
from .periodic import check_interval


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


@dataclass(frozen=True)
class NoLoCo(OnTopology):
    """DiLoCo without all-reduce (Kolehmainen et al., arXiv 2506.10911).

    Every ``interval`` local steps, which have moved the parameters from the slow weights phi to
    theta, a rank takes an outer step with a partner::

        m   <- momentum * m + outer_lr * mean(theta - phi) - pull * (phi - mean(phi))
        phi <- phi + m
        theta <- phi

    with means over the pair. The last term keeps ranks together in place of a global average; slow
    weights and momentum stay local. Only the sum of both means is needed, so each partner sends one
    message of the size of the model, in float32. A rank without a partner (one of an odd number in
    each round, and a single rank always) is its own mean: it takes a local outer step with
    heavy-ball momentum, as DiLoCo with torch's ``SGD(lr=outer_lr, momentum=momentum)``.

    In ``join()`` a rank without batches still exchanges with its partners and takes outer steps.

    Args:
        topology: a ``Matching`` for as many ranks as the process group has; ``RandomMatching`` as
            in the paper.
        momentum: of the outer steps, in [0, 1).
        pull: in (0, 2 * (1 + momentum)); otherwise a pair that meets repeatedly would diverge. The
            paper's code uses ``outer_lr``.
    """

    topology: Matching
    interval: int = 50
    momentum: float = 0.5
    outer_lr: float = 0.7
    pull: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval(self.interval)
        check_in("momentum", self.momentum, "[0, 1)")
        require(0 < self.outer_lr < math.inf, "outer_lr must be positive and finite", self.outer_lr)
        most = 2 * (1 + self.momentum)
        rule = f"pull must be in (0, {most:g}), between 0 and 2 * (1 + momentum)"
        require(0 < self.pull < most, rule, self.pull)

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        if not isinstance(self.topology, Matching):
            return (
                "topology must be a Matching, as RandomMatching, Hypercube and "
                f"BipartiteExponential are, got {self.topology!r}"
            )
        return super().validation_error(num_ranks)

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "NoLoCoAverager":
        return NoLoCoAverager(self, buckets.buffers, NeighborExchange(run))


class NoLoCoAverager(ModelAverager):
    """NoLoCo on one rank, with slow weights and outer momentum in float32."""

    def __init__(
        self, options: NoLoCo, buffers: Sequence[Tensor], exchange: NeighborExchange
    ) -> None:
        super().__init__(buffers, exchange.run)
        self._options = options
        self._exchange = exchange
        self._slow = [buffer.float().clone() for buffer in self.buffers]
        self._momentum = [torch.zeros_like(slow) for slow in self._slow]
        self._steps = 0

    @override
    def after_step(self) -> None:
        self._steps += 1
        if self._steps % self._options.interval == 0:
            self._outer_step(self._steps // self._options.interval - 1)

    @torch.no_grad()
    def _outer_step(self, index: int) -> None:
        means = self._average_with_partner(self._targets(), index)
        for buffer, slow, momentum, mean in zip(
            self.buffers, self._slow, self._momentum, means, strict=True
        ):
            momentum.mul_(self._options.momentum).add_(mean - slow, alpha=self._options.pull)
            buffer.copy_(slow.add_(momentum))
        self._exchange.headers.raise_nonfinite()

    def _targets(self) -> list[Tensor]:
        """Return phi + outer_lr / pull * (theta - phi): one mean of it gives both means."""
        ratio = self._options.outer_lr / self._options.pull
        return [
            torch.lerp(slow, buffer.float(), ratio)
            for slow, buffer in zip(self._slow, self.buffers, strict=True)
        ]

    def _average_with_partner(self, mine: list[Tensor], index: int) -> list[Tensor]:
        partner = self._options.topology.partner(self._exchange.rank, index)
        if partner is None:
            return mine
        theirs = self._exchange.swap(mine, [partner], [partner], round_index=index).wait()
        # Both partners add the same two numbers: equal data stay equal to the last bit.
        return [(a + b).mul_(0.5) for a, b in zip(mine, theirs.first_or(mine), strict=True)]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "slow": [slow.clone() for slow in self._slow],
            "momentum": [momentum.clone() for momentum in self._momentum],
        }

    @override
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        copy_all(self._slow, state["slow"])
        copy_all(self._momentum, state["momentum"])

    @override
    @torch.no_grad()
    def reset(self) -> None:
        """Set the slow weights to the parameters and the momentum to zero."""
        for slow, buffer, momentum in zip(self._slow, self.buffers, self._momentum, strict=True):
            slow.copy_(buffer)
            momentum.zero_()
