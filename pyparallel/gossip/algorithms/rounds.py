"""What a gossip algorithm is to the trainer on one rank, whatever its rounds are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class Rounds(Protocol):
    """The communication of an algorithm, around steps that someone else takes.

    A step is ``begin``, ``enter_update``, the optimizer's own step, ``leave_update``, ``end``. A
    rank without batches takes ``begin`` and ``end`` alone.
    """

    @property
    def weight(self) -> Tensor:
        """0-d float64: the rank's PushSum mass; 1 for rounds without one."""

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far."""

    def closure_error(self) -> str | None:
        """Why the optimizer's step may not take a closure, as a sentence, or None."""

    def settle(self) -> None:
        """Undo what an interrupted update has left behind."""

    def begin(self) -> None:
        """What must have arrived before the next update."""

    def enter_update(self) -> None:
        """Make the parameters what the optimizer is to step on."""

    def leave_update(self) -> None:
        """Make them what the module computes with again."""

    def end(self) -> None:
        """What leaves, or is averaged, after an update."""

    def flush(self) -> None:
        """End all communication under way."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Buffers and weight with all that travels counted in; changes nothing."""

    def state_dict(self) -> dict[str, Any]:
        """All that going on bit for bit needs beyond parameters and optimizer; changes nothing.

        Called by all ranks together. Numbers, tensors (which may be the live ones), and dicts and
        lists of them.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; called by all ranks together."""

    def restart(self) -> None:
        """Forget the past: somebody else has written the parameters of all ranks.

        Called by all ranks together, right after ``flush`` and the writing.
        """


class GossipSession(Joinable):
    """Runs rounds around the optimizer's steps, and in place of them once batches have run out."""

    def __init__(self, module: nn.Module, rounds: Rounds, group: ProcessGroup | None) -> None:
        super().__init__()
        self._module = module
        self.rounds = rounds
        self._group = group
        self._postponed = False

    @property
    def weight(self) -> Tensor:
        """The rank's mass."""
        return self.rounds.weight

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far."""
        return self.rounds.bytes_sent

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as it is: what it holds are the de-biased parameters."""
        self.rounds.settle()
        return self._module(*inputs, **kwargs)

    def settle(self) -> None:
        """Undo what an exception inside the optimizer's step has left behind."""
        self.rounds.settle()

    def before_step(self, *, has_closure: bool) -> None:
        """Let what is due arrive, and the optimizer find what it is to step on."""
        problem = self.rounds.closure_error() if has_closure else None
        if problem:
            raise ValueError(problem)
        self.rounds.settle()
        self.rounds.begin()
        self.rounds.enter_update()

    def after_step(self) -> None:
        """Communicate, unless that is postponed."""
        self.rounds.leave_update()
        if not self._postponed:
            self._notify_joined_ranks()
            self.rounds.end()

    def shadow_step(self) -> None:
        """The rounds of a step, without the step."""
        self.rounds.begin()
        self.rounds.end()

    def flush(self) -> None:
        """End all communication under way, so that nothing travels any more."""
        self.rounds.settle()
        self.rounds.flush()

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """The buffers and the weight with all that travels counted in; changes nothing."""
        self.rounds.settle()
        return self.rounds.as_merged()

    def state_dict(self) -> dict[str, Any]:
        """That of the rounds; messages under way are waited for and kept."""
        self.rounds.settle()
        return self.rounds.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.rounds.settle()
        self.rounds.load_state_dict(state)

    def restart(self) -> None:
        """Forget the past: somebody else has written the parameters of all ranks."""
        self.rounds.restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the rounds of steps inside to the first step outside."""
        before, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = before

    def close(self) -> None:
        """Nothing: groups are held in Python alone."""

    @property
    def joinable(self) -> Joinable:
        """The session itself: a rank without batches goes on taking rounds."""
        return self

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Shadow the rounds of the ranks that still train."""
        return _TakeRounds(self)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        return self.weight.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that train together."""
        return self._group or dist.group.WORLD

    def _notify_joined_ranks(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()


class _TakeRounds(JoinHook):
    def __init__(self, session: GossipSession) -> None:
        self._session = session

    def main_hook(self) -> None:
        self._session.shadow_step()


def rounds_alone(session: object, inner: object) -> Rounds:
    """The rounds of an inner algorithm's session, for another session to run.

    Raises:
        ValueError: the session does more than run rounds; that would be lost.
    """
    if not isinstance(session, GossipSession) or type(session) is not GossipSession:
        raise ValueError(f"inner must be an algorithm of gossip, got {inner}")
    return session.rounds
