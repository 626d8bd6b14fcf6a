"""Algorithms that average exactly every so many steps: LocalSGD, SlowMo, DiLoCo."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..comm import FlatBuckets
from .algorithm import Algorithm
from .session import GossipSession, Rounds, rounds_alone


class Outer(Protocol):
    """What happens once all ranks hold the exact average of their parameters."""

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Replace the average in the buffers by what training goes on with; equal on all ranks."""


class LocalRounds:
    """No communication at all: every rank trains by itself."""

    def __init__(self, buckets: FlatBuckets) -> None:
        self._buffers = buckets.buffers
        self.weight = torch.ones((), dtype=torch.float64, device=self._buffers[0].device)
        self.bytes_sent = 0

    def problem_of_closure(self) -> str | None:
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

    def problem_of_closure(self) -> str | None:
        """As the inner rounds say."""
        return self._inner.problem_of_closure()

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

    @torch.no_grad()
    def _average(self) -> None:
        """The weights of all ranks add up to their number, so sum_i w_i z_i / n is the average."""
        if self._num_ranks == 1:
            return
        for buffer in self._buckets.buffers:
            wide = buffer.float() if buffer.dtype != torch.float32 else buffer
            wide.mul_(self.weight / self._num_ranks)
            dist.all_reduce(wide, group=self._group)
            buffer.copy_(wide)
            num_bytes = 2 * wide.numel() * wide.element_size() * (self._num_ranks - 1)
            self._bytes_sent += num_bytes // self._num_ranks


@dataclass(frozen=True)
class LocalSGD:
    """Every rank trains alone, and every ``interval`` steps all take the average of their models.

    Stich (ICLR 2019, arXiv 1805.09767). Momentum stays local.

    Args:
        interval: steps between two averages; 1 averages models after every step.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval(self.interval)

    def facts(self) -> list[tuple[str, str]]:
        """The algorithm with its interval."""
        return [("algorithm", repr(self))]

    def problem(self, num_ranks: int) -> str | None:
        """None: it runs on any number of ranks."""
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin without communication."""
        rounds = LocalRounds(buckets)
        return _start(module, rounds, _TakeAverage(), self.interval, buckets, process_group)


class _TakeAverage:
    def apply(self, buffers: Sequence[Tensor]) -> None:
        """The average is what training goes on with."""


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum around another algorithm (Wang et al., ICLR 2020, arXiv 1910.00643).

    Every ``interval`` steps the ranks average exactly, and step from where they were at the last
    average along the slow momentum ``u = momentum * u + (x_old - average) / lr``, to ``x_old -
    outer_lr * lr * u``, with the ``lr`` of the optimizer's first parameter group.

    Args:
        inner: ``SGP(...)`` or ``DPSGD(...)``; None: no communication between averages.
        interval: steps between two averages.
        momentum: about 0.2 for 4 ranks, 0.5 for 8, 0.6 for 16.
        outer_lr: 1 takes the average itself where the momentum is 0.
        reset_momentum: zero SGD's momentum buffers at each average, as the paper does; Adam's
            moments are kept either way.
    """

    inner: Algorithm | None
    interval: int
    momentum: float = 0.5
    outer_lr: float = 1.0
    reset_momentum: bool = True

    def __post_init__(self) -> None:
        check_interval(self.interval)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr must be positive, got {self.outer_lr}")

    def facts(self) -> list[tuple[str, str]]:
        """The algorithm with its options, then what the inner one compares."""
        return [("algorithm", repr(self)), *(self.inner.facts() if self.inner else [])]

    def problem(self, num_ranks: int) -> str | None:
        """What the inner algorithm finds."""
        return self.inner.problem(num_ranks) if self.inner else None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin with the inner algorithm, from parameters equal on all ranks."""
        rounds: Rounds = LocalRounds(buckets)
        if self.inner:
            inner = self.inner.start(module, optimizer, buckets, process_group)
            rounds = rounds_alone(inner, self.inner)
        outer = _SlowMomentum(self, optimizer, buckets.buffers)
        return _start(module, rounds, outer, self.interval, buckets, process_group)


class _SlowMomentum:
    def __init__(self, options: SlowMo, optimizer: Optimizer, buffers: Sequence[Tensor]) -> None:
        self._options = options
        self._optimizer: Any = weakref.proxy(optimizer)  # its hooks hold the trainer
        self._before = [buffer.float().clone() for buffer in buffers]
        self._slow = [torch.zeros_like(before) for before in self._before]

    @torch.no_grad()
    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Step along the slow momentum."""
        lr = self._optimizer.param_groups[0]["lr"]
        for buffer, before, slow in zip(buffers, self._before, self._slow, strict=True):
            slow.mul_(self._options.momentum).add_((before - buffer.float()) / lr)
            before.sub_(slow * (self._options.outer_lr * lr))
            buffer.copy_(before)
        if self._options.reset_momentum:
            for state in self._optimizer.state.values():
                if torch.is_tensor(state.get("momentum_buffer")):
                    state["momentum_buffer"].zero_()


def _nesterov(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class DiLoCo:
    """Hundreds of local steps, then one of an outer optimizer (Douillard et al., arXiv 2311.08105).

    The outer gradient is where all were after the last outer step minus the average of where they
    have come since. Each rank holds the outer optimizer's state, equal on all.

    Args:
        interval: local steps between two outer ones.
        outer_optimizer: makes any torch optimizer from a list of tensors; default: the paper's, SGD
            with Nesterov momentum 0.9 and learning rate 0.7.
    """

    interval: int = 500
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(default=_nesterov, repr=False)

    def __post_init__(self) -> None:
        check_interval(self.interval)

    def facts(self) -> list[tuple[str, str]]:
        """The algorithm, and the outer optimizer as torch prints it."""
        outer = self.outer_optimizer([torch.zeros(1, requires_grad=True)])
        return [("algorithm", repr(self)), ("outer optimizer", repr(outer))]

    def problem(self, num_ranks: int) -> str | None:
        """None: it runs on any number of ranks."""
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin without communication, from parameters equal on all ranks."""
        rounds, outer = LocalRounds(buckets), _OuterOptimizer(self.outer_optimizer, buckets.buffers)
        return _start(module, rounds, outer, self.interval, buckets, process_group)


class _OuterOptimizer:
    def __init__(self, make: Callable[[list[Tensor]], Optimizer], buffers: Sequence[Tensor]):
        self._anchors = [buffer.float().clone().requires_grad_() for buffer in buffers]
        self._optimizer: Any = make(list(self._anchors))

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Step against the way the average has come."""
        for anchor, buffer in zip(self._anchors, buffers, strict=True):
            anchor.grad = anchor.detach() - buffer.float()
        self._optimizer.step()
        for anchor, buffer in zip(self._anchors, buffers, strict=True):
            anchor.grad = None
            buffer.copy_(anchor.detach())


def check_interval(interval: int) -> None:
    """Refuse what is not a positive number of steps."""
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval must be a positive number of steps, got {interval!r}")


def _start(
    module: nn.Module,
    inner: Rounds,
    outer: Outer,
    interval: int,
    buckets: FlatBuckets,
    process_group: ProcessGroup | None,
) -> GossipSession:
    rounds = PeriodicRounds(inner, outer, interval, buckets, process_group)
    return GossipSession(module, rounds, process_group)
