"""Corrupt messages: all ranks raise the same error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..comm.collectives import Collectives
from ..ops._corrupt import only_counting


class CorruptMessageError(RuntimeError):
    """A received message that cannot be decoded; names the rank that sent it."""


@contextmanager
def refusing_corrupt() -> Iterator[None]:
    """Turn errors that ops raise for a message's values or shape into CorruptMessageError.

    Corrupt entries that a GPU counts raise when the next message is encoded, not here: the ranks
    may be in the middle of a collective, and their number does not name the sender.
    """
    try:
        with only_counting():
            yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CorruptMessageError(str(error).splitlines()[0]) from error


@contextmanager
def with_sender(sender: int) -> Iterator[None]:
    """Add the sender to a CorruptMessageError, when all ranks read the same message."""
    try:
        yield
    except CorruptMessageError as error:
        raise _corrupt_message_error(sender, f" ({error})") from error


def raise_if_any_corrupt(corrupt_sender: int | None, collectives: Collectives) -> None:
    """Raise a CorruptMessageError on all ranks if any could not decode the message of a sender.

    All ranks must call it.
    """
    own = torch.tensor([-1 if corrupt_sender is None else corrupt_sender], device="cpu")
    for (sender,) in collectives.all_gather(own).tolist():
        if sender >= 0:
            raise _corrupt_message_error(sender, "")


def _corrupt_message_error(sender: int, detail: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"messages must be made by their compressor, got a corrupt one from rank {sender}"
        f"{detail}: discard this step's gradients"
    )
