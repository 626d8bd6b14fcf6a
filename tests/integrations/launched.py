"""What torchrun tells a rank, by which hosts recognize it."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of rank and other arguments as torchrun would, on one machine."""

    def run(rank: int, *arguments: Any) -> Any:
        size = dist.get_world_size()
        values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size}
        values |= {"LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "test"}
        values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}
        with mock.patch.dict(os.environ, {key: str(each) for key, each in values.items()}):
            return function(rank, *arguments)

    return run
