"""Local SGD: local steps, with an average over all ranks at an interval."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, ModelAverager
from .base import Algorithm
from .periodic import PeriodicAverager, check_interval


def local_sgd(x: Tensor, t: int, interval: int) -> Tensor:
    """Return the models of all n ranks after step t of local SGD, counted from 1.

    Args:
        x: (n, d) x_i - lr * grad F_i(x_i), a row for each rank: its model after its own update.
    """
    if t % interval:
        return x  # x_i <- x_i - lr * grad F_i(x_i)
    return x.mean(0).expand_as(x)  # x_i <- (1/n) sum_j (x_j - lr * grad F_j(x_j))


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Local steps on every rank, and an average of all models every ``interval`` steps.

    Stich (ICLR 2019, arXiv 1805.09767). Optimizer state such as momentum stays local.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval(self.interval)

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PeriodicAverager:
        local = ModelAverager(buckets.buffers, run)
        return PeriodicAverager(local, self.interval, run)
