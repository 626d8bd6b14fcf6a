"""The interface of an algorithm: an immutable configuration that starts a ModelAverager."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...comm import FlatBuckets, ModelAverager


class Algorithm(ABC):
    """The immutable configuration of a gossip algorithm; a subclass is a frozen dataclass."""

    @abstractmethod
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> ModelAverager:
        """Start the algorithm on this rank; parameters are equal on all ranks."""

    def config_fields(self) -> list[tuple[str, str]]:
        """Return the (name, value) pairs that must be equal on all ranks."""
        return [("algorithm", repr(self))]

    def validation_error(self, num_ranks: int) -> str | None:
        """Return why the algorithm cannot run on ``num_ranks`` ranks, or None."""
        return None


def check_inner(averager: ModelAverager, algorithm: object) -> ModelAverager:
    """Return the averager of an inner algorithm.

    Raises:
        ValueError: the algorithm does more than a wrapping one would forward.
    """
    if not averager.can_be_inner:
        raise ValueError(f"inner must be a gossip algorithm, got {algorithm}")
    return averager
