"""The interface of an algorithm: an immutable configuration that starts a ModelAverager."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..._deprecated import adopt_old_methods
from ...comm import FlatBuckets, ModelAverager, has_methods, wrong_type
from ..topology import Topology


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


def find_algorithm_error(algorithm: object, name: str = "algorithm") -> TypeError | None:
    """Return why an argument is not an algorithm, or None."""
    if has_methods(algorithm, "start", "config_fields", "validation_error"):
        return None
    fix = ""
    if isinstance(algorithm, Topology):
        fix = f"wrap it, SGP({algorithm!r})"
    elif isinstance(algorithm, type) and issubclass(algorithm, Topology):
        fix = f"give it to an algorithm, SGP({algorithm.__name__}(num_ranks))"
    rule = "an object such as SGP(topology.Ring(4))"
    return wrong_type(name, rule, algorithm, fix)


def check_is_algorithm(algorithm: object, name: str) -> None:
    """Raise a TypeError unless an argument, perhaps with the old names of methods, is one."""
    adopt_old_methods("pyparallel.gossip", algorithm)
    if error := find_algorithm_error(algorithm, name):
        raise error


def check_inner(averager: ModelAverager, algorithm: object) -> ModelAverager:
    """Return the averager of an inner algorithm.

    Raises:
        ValueError: the algorithm does more than a wrapping one would forward.
    """
    if not averager.can_be_inner:
        raise ValueError(f"inner must be a gossip algorithm, got {algorithm}")
    return averager
