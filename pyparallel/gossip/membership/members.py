"""What the members of an epoch train with: the part of an algorithm that a change concerns."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import gather_json
from ...training import Algorithm, FlatBuckets, ModelAverager, Place
from ...training.arguments import raise_problem
from ..messages import NeighborExchange
from ..topology import Neighbors
from .decision import Epoch

_Algorithm = TypeVar("_Algorithm", bound=Algorithm)


class Shares(NamedTuple):
    """Of all push-sum mass before a change, in [0, 1): lost with members, returned to this one."""

    lost: float = 0.0
    returned: float = 0.0


class MembersAverager(ModelAverager):
    """An algorithm of the members of an epoch, in whose group it communicates."""

    is_interrupted = False
    """Whether what a change has interrupted is done again in the next epoch."""

    def __init__(self, buckets: FlatBuckets, module: nn.Module, run: Any) -> None:
        super().__init__(buckets.buffers, run)
        self._trainable = {id(parameter) for parameter in buckets.parameters}
        self._module = module

    @property
    def others(self) -> list[Tensor]:
        """The frozen parameters and buffers of now, which a member that joins receives."""
        found = self._module.parameters()
        return [*(p for p in found if id(p) not in self._trainable), *self._module.buffers()]

    @abstractmethod
    def begin(self, epoch: Epoch, identity: str) -> Shares:
        """Agree with all members of an epoch, in its group, on what each has, and fill new ones."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what this rank has had as a member: the others have gone on without it."""

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        """Take the fused optimizer's step; what comes before and after is called apart."""
        for index in range(num_buckets):
            step_bucket(index)

    def count_step(self) -> None:
        """Count a step of the optimizer, once; ``after_step`` may be called again for it."""

    def release(self) -> None:
        """Release what keeps the connections of the group, which is about to end."""


def bind(algorithm: _Algorithm, num_ranks: int) -> _Algorithm:
    """Return the algorithm for a number of members; a ValueError if it cannot run on them."""
    bound = algorithm.bind(num_ranks)
    raise_problem(bound.error_at(Place(num_ranks, has_members=True)))
    return bound


def gather_from_members(value: Any, members: Sequence[str]) -> dict[str, Any]:
    """Return what all members of the default group have passed, of JSON's types, by member.

    All call this together. An error is torch's own, which ends an epoch and not the run.
    """
    return dict(zip(members, gather_json(value, None, "states", None), strict=True))


@torch.no_grad()
def copy_tensors(
    exchange: NeighborExchange, tensors: Sequence[Tensor], neighbors: Neighbors
) -> None:
    """Copy tensors, as they are, from the member that fills this one, or to those it fills."""
    live = [each.detach() for each in tensors if each.numel()]
    if not live or not (neighbors.out_peers or neighbors.in_peers):
        return
    sent = [each.contiguous() for each in live]
    into = [[torch.empty_like(each) for each in sent] for _ in neighbors.in_peers]
    message = sent if neighbors.out_peers else []
    found = exchange.swap(message, neighbors.out_peers, neighbors.in_peers, into=into).wait()
    for received in found.messages:
        for tensor, each in zip(live, received, strict=True):
            tensor.copy_(each)
