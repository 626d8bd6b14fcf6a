"""Errors of communication between ranks, and the places that they name."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

Error = TypeVar("Error", bound=RuntimeError)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_BETWEEN = ("cli", "integrations", __name__.partition(".")[2])  # modules that users do not call
SAME_CALLS = "all ranks must make the same calls"
_STEPS = ("step", "forward", "backward")  # methods that a training loop calls for each batch


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


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5" for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def find_call(frame: FrameType | None = None) -> str:
    """Return the user's call that has led to a frame, None: of the caller, such as "flush()".

    It is "step" in a forward, a backward and ``optimizer.step()``. Read from the stack, it costs
    nothing before it is needed.
    """
    frame, call = frame or sys._getframe(1), "step"
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        if package == "pyparallel" and not module.startswith(_BETWEEN):
            call = frame.f_code.co_name
            if call == "__init__":
                call = type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return "step" if call in _STEPS or call.startswith(("_", "<")) else f"{call}()"


def compare_calls(calls: Mapping[int, str]) -> str:
    """Return what ranks that wait for each other call, by rank, and the fix if it differs."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks_of.setdefault(calls[rank], []).append(rank)
    if len(ranks_of) == 1:
        waits = "wait for each other" if len(calls) > 1 else "waits"
        return f"{name_ranks(sorted(calls))} {waits} in {min(ranks_of)}"
    got = ", ".join(f"{call} on {name_ranks(ranks)}" for call, ranks in ranks_of.items())
    return (
        f"{SAME_CALLS}, got {got}; for unequal numbers of batches gossip and "
        "DistributedDataParallel have join()"
    )


def concise(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have a user's call raise errors of this package's types without the frames inside of it.

    Their text says what the user has to change; an error of another type is a bug, or the user's
    own, and stays whole.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not _is_own(error):
                raise
            raise error.with_traceback(None) from _cause_of(error)

    return call


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("pyparallel")


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the cause that a traceback is to show: nothing that the error's text has quoted."""
    cause = error.__cause__
    if cause is None or isinstance(error, (PeerError, NonFiniteError)):
        return None
    if _is_own(cause) and str(cause) in str(error):
        return None
    cause.__cause__ = _cause_of(cause)
    return cause.with_traceback(None if _is_own(cause) else _users_part(cause.__traceback__))


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame outside of this package and torch, if it has one."""
    part = traceback
    while part is not None:
        package, _, _ = part.tb_frame.f_globals.get("__name__", "").partition(".")
        if package not in ("pyparallel", "torch"):
            return part
        part = part.tb_next
    return traceback
