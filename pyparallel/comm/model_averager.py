"""The interface between a trainer and the algorithm that keeps the replicas of a model together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from typing_extensions import override

from .failures import raising_peer_errors
from .message_header import ANY
from .state_format import check_like
from .step_hook import StepCounts

NOTIFYING = "the all-reduce of join() before a step failed"


class ModelAverager(Joinable):
    """What an algorithm does on a rank to keep the replicas of a model together.

    A trainer calls the methods around each step of the optimizer::

        averager.before_step()  # receive and merge
        averager.before_update()
        optimizer.step()
        averager.after_update()
        averager.after_step()  # send, or average

    ``step_buckets`` is all of that for an optimizer that steps one bucket at a time. A step inside
    ``no_sync()`` omits ``after_step``; a rank without batches in ``join()`` calls
    only ``before_step`` and ``after_step``. Every method has a default, and this class itself never
    communicates: an algorithm overrides what it needs.

    Args:
        buffers: flat buffers that hold the parameters; written in place.
        process_group: the ranks that train together; None: the default group.
    """

    can_be_inner = True
    """Whether a wrapping algorithm may run it; False if it communicates in other ways too."""

    has_equal_steps = True
    """Whether all ranks must take the same steps; False if they average asynchronously."""

    loads_other_buckets = False
    """Whether a saved state loads into buffers that hold the parameters in another order."""

    has_equal_parameters = False
    """Whether all ranks have equal parameters after every step."""

    def __init__(
        self, buffers: Sequence[Tensor], process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.buffers = list(buffers)
        self.process_group = process_group
        self.synchronizes = True
        """False inside ``no_sync()``."""
        self._weight = torch.ones((), dtype=torch.float64, device=self.buffers[0].device)
        self._counts = StepCounts()
        self._bytes_sent, self._waiting_seconds = 0, 0.0

    @property
    def counts(self) -> StepCounts:
        """What the trainer has counted, which it sets: ranks compare it when they communicate."""
        return self._counts

    @counts.setter
    def counts(self, counts: StepCounts) -> None:
        self._counts = counts

    @property
    def weight(self) -> Tensor:
        """Push-sum weight of the rank, 0-d float64; 1 for algorithms without PushSum."""
        return self._weight

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for training so far."""
        return self._bytes_sent

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which the host has waited for other ranks so far; on NCCL streams wait."""
        return self._waiting_seconds

    @property
    def staleness(self) -> int:
        """Steps between the sending and the merging of the messages merged last; 0: none late."""
        return 0

    @property
    def in_flight(self) -> bool:
        """Whether messages are in flight that the next step may receive."""
        return False

    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        """Return what a forward pass calls: the module, or one that communicates in backward."""
        return module

    def record_loss(self, loss: Tensor | float) -> None:
        """Record the loss of a batch; called before ``optimizer.step()``, once or more."""

    def restore_debiased(self) -> None:
        """Restore de-biased parameters after an interrupted update; called before they are read."""

    def before_step(self) -> None:
        """Receive and merge the messages that are due before the next update."""

    def before_update(self) -> None:
        """Turn the parameters into what the optimizer steps on, such as PushSum's numerator."""

    def after_update(self) -> None:
        """Turn them back into what the module computes with."""

    def after_step(self) -> None:
        """Send, or average, after an update."""

    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        """Take a whole step with a fused optimizer, which can mix and send in the same pass.

        Args:
            step_bucket: steps the bucket of an index, ``FusedOptimizer.step_bucket``.
            num_buckets: number of the optimizer's buckets.
        """
        self.before_step()
        self.before_update()
        for index in range(num_buckets):
            step_bucket(index)
        self.after_update()
        if self.synchronizes:
            self.after_step()

    def flush(self) -> None:
        """Complete all communication in flight; called by all ranks together."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return the flat buffers and the weight with messages in flight merged.

        Called by all ranks together; changes nothing. The tensors may be the live ones.
        """
        return self.buffers, self.weight

    def state_dict(self) -> dict[str, Any]:
        """Return all state beyond parameters and optimizer that a bitwise equal resume needs.

        Called by all ranks together; changes nothing. Consists of numbers, tensors (which may be
        the live ones), and dicts and lists of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned; called by all ranks together."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that ``load_state_dict`` can load a state; changes nothing.

        An algorithm whose state may have another structure than its own of now must override it.

        Raises:
            Exception: of any type, if the state is of another structure.
        """
        check_like(state, self.state_dict(), "algorithm")

    def counters_of(self, state: dict[str, Any]) -> dict[str, int]:
        """Return the rounds and steps of a state, by name, that must be equal on all ranks."""
        return {}

    def mass_of(self, state: dict[str, Any]) -> float:
        """Return the push-sum mass in a state, messages in flight included; 1 without PushSum."""
        return 1.0

    def reset(self) -> None:
        """Reset all state: the parameters of all ranks have been overwritten.

        Called by all ranks together, right after ``flush`` and the overwriting.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip communication in steps inside; the first step outside communicates."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def close(self) -> None:
        """Release the process group; nothing else is called afterwards."""

    @property
    def joinable(self) -> Joinable:
        """The object that communicates in ``join()`` once this rank has no batches left."""
        return self

    def notify_joined_ranks(self) -> None:
        """Wait until the ranks without batches are about to shadow this step."""
        with raising_peer_errors(self.process_group, self.counts.steps, NOTIFYING):
            work = Join.notify_join_context(self)
            if work is not None:
                begin = time.perf_counter()
                work.wait()
                self._waiting_seconds += time.perf_counter() - begin

    def shadow_step(self) -> None:
        """Communicate as in a step, for a rank without batches, whose counts are not compared."""
        own, self.counts = self.counts, replace(self.counts, steps=ANY, repeats=ANY, forwards=ANY)
        try:
            self.before_step()
            self.after_step()
        finally:
            self.counts = own

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that shadows the steps of the ranks that still train."""
        return _ShadowSteps(self)

    @property
    @override
    def join_device(self) -> torch.device:
        return self.buffers[0].device

    @property
    @override
    def join_process_group(self) -> Any:
        return self.process_group or dist.group.WORLD


class WrappedAverager(ModelAverager):
    """An algorithm around another one, to which it forwards all that it does not override.

    Args:
        inner: of the wrapped algorithm.
        buffers: flat buffers that hold the parameters; None: those of ``inner``.
        process_group: the ranks that train together; None: the default group.

    Raises:
        ValueError: the inner algorithm cannot be wrapped.
    """

    def __init__(
        self,
        inner: ModelAverager,
        buffers: Sequence[Tensor] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(inner.buffers if buffers is None else buffers, process_group)
        self.inner = inner

    @property
    @override
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    @override
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent + self._bytes_sent

    @property
    @override
    def waiting_seconds(self) -> float:
        return self.inner.waiting_seconds + self._waiting_seconds

    @property
    @override
    def staleness(self) -> int:
        return self.inner.staleness

    @property
    @override
    def in_flight(self) -> bool:
        return self.inner.in_flight

    @property
    @override
    def counts(self) -> StepCounts:
        return self.inner.counts

    @counts.setter
    def counts(self, counts: StepCounts) -> None:
        self.inner.counts = counts

    @override
    def restore_debiased(self) -> None:
        self.inner.restore_debiased()

    @override
    def before_step(self) -> None:
        self.inner.before_step()

    @override
    def before_update(self) -> None:
        self.inner.before_update()

    @override
    def after_update(self) -> None:
        self.inner.after_update()

    @override
    def after_step(self) -> None:
        self.inner.after_step()

    @override
    def flush(self) -> None:
        self.inner.flush()

    @override
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        return self.inner.as_merged()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    @override
    def check_state(self, state: dict[str, Any]) -> None:
        self.inner.check_state(state)

    @override
    def counters_of(self, state: dict[str, Any]) -> dict[str, int]:
        return self.inner.counters_of(state)

    @override
    def mass_of(self, state: dict[str, Any]) -> float:
        return self.inner.mass_of(state)

    @override
    def reset(self) -> None:
        self.inner.reset()


class _ShadowSteps(JoinHook):
    def __init__(self, averager: ModelAverager) -> None:
        self._averager = averager

    @override
    def main_hook(self) -> None:
        self._averager.shadow_step()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        """Let all ranks, which end the context together, count from 0 again."""
        self._averager.counts.reset()
