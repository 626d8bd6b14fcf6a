"""Files of each rank, beside the checkpoint that a host writes on its main process."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..comm import check_consistent_across_ranks, check_on_all_ranks


def rank_file(prefix: str) -> str:
    """Return the name of this rank's file, such as "last.ckpt.rank-0-of-4"."""
    return f"{prefix}.rank-{dist.get_rank()}-of-{dist.get_world_size()}"


def load_on_all_ranks(load: Callable[[], Any]) -> Any:
    """Return what a function reads; all ranks call it together.

    Raises:
        DisagreementError: (a ValueError) on all ranks alike: the function has raised on one.
    """
    loaded = []

    def read() -> list[tuple[str, str]]:
        loaded.append(load())
        return []

    check_on_all_ranks(read, check_consistent_across_ranks)
    return loaded[0]
