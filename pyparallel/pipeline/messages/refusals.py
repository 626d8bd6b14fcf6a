"""Errors that harm no rank: all raise them, and training goes on with the next batch."""

from collections.abc import Sequence

from ...comm import ArgumentTypeError, DisagreementError, NonFiniteError, PeerError
from .format import Refusal, RefusalKind

_ERRORS = {
    RefusalKind.ARGUMENT: DisagreementError,
    RefusalKind.TYPE: ArgumentTypeError,
    RefusalKind.NOT_FINITE: NonFiniteError,
}


_MOST = 4  # refusals in one sentence


class StepRefusedError(PeerError):
    """The step cannot begin: its first message to this rank is a refusal, or would be one."""

    def __init__(self, refusal: Refusal, sender: int) -> None:
        super().__init__(
            f"rank {sender} must refuse a step in place of its first message, got a refusal in "
            f"place of another: {refusal.text}"
        )
        self.refusal = refusal


def refusal_of(place: str, problem: str | TypeError, cause: Exception | None = None) -> Refusal:
    """Return the refusal of an argument; ``place``: rank and step; ``cause``: what was raised."""
    kind = RefusalKind.TYPE if isinstance(problem, TypeError) else RefusalKind.ARGUMENT
    return Refusal(kind, f"{place}: {problem}", cause)


def error_of_refusals(refusals: Sequence[Refusal]) -> Exception:
    """Return the error to raise for refusals, at least one: of the kind of the first."""
    texts = list(dict.fromkeys(refusal.text for refusal in refusals))
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return _ERRORS[refusals[0].kind]("; ".join(texts[:_MOST]) + more)
