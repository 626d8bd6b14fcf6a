"""``join()``: a rank without batches takes part in the rounds of those that still train."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from typing_extensions import override

from ..comm import Collectives, Run
from ..training import ModelAverager

_NOTIFYING = "the all-reduce of join() before a step failed"
_TELL = "_check_global_requires_backward_grad_sync"  # of DistributedDataParallel
joining: list[Joinable] = []
"""What is inside its ``join()`` in this process."""


class JoinedRounds(Joinable):
    """What a trainer's rank does in ``join()``, with batches and without.

    Before a round, a rank with batches takes part in an all-reduce, by which those without learn of
    it; they then take the round too, and their counts are not compared. A second one tells them
    that it is no round: one such as ``consensus()``, in which they cannot take part.
    """

    def __init__(self, averager: ModelAverager, run: Run) -> None:
        super().__init__()
        self._averager, self._run = averager, run
        self._work: dist.Work | None = None  # of ranks that step at their own pace

    @contextmanager
    def join(self, *, enable: bool, throw_on_early_termination: bool) -> Iterator[None]:
        """Return the context for unequal numbers of batches."""
        if enable and joining:
            raise RuntimeError(
                "join() must be of one trainer at a time, got one inside that of another: a rank "
                "without batches would take the rounds of one of them only, and the others wait "
                "for it; give all ranks equally many batches, such as by drop_last=True"
            )
        if enable and not self._averager.traits.has_fixed_ranks:
            raise ValueError(
                "join() must not be used with membership, where every rank has its own number of "
                "steps; call leave() after the last batch"
            )
        if enable and not self._averager.traits.can_join:
            raise ValueError(
                "join() must be with an algorithm of rounds, got one whose ranks step at their own "
                "pace and wait for each other: let a rank that has no batches left call flush()"
            )
        joinable = self._averager.joinable or self
        before = joinable._join_config
        joining.extend([joinable] * enable)
        try:
            with (
                self._run.raising("a collective of join() failed"),
                Join([joinable], enable, throw_on_early_termination),
            ):
                yield
        finally:
            joining.clear()
            joinable._join_config = before  # Join leaves its own: every later step would notify
            if enable:
                self._run.counts.reset()  # ranks have taken different numbers of steps

    def before_forward(self) -> None:
        """Raise on all ranks if one has no batches, where all must have as many.

        Here, before another rank could block in backward.
        """
        synchronizes = torch.is_grad_enabled() and self._run.counts.synchronizes
        if synchronizes and self._notify(self) is not None:
            self._raise_if_uneven(calls=False, ran_out=False)

    def before_call(self) -> None:
        """Raise on all ranks if one has no batches, before what all ranks must call together."""
        replica = self._averager.joinable
        if replica is None:
            if self._notify(self) is not None:
                self._raise_if_uneven(calls=True, ran_out=False)
        elif (work := self._notify(replica)) is not None:
            num_without = self._run.size - int(work.result()[0])
            if num_without:
                getattr(replica, _TELL)(is_joined_rank=True)  # that no gradients are averaged now
                raise _call_error(num_without)

    def before_round(self) -> None:
        """Wait until the ranks without batches are about to take this round.

        Ranks that step at their own pace do not wait: they start the next all-reduce once the last
        one has completed. A rank without batches may reply each time the slowest has taken a step.
        """
        traits = self._averager.traits
        if traits.has_equal_batches:  # before_forward has notified
            return
        if traits.has_equal_steps:
            if self._notify(self) is not None:
                self._tell(calls=False, ran_out=False)
        elif self._work is None or self._work.is_completed():
            with self._run.raising(_NOTIFYING):
                self._work = Join.notify_join_context(self)

    def shadow_round(self) -> None:
        """Take the round of a step of the others, or raise on all ranks."""
        if self._averager.traits.has_equal_steps:
            self._raise_if_uneven(calls=False, ran_out=True)
        with self._run.counts.not_compared():
            self._averager.before_step()
            self._averager.after_step()

    def close(self) -> None:
        """Drop an all-reduce in flight: its handle would keep the process group's threads alive."""
        self._work = None

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ShadowRounds(self)

    @property
    @override
    def join_device(self) -> torch.device:
        return self._averager.buffers[0].device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._run.group or dist.group.WORLD

    def end(self) -> None:
        """Let all ranks, which end the context together, count from 0 again."""
        self._run.counts.reset()

    def _notify(self, joinable: Joinable) -> dist.Work | None:
        """Wait for the all-reduce of the ranks with batches, in ``join()``, and return it."""
        with self._run.raising(_NOTIFYING):
            work: dist.Work | None = Join.notify_join_context(joinable)
            if work is not None:
                with self._run.waiting(self._run.stats):
                    work.wait()
        return work

    def _tell(self, *, calls: bool, ran_out: bool) -> Tensor:
        """Return how many ranks call what is no round, and how many have no batches."""
        numbers = torch.tensor([calls, ran_out], dtype=torch.float32, device=self.join_device)
        Collectives(self._run).all_reduce_(numbers)
        return numbers

    def _raise_if_uneven(self, *, calls: bool, ran_out: bool) -> None:
        num_calls, num_without = map(int, self._tell(calls=calls, ran_out=ran_out).tolist())
        if not num_without:
            return
        if self._averager.traits.has_equal_batches:
            raise ValueError(
                "join() must be given equal numbers of batches on all ranks with Hierarchical, got "
                f"{num_without} without any while others still train: a rank without batches "
                "cannot contribute its shard; drop the last batches of the others"
            )
        if num_calls:
            raise _call_error(num_without)


def _call_error(num_without: int) -> ValueError:
    return ValueError(
        "consensus(), consensus_distance(), flush() and states must be called inside join() only "
        f"while all ranks have batches, got {num_without} without any, which take part in rounds "
        "alone; call it after the `with` block"
    )


class _ShadowRounds(JoinHook):
    def __init__(self, joined: JoinedRounds) -> None:
        self._joined = joined

    @override
    def main_hook(self) -> None:
        self._joined.shadow_round()

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        self._joined.end()
