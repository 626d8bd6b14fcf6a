"""Which weights an action reads: policies that know no tensor, counted in updates of a stage.

Version v of a stage is what its weights are after v updates since the pipe was last empty. The
functions here take plain integers (the executor's) or arrays of them (the simulator's).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Count = int | np.ndarray


class VersionCounters(NamedTuple):
    """When a stage handles a microbatch, counted in the updates that the stage has done before.

    ``update`` is the version that training without a pipeline would have used: that on which the
    microbatch's gradient will be applied. So ``update - forward`` is the true version difference of
    a forward on live weights; in the 1F1B order it is min(in flight, num_stages - 1 - stage), in
    warm-up too.
    """

    forward: Count
    backward: Count
    update: Count
    first_forward: Count  # the forward of the first microbatch that goes into the same update


class WeightVersion(NamedTuple):
    """The weights that an action reads: a version, and how many updates it is predicted ahead.

    Below 0: how many updates it is estimated back.
    """

    version: Count
    horizon: Count


class Versions(Protocol):
    """The policy: what the forward and the backward of a microbatch read on a stage."""

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """What the forward reads: never a version that does not exist yet."""

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """What the backward reads."""


def _plain(version: Count) -> WeightVersion:
    return WeightVersion(version, version * 0)


@dataclass(frozen=True)
class Live:
    """Whatever the weights are at the time: right where the pipe is flushed, else inconsistent."""

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the forward."""
        return _plain(seen.forward)

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the backward."""
        return _plain(seen.backward)


@dataclass(frozen=True)
class Stashed:
    """Another policy, made consistent: the backward reads the weights that the forward has read."""

    policy: Versions

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """As the other policy has it."""
        return self.policy.forward(seen, stage)

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The same weights again."""
        return self.policy.forward(seen, stage)


@dataclass(frozen=True)
class Delayed:
    """The weights as they were ``updates`` before the microbatch's own: on every stage the same."""

    updates: int

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """That version; the first one as long as there is none before it."""
        return _plain(np.maximum(seen.update - self.updates, 0))

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The same version."""
        return self.forward(seen, stage)


@dataclass(frozen=True)
class Predicted:
    """The forward reads what the weights will be when the gradient is applied; the backward, live.

    Where several microbatches go into one update, the first of them predicts for all.
    """

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the first microbatch's forward, as far ahead as its gradient is away."""
        return WeightVersion(seen.first_forward, seen.update - seen.first_forward)

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the backward."""
        return _plain(seen.backward)


@dataclass(frozen=True)
class Speculative:
    """Both passes predict, to the time when stage 0 is done with the microbatch (SpecTrain)."""

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The true version difference ahead, and half the stage's index more."""
        return WeightVersion(seen.forward, seen.update - seen.forward + stage // 2)

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """Half the stage's index ahead."""
        return WeightVersion(seen.backward, seen.backward * 0 + stage // 2)


@dataclass(frozen=True)
class Recomputed:
    """The forward reads live weights; the backward, an estimate of those, as PipeMare has it."""

    def forward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the forward."""
        return _plain(seen.forward)

    def backward(self, seen: VersionCounters, stage: int) -> WeightVersion:
        """The weights at the backward, taken back by the updates since the forward."""
        return WeightVersion(seen.backward, seen.forward - seen.backward)


def in_mode(weights: str, policy: Versions) -> Versions:
    """The policy as it is ("live"), or with forward and backward on one version ("consistent").

    Raises:
        ValueError: ``weights`` is neither.
    """
    if weights not in {"consistent", "live"}:
        raise ValueError(f'weights must be "consistent" or "live", got {weights!r}')
    return policy if weights == "live" else Stashed(policy)
