"""Waiting for each other, with an error that says what a failure means."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .exchange import PeerError


def meeting_of(process_group: dist.ProcessGroup | None) -> Callable[[], None]:
    """A function that returns once all ranks of the group have called it."""

    def meet() -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=process_group)
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()}: not all ranks came together: one died or was silent for "
                f"the process group's timeout ({str(error).splitlines()[0]})"
            ) from error

    return meet
