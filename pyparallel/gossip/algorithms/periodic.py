"""Rounds with an exact average at an interval, shared by LocalSGD, SlowMo and DiLoCo."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from ...comm import FlatBuckets, peer_error
from .rounds import GossipSession, Rounds


class OuterStep(Protocol):
    """The outer step that follows each exact average."""

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Update the average in the buffers, in place and equally on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is equal on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def restart(self, buffers: Sequence[Tensor]) -> None:
        """Reset the state to the values of the buffers, which have been overwritten."""


class LocalRounds:
    """Rounds without communication, also a base class that overrides only what it needs."""

    def __init__(self, buckets: FlatBuckets) -> None:
        self._buffers = buckets.buffers
        self.weight = torch.ones((), dtype=torch.float64, device=self._buffers[0].device)
        self.bytes_sent = 0

    def closure_error(self) -> str | None:
        """Return None: closures are allowed."""
        return None

    def restore_debiased(self) -> None:
        """Do nothing: parameters are always de-biased."""

    def begin(self) -> None:
        """Do nothing: there are no messages to receive."""

    def enter_update(self) -> None:
        """Do nothing: updates act on the parameters."""

    def leave_update(self) -> None:
        """Do nothing: updates act on the parameters."""

    def end(self) -> None:
        """Do nothing: there are no messages to send."""

    def flush(self) -> None:
        """Do nothing: there are no messages in flight."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return the live parameters and the weight 1."""
        return self._buffers, self.weight

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""

    def restart(self) -> None:
        """Do nothing: there is no state."""


class PeriodicRounds(Rounds):
    """Inner rounds, with an exact average and an outer step every ``interval`` steps."""

    def __init__(
        self,
        inner: Rounds,
        outer: OuterStep,
        interval: int,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> None:
        self._inner = inner
        self._outer = outer
        self._interval = interval
        self._buckets = buckets
        self._group = process_group
        self._num_ranks = dist.get_world_size(process_group)
        self._steps = 0
        self._bytes_sent = 0

    @property
    @override
    def weight(self) -> Tensor:
        return self._inner.weight

    @property
    @override
    def bytes_sent(self) -> int:
        """Bytes sent by the inner rounds and the averages, which count as ring all-reduces."""
        return self._inner.bytes_sent + self._bytes_sent

    @override
    def closure_error(self) -> str | None:
        return self._inner.closure_error()

    @override
    def restore_debiased(self) -> None:
        self._inner.restore_debiased()

    @override
    def begin(self) -> None:
        self._inner.begin()

    @override
    def enter_update(self) -> None:
        self._inner.enter_update()

    @override
    def leave_update(self) -> None:
        self._inner.leave_update()

    @override
    def end(self) -> None:
        """End the inner round; average and take the outer step every ``interval`` steps."""
        self._inner.end()
        self._steps += 1
        if self._steps % self._interval == 0:
            self._inner.flush()
            self._average()
            self._outer.apply(self._buckets.buffers)

    @override
    def flush(self) -> None:
        self._inner.flush()

    @override
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        return self._inner.as_merged()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the states of the inner rounds and the outer step."""
        inner, outer = self._inner.state_dict(), self._outer.state_dict()
        return {"steps": self._steps, "inner": inner, "outer": outer}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._inner.load_state_dict(state["inner"])
        self._outer.load_state_dict(state["outer"])

    @override
    def restart(self) -> None:
        self._inner.restart()
        self._outer.restart(self._buckets.buffers)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the buffers over all ranks, weighted: the weights sum to the number of ranks n.

        Raises:
            PeerError: a rank failed. Every buffer then holds the average or is unchanged.
        """
        if self._num_ranks == 1:
            return
        for buffer in self._buckets.buffers:
            total = buffer.float() * (self.weight / self._num_ranks)
            try:
                dist.all_reduce(total, group=self._group)
            except RuntimeError as error:
                rank = dist.get_rank()
                raise peer_error(rank, self._steps, "the all-reduce failed", error) from error
            buffer.copy_(total)
            num_bytes = 2 * total.numel() * total.element_size() * (self._num_ranks - 1)
            self._bytes_sent += num_bytes // self._num_ranks


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_interval(interval: int) -> None:
    """Raise a ValueError unless ``interval`` is a positive number of steps."""
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval must be a positive number of steps, got {interval!r}")


def start_periodically(
    module: nn.Module,
    inner: Rounds,
    outer: OuterStep,
    interval: int,
    buckets: FlatBuckets,
    process_group: ProcessGroup | None,
) -> GossipSession:
    """Return a session of inner rounds with an outer step every ``interval`` steps."""
    rounds = PeriodicRounds(inner, outer, interval, buckets, process_group)
    return GossipSession(module, rounds, process_group)
