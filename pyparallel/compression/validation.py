"""What happens to messages that no compressor can have made: all ranks refuse the step alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..comm.collectives import Collectives


class CorruptMessageError(RuntimeError):
    """A message that no compressor can have made; the sentence names the rank it came from."""


@contextmanager
def refusing_corrupt() -> Iterator[None]:
    """Give what the ops raise for a corrupt message, in values or in shape, its name."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CorruptMessageError(str(error).splitlines()[0]) from error


@contextmanager
def naming_the_sender(sender: int) -> Iterator[None]:
    """Say whose message was corrupt, where all ranks read the same one."""
    try:
        yield
    except CorruptMessageError as error:
        raise _refusal(sender, f" ({error})") from error


def raise_if_any_corrupt(culprit: int | None, collectives: Collectives) -> None:
    """Let all ranks raise the same if one has got a corrupt message; all call it.

    Args:
        culprit: the rank whose message this one could not read; None: it could read all.
        ranks: all of them.

    Raises:
        CorruptMessageError: some rank could not.
    """
    verdict = torch.tensor([-1 if culprit is None else culprit])
    for (sender,) in collectives.all_gather(verdict).tolist():
        if sender >= 0:
            raise _refusal(sender, "")


def _refusal(sender: int, detail: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"messages must be what their compressor makes, got a corrupt one from rank {sender}"
        f"{detail}: this step's gradients are not to be used"
    )
