"""Errors of communication between ranks, and the places that they name."""

from typing import TypeVar

Error = TypeVar("Error", bound=RuntimeError)


class PeerError(RuntimeError):
    """Communication failed; names the rank, the step and what failed.

    Attributes:
        failed: the global ranks that were found to have failed.
        how: what they did, such as "died, or ended without this call": the same on all ranks.
    """

    failed: tuple[int, ...] = ()
    how = ""


class RemoteError(RuntimeError):
    """An error on another rank; the message is that rank's own."""


class NonFiniteError(RuntimeError):
    """A gradient with a nan or an inf; names the rank and, where it is known, the parameter."""


def without_traceback(error: Error) -> Error:
    """Return a copy to be raised later, without the frames that hold a trainer and its groups."""
    return type(error)(*error.args)


def place_of(rank: int, step: int | None, trainer: int | None = None) -> str:
    """Return "rank 0, trainer 1, step 12", without a trainer or a step that is None."""
    parts = {"rank": rank, "trainer": trainer, "step": step}
    return ", ".join(f"{name} {number}" for name, number in parts.items() if number is not None)
