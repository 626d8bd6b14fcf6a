"""Rounds of communication around the optimizer's steps, and the session that runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from typing_extensions import override


class Rounds(Protocol):
    """The communication of an algorithm around the optimizer's steps.

    A step is ``begin``, ``enter_update``, the optimizer's own step, ``leave_update``, ``end``. A
    rank without batches only takes ``begin`` and ``end``.
    """

    @property
    def weight(self) -> Tensor:
        """Push-sum weight of the rank, 0-d float64; 1 for rounds without one."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""

    def closure_error(self) -> str | None:
        """Return why the optimizer's step must not take a closure, or None."""

    def restore_debiased(self) -> None:
        """Restore de-biased parameters after an interrupted update."""

    def begin(self) -> None:
        """Receive and merge the messages that are due before the next update."""

    def enter_update(self) -> None:
        """Turn the parameters into what the optimizer steps on, such as the numerator."""

    def leave_update(self) -> None:
        """Turn them back into what the module computes with."""

    def end(self) -> None:
        """Send, or average, after an update."""

    def flush(self) -> None:
        """Complete all communication in flight."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return buffers and weight with messages in flight merged; change nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state beyond parameters and optimizer that a bitwise equal resume needs.

        Called by all ranks together; changes nothing. Consists of numbers, tensors (which may be
        the live ones), and dicts and lists of them.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned; called by all ranks together."""

    def restart(self) -> None:
        """Reset all state: the parameters of all ranks have been overwritten.

        Called by all ranks together, right after ``flush`` and the overwriting.
        """


class GossipSession(Joinable):
    """A session that runs rounds around the optimizer's steps, or alone without batches."""

    def __init__(self, module: nn.Module, rounds: Rounds, group: ProcessGroup | None) -> None:
        super().__init__()
        self._module = module
        self.rounds = rounds
        self._group = group
        self._postponed = False

    @property
    def weight(self) -> Tensor:
        """Push-sum weight of the rank, 0-d float64."""
        return self.rounds.weight

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.rounds.bytes_sent

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, which holds the de-biased parameters."""
        self.rounds.restore_debiased()
        return self._module(*inputs, **kwargs)

    def restore_debiased(self) -> None:
        """Restore de-biased parameters after an exception inside the optimizer's step."""
        self.rounds.restore_debiased()

    def before_step(self, *, has_closure: bool) -> None:
        """Merge the messages that are due, and enter the update."""
        error_text = self.rounds.closure_error() if has_closure else None
        if error_text:
            raise ValueError(error_text)
        self.rounds.restore_debiased()
        self.rounds.begin()
        self.rounds.enter_update()

    def after_step(self) -> None:
        """Leave the update and communicate, except inside ``no_sync``."""
        self.rounds.leave_update()
        if not self._postponed:
            self._notify_joined_ranks()
            self.rounds.end()

    def shadow_step(self) -> None:
        """Take the rounds of a step without the step, for a rank without batches."""
        self.rounds.begin()
        self.rounds.end()

    def flush(self) -> None:
        """Complete all communication in flight."""
        self.rounds.restore_debiased()
        self.rounds.flush()

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return buffers and weight with messages in flight merged; change nothing."""
        self.rounds.restore_debiased()
        return self.rounds.as_merged()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rounds, after waiting for messages in flight."""
        self.rounds.restore_debiased()
        return self.rounds.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned."""
        self.rounds.restore_debiased()
        self.rounds.load_state_dict(state)

    def restart(self) -> None:
        """Reset all state: the parameters of all ranks have been overwritten."""
        self.rounds.restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip communication in steps inside; the first step outside communicates."""
        before, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = before

    def close(self) -> None:
        """Do nothing: process groups are only referenced from Python."""

    @property
    def joinable(self) -> Joinable:
        """The session itself: a rank without batches continues to take rounds."""
        return self

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that shadows the rounds of the ranks that still train."""
        return _ShadowRounds(self)

    @property
    @override
    def join_device(self) -> torch.device:
        return self.weight.device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._group or dist.group.WORLD

    def _notify_joined_ranks(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()


class _ShadowRounds(JoinHook):
    def __init__(self, session: GossipSession) -> None:
        self._session = session

    @override
    def main_hook(self) -> None:
        self._session.shadow_step()


def inner_rounds(session: object, inner: object) -> Rounds:
    """Return the rounds of an inner algorithm's session, for another session to run.

    Raises:
        ValueError: the session is not a plain `GossipSession`, so running its rounds alone would
            skip a part of the algorithm.
    """
    if not isinstance(session, GossipSession) or type(session) is not GossipSession:
        raise ValueError(f"inner must be a gossip algorithm, got {inner}")
    return session.rounds
