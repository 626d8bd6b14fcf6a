"""Loggers that pages show and no test installs: each keeps what it got, and takes nothing else."""

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock


class SummaryWriter:
    """TensorBoard's, of which pages use three methods."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert isinstance(tag, str)
        assert isinstance(scalar_value, float)
        assert isinstance(global_step, int)
        self.scalars[tag, global_step] = scalar_value

    def close(self) -> None:
        assert self.scalars


class Run:
    """A run of W&B."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, data: dict[str, float], step: int) -> None:
        assert all(isinstance(value, float) for value in data.values())
        self.rows[step] = data

    def finish(self) -> None:
        assert self.rows


def init(project: str, group: str, name: str) -> Run:
    assert {type(project), type(group), type(name)} == {str}
    return Run()


def of_loggers(code: str) -> Any:
    """Return a context in which code that imports the loggers can, installed or not."""
    if "import wandb" not in code:
        return nullcontext()
    wandb, tensorboard = ModuleType("wandb"), ModuleType("torch.utils.tensorboard")
    vars(wandb)["init"] = init
    vars(tensorboard)["SummaryWriter"] = SummaryWriter
    return mock.patch.dict(sys.modules, {each.__name__: each for each in (wandb, tensorboard)})
