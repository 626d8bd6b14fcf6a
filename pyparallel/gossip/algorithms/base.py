"""The interface of an algorithm: an immutable configuration that starts a ModelAverager."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, ModelAverager, has_methods, wrong_type
from ..topology import Topology
from ..topology.base import check_topology

TRANSPORT = "transport"  # a config field that is no part of states


class Algorithm(ABC):
    """The immutable configuration of a gossip algorithm; a subclass is a frozen dataclass."""

    @abstractmethod
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> ModelAverager:
        """Start the algorithm on this rank; parameters are equal on all ranks.

        ``optimizer`` is the trainer's, or for several an object with their ``param_groups`` and
        ``state``. Its hooks reference the trainer, so keep only a ``weakref.proxy``. ``buckets``
        are those of the trainable parameters.
        """

    def config_fields(self) -> list[tuple[str, str]]:
        """Return the (name, value) pairs that must be equal on all ranks."""
        return [("algorithm", repr(self))]

    def validation_error(self, num_ranks: int) -> str | None:
        """Return why the algorithm cannot run on ``num_ranks`` ranks, or None."""
        return None


@dataclass(frozen=True)
class OnTopology(Algorithm):
    """An algorithm whose ranks exchange with the neighbors of a topology, for as many ranks."""

    topology: Topology

    def __post_init__(self) -> None:
        check_topology(self.topology)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        # Also by its edges: two custom topologies may have the same repr.
        return [*super().config_fields(), ("topology", self.topology.fingerprint())]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return self.topology.validation_error(num_ranks)


class JoinedOptimizers:
    """What algorithms read of several optimizers: all groups, in order, and all state.

    They are only weakly referenced, as their hooks reference the trainer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers: list[Any] = [weakref.proxy(each) for each in optimizers]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of each optimizer, which are the live ones."""
        return [group for each in self._optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """The state of each parameter, which is the live one."""
        return {p: state for each in self._optimizers for p, state in each.state.items()}


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
    """Raise a TypeError unless an argument is one."""
    if error := find_algorithm_error(algorithm, name):
        raise error


def check_inner(averager: ModelAverager, algorithm: object) -> ModelAverager:
    """Return the averager of an inner algorithm; a ValueError if that does not only gossip."""
    if not averager.traits.can_be_inner:
        raise ValueError(f"inner must be a gossip algorithm, got {algorithm}")
    return averager


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
