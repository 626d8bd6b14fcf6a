"""Errors of communication between ranks."""


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
) -> PeerError:
    """Return the error of communication that ended because of another rank.

    Args:
        rank: global rank of this process.
        step: the step in which it happened; None outside of steps.
        what: what happened, such as "the all-reduce failed".
        error: torch's error.
        suspect: the rank or ranks to look at.
        otherwise: what else they may have done, such as "took fewer steps".
    """
    place = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    return PeerError(
        f"{place}: {what}: {suspect} died or did not respond within the process group's timeout"
        + (f", or {otherwise}" if otherwise else "")
        + f" ({str(error).splitlines()[0]})"
    )
