"""Files of each rank, beside the checkpoint that a host writes on its main process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm import check_consistent_across_ranks
from ..training import check_on_all_ranks


def rank_file(prefix: str, rank: int | None = None) -> str:
    """Return the name of a rank's file, such as "last.ckpt.rank-0-of-4"; None: of this rank."""
    return f"{prefix}.rank-{dist.get_rank() if rank is None else rank}-of-{dist.get_world_size()}"


def load_rank_file(prefix: str) -> Any:
    """Return what this rank's file holds; all ranks call it together, and raise if one lacks it."""
    path = Path(rank_file(prefix))

    def read() -> Any:
        if not path.exists():
            found = sorted(each.name for each in path.parent.glob(f"{Path(prefix).name}.rank-*"))
            raise ValueError(
                f"the checkpoint must hold {path.name}: a run resumes with as many ranks as it was "
                f"saved with; got {', '.join(found) or 'no such file'} in {path.parent}"
            )
        return torch.load(path, map_location="cpu")

    return load_on_all_ranks(read)


def load_on_all_ranks(load: Callable[[], Any]) -> Any:
    """Return what a function reads; all ranks call it together, and raise if it has on one."""
    loaded = []

    def read() -> list[tuple[str, str]]:
        loaded.append(load())
        return []

    check_on_all_ranks(read, check_consistent_across_ranks)
    return loaded[0]
