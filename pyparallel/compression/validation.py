"""Corrupt messages: all ranks raise the same error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..comm.collectives import Collectives


class CorruptMessageError(RuntimeError):
    """A message that no compressor can have made; names the rank that sent it."""


@contextmanager
def refusing_corrupt() -> Iterator[None]:
    """Turn errors that ops raise for a message's values or shape into CorruptMessageError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CorruptMessageError(str(error).splitlines()[0]) from error


@contextmanager
def naming_the_sender(sender: int) -> Iterator[None]:
    """Add the sender to a CorruptMessageError, when all ranks read the same message."""
    try:
        yield
    except CorruptMessageError as error:
        raise _refusal(sender, f" ({error})") from error


def raise_if_any_corrupt(culprit: int | None, collectives: Collectives) -> None:
    """Raise on all ranks if any has received a corrupt message. All ranks must call it.

    Args:
        culprit: the rank whose message this rank could not decode, or None.
        collectives: the collectives of the process group.

    Raises:
        CorruptMessageError: some rank received a corrupt message.
    """
    verdict = torch.tensor([-1 if culprit is None else culprit])
    for (sender,) in collectives.all_gather(verdict).tolist():
        if sender >= 0:
            raise _refusal(sender, "")


def _refusal(sender: int, detail: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"messages must be made by their compressor, got a corrupt one from rank {sender}"
        f"{detail}: discard this step's gradients"
    )
