"""Errors of communication between ranks."""

from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Error = TypeVar("Error", bound=RuntimeError)

_LONGEST_REPORT_SECONDS = 5.0  # that a rank waits for the others' places after its timeout


class PeerError(RuntimeError):
    """Communication failed; names the rank, the step and what failed."""


class RemoteError(RuntimeError):
    """An error on another rank; the message is that rank's own."""


class NonFiniteError(RuntimeError):
    """A gradient with a nan or an inf; names the rank and, where it is known, the parameter."""


def peer_error(
    rank: int,
    step: int | None,
    what: str,
    error: RuntimeError,
    suspect: str = "a rank",
    otherwise: str = "",
    trainer: int | None = None,
) -> PeerError:
    """Return the error of communication that ended because of another rank.

    Args:
        rank: global rank of this process.
        step: the step in which it happened; None outside of steps.
        what: what happened, such as "the all-reduce failed".
        error: torch's error.
        suspect: the rank or ranks to look at.
        otherwise: what else they may have done, such as "took fewer steps".
        trainer: the trainer's number; None if the process has only one.
    """
    return PeerError(
        f"{place_of(rank, step, trainer)}: {what}: {suspect} died or did not respond within the "
        "process group's timeout"
        + (f", or {otherwise}" if otherwise else "")
        + f" ({str(error).splitlines()[0]})"
    )


def without_traceback(error: Error) -> Error:
    """Return a copy of an error, to be raised again later.

    An error that has been raised references the frames it has passed, and so the trainer and its
    process groups, for as long as it is kept.
    """
    return type(error)(*error.args)


def place_of(rank: int, step: int | None, trainer: int | None = None) -> str:
    """Return "rank 0, trainer 1, step 12", without a trainer or a step that is None."""
    parts = {"rank": rank, "trainer": trainer, "step": step}
    return ", ".join(f"{name} {number}" for name, number in parts.items() if number is not None)


def report_places(place: str, rank: int, others: Iterable[int], timeout: timedelta) -> str:
    """Publish where this rank's wait has ended, and return where those of other ranks have.

    Ranks that step two trainers in different orders wait for each other until all have reached the
    timeout, so that each can read the others' places. A rank that has died publishes none.

    Args:
        place: as of ``place_of``.
        rank: global rank of this process.
        others: global ranks of the others.
        timeout: of the wait. The others' places are awaited for a fourth of it, at most 5 s.

    Returns:
        Such as "; waiting likewise: rank 1, trainer 0, step 3"; empty if no other rank waits.
    """
    # A trainer waits, so there is a default group.
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    keys = [f"pyparallel/waiting/{other}" for other in others]
    found = []
    try:
        store.set(f"pyparallel/waiting/{rank}", place)
        seconds = min(timeout.total_seconds() / 4, _LONGEST_REPORT_SECONDS)
        for key in keys:
            try:
                store.wait([key], timedelta(seconds=seconds))
            except RuntimeError:
                seconds = 0.01  # all have had their time
                continue
            found.append(store.get(key).decode())
    except RuntimeError:  # the store is gone too: nothing to add to the error that is raised
        return ""
    return f"; waiting likewise: {'; '.join(found)}" if found else ""
