"""What torchrun tells a rank, by which hosts recognize it."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


@contextmanager
def as_torchrun(rank: int) -> Iterator[None]:
    """Let hosts find the rank's process group as if torchrun had started it, on one machine."""
    size = dist.get_world_size()
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size}
    values |= {"LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "test"}
    values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    forget_accelerate()
    with mock.patch.dict(os.environ, {key: str(each) for key, each in values.items()}):
        yield


def forget_accelerate() -> None:
    """Forget the process group that Accelerate has found in an earlier test."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of rank and other arguments as torchrun would."""

    @functools.wraps(function)
    def run(rank: int, *arguments: Any) -> Any:
        with as_torchrun(rank):
            return function(rank, *arguments)

    return run
