"""Rounds that end in an exact average every so many steps: what LocalSGD and its kin share."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...comm import FlatBuckets, PeerError
from .rounds import GossipSession, Rounds


class Outer(Protocol):
    """What happens once all ranks hold the exact average of their parameters."""

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Replace the average in the buffers by what training goes on with; equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that instead."""

    def restart(self, buffers: Sequence[Tensor]) -> None:
        """Begin anew where the buffers are, which somebody else has written."""


class LocalRounds:
    """No communication at all: every rank trains by itself."""

    def __init__(self, buckets: FlatBuckets) -> None:
        self._buffers = buckets.buffers
        self.weight = torch.ones((), dtype=torch.float64, device=self._buffers[0].device)
        self.bytes_sent = 0

    def closure_error(self) -> str | None:
        """None."""
        return None

    def settle(self) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Nothing."""

    def enter_update(self) -> None:
        """Nothing."""

    def leave_update(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """The parameters as they are."""
        return self._buffers, self.weight

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""


class PeriodicRounds:
    """Rounds of another kind, and after every ``interval`` of them the exact average."""

    def __init__(
        self,
        inner: Rounds,
        outer: Outer,
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
    def weight(self) -> Tensor:
        """That of the inner rounds."""
        return self._inner.weight

    @property
    def bytes_sent(self) -> int:
        """Of both; averages by the formula of a ring all-reduce."""
        return self._inner.bytes_sent + self._bytes_sent

    def closure_error(self) -> str | None:
        """As the inner rounds say."""
        return self._inner.closure_error()

    def settle(self) -> None:
        """As the inner rounds do."""
        self._inner.settle()

    def begin(self) -> None:
        """As the inner rounds do."""
        self._inner.begin()

    def enter_update(self) -> None:
        """As the inner rounds do."""
        self._inner.enter_update()

    def leave_update(self) -> None:
        """As the inner rounds do."""
        self._inner.leave_update()

    def end(self) -> None:
        """The inner round, and the average when it is time."""
        self._inner.end()
        self._steps += 1
        if self._steps % self._interval == 0:
            self._inner.flush()
            self._average()
            self._outer.apply(self._buckets.buffers)

    def flush(self) -> None:
        """As the inner rounds do."""
        self._inner.flush()

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """As the inner rounds say."""
        return self._inner.as_merged()

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, and what the inner rounds and the outer step remember."""
        inner, outer = self._inner.state_dict(), self._outer.state_dict()
        return {"steps": self._steps, "inner": inner, "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._steps = state["steps"]
        self._inner.load_state_dict(state["inner"])
        self._outer.load_state_dict(state["outer"])

    def restart(self) -> None:
        """Both."""
        self._inner.restart()
        self._outer.restart(self._buckets.buffers)

    @torch.no_grad()
    def _average(self) -> None:
        """The weights of all ranks add up to their number, so sum_i w_i z_i / n is the average.

        Raises:
            PeerError: a rank is gone. Every buffer then holds the average, or what it held.
        """
        if self._num_ranks == 1:
            return
        for buffer in self._buckets.buffers:
            total = buffer.float() * (self.weight / self._num_ranks)
            try:
                dist.all_reduce(total, group=self._group)
            except RuntimeError as error:
                raise PeerError(
                    f"step {self._steps}: the ranks could not average: one died or was silent for "
                    f"the process group's timeout ({str(error).splitlines()[0]})"
                ) from error
            buffer.copy_(total)
            num_bytes = 2 * total.numel() * total.element_size() * (self._num_ranks - 1)
            self._bytes_sent += num_bytes // self._num_ranks


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each target becomes a copy of its source."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_interval(interval: int) -> None:
    """Refuse what is not a positive number of steps."""
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval must be a positive number of steps, got {interval!r}")


def start_periodically(
    module: nn.Module,
    inner: Rounds,
    outer: Outer,
    interval: int,
    buckets: FlatBuckets,
    process_group: ProcessGroup | None,
) -> GossipSession:
    """A session of inner rounds with an outer step every so many."""
    rounds = PeriodicRounds(inner, outer, interval, buckets, process_group)
    return GossipSession(module, rounds, process_group)
