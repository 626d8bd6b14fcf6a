"""Policies of which weights an action reads, counted in updates of its stage.

Version v of a stage is its weights after v updates since the pipeline was last empty. The functions
here take integers (from the executor) or integer arrays (from the simulator).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import override

Count = int | np.ndarray


class VersionCounters(NamedTuple):
    """The updates that a stage has done before it runs each action of a microbatch.

    ``update`` is the version to which the microbatch's gradient is applied. So ``update - forward``
    is the true version difference of a forward on live weights: in 1F1B min(microbatches in flight,
    num_stages - 1 - stage), also in warm-up.
    """

    forward: Count
    backward: Count
    update: Count
    first_forward: Count  # forward of the first microbatch whose gradient is in the same update


class WeightVersion(NamedTuple):
    """The weights that an action reads: a version, and the updates it is predicted ahead.

    A negative horizon estimates earlier weights.
    """

    version: Count
    horizon: Count


class Versions(Protocol):
    """Protocol of a policy: which weights a microbatch's forward and backward read on a stage."""

    synchronous_updates: int = 0  # so many come first, whose gradients are not delayed

    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        """Return the weights that the forward reads; the version must exist by then."""

    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        """Return the weights that the backward reads."""


def _unpredicted(version: Count) -> WeightVersion:
    return WeightVersion(version, version * 0)


@dataclass(frozen=True)
class Live(Versions):
    """Live weights: consistent if the pipeline is flushed in each step, else inconsistent."""

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return _unpredicted(counters.forward)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return _unpredicted(counters.backward)


@dataclass(frozen=True)
class Stashed(Versions):
    """Weight stashing: the backward reads the weights that its forward has read."""

    policy: Versions

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self.policy.forward(counters, stage)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self.policy.forward(counters, stage)


@dataclass(frozen=True)
class Delayed(Live):
    """The forward reads weights ``updates`` older than those its gradient is applied to.

    All stages read the same version; predicted weights are predicted from it. The backward reads
    live weights.
    """

    updates: int
    is_predicted: bool = False

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        # The first version as long as no update has been done.
        version = np.maximum(counters.update - self.updates, 0)
        return WeightVersion(version, (counters.update - version) * self.is_predicted)


@dataclass(frozen=True)
class Predicted(Live):
    """The forward reads weights predicted for its gradient's update; the backward, live weights.

    If several microbatches go into one update, the prediction of the first serves all.
    """

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return WeightVersion(counters.first_forward, counters.update - counters.first_forward)


@dataclass(frozen=True)
class Speculative(Versions):
    """Both passes predict the weights at stage 0's update by the microbatch (SpecTrain)."""

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        # The true version difference, plus half the stage's index.
        return WeightVersion(counters.forward, counters.update - counters.forward + stage // 2)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return WeightVersion(counters.backward, counters.backward * 0 + stage // 2)


@dataclass(frozen=True)
class Estimated(Live):
    """The forward reads live weights; the backward, an estimate of them (PipeMare)."""

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return WeightVersion(counters.backward, counters.forward - counters.backward)


@dataclass(frozen=True)
class SynchronousStart(Versions):
    """Live weights in updates that come first, each after a flush; then those of a policy."""

    policy: Versions
    synchronous_updates: int

    @override
    def forward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self._read(self.policy.forward, counters, counters.forward, stage)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self._read(self.policy.backward, counters, counters.backward, stage)

    def _read(
        self,
        policy: Callable[[VersionCounters, int], WeightVersion],
        counters: VersionCounters,
        live: Count,
        stage: int,
    ) -> WeightVersion:
        start = self.synchronous_updates
        since = VersionCounters(*(counter - start for counter in counters))
        version, horizon = policy(since, stage)
        streams = since.update >= 0
        return WeightVersion(live + streams * (version + start - live), streams * horizon)


def in_mode(weights: str, policy: Versions) -> Versions:
    """Return the policy as it is ("live"), or with weight stashing ("consistent")."""
    if weights not in {"consistent", "live"}:
        raise ValueError(f'weights must be "consistent" or "live", got {weights!r}')
    return policy if weights == "live" else Stashed(policy)
