"""Local SGD: local steps, with an average over all ranks at an interval."""

from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets, ModelAverager
from .base import Algorithm
from .periodic import PeriodicAverager, check_interval


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Local steps on every rank, and an average of all models every ``interval`` steps.

    Stich (ICLR 2019, arXiv 1805.09767). Optimizer state such as momentum stays local.

    Args:
        interval: number of steps between two averages.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval(self.interval)

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> PeriodicAverager:
        local = ModelAverager(buckets.buffers, process_group)
        return PeriodicAverager(local, self.interval, process_group)
