"""Rounds that all ranks of a sharded replica complete, or none of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ...comm import Collectives, NonFiniteError, PeerError, Run


@contextmanager
def as_one_replica(run: Run) -> Iterator[None]:
    """Raise an error inside on all ranks that hold the replica, whose rounds are then over.

    A NonFiniteError ends no round, and is of all of them.
    """
    if run.replica is None:
        yield
        return
    rounds = ReplicaRounds(run, run.replica)
    try:
        with rounds.round():
            yield
    finally:
        rounds.check()


class ReplicaRounds:
    """Tells all ranks that hold a replica when a round has failed on one of them.

    That travels beside what follows the round, until ``check``, before parameters are gathered.
    """

    def __init__(self, run: Run, replica: Run) -> None:
        self._run, self._replica = run, replica
        self._pending: tuple[Future[Any], Tensor] | None = None

    @contextmanager
    def round(self) -> Iterator[None]:
        """Take a round inside; a NonFiniteError ends none. Raise for the round before it first."""
        self.check()
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        is_over = failure is not None and not isinstance(failure, NonFiniteError)
        failed = torch.zeros(self._replica.size, device="cpu")
        failed[self._replica.group_rank] = is_over
        with suppress(PeerError) if is_over else nullcontext():
            self._pending = Collectives(self._replica).start_all_reduce_(failed), failed
            if is_over:  # the others wait for it, also if this process ends now
                self._wait()
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raise a PeerError if the last round has failed on another rank of the replica."""
        if failed := self._wait():
            raise PeerError(
                f"{self._run.here}: a round must be completed on all ranks that hold the replica, "
                f"got an error on rank {', '.join(map(str, failed))}, which says why; the "
                "replica's parts no longer agree: stop the run and load a checkpoint"
            )

    def close(self) -> None:
        """Wait for what is in flight, without an error."""
        with suppress(PeerError):
            self._wait()

    def _wait(self) -> list[int]:
        """Return the ranks on which the last round has failed, once it is known."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        Collectives(self._replica).finish_all_reduce(pending[0])
        return [self._replica.global_rank(rank) for rank in pending[1].nonzero().flatten().tolist()]
