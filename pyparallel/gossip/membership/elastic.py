"""Algorithms whose number of ranks changes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import Algorithm, FlatBuckets
from ...training.arguments import check_type, raise_problem
from ..algorithms.base import find_algorithm_error
from ..topology import Topology
from .averager import ElasticAverager
from .base import Membership
from .members import MembersAverager, bind
from .outer_members import OuterStepMembers
from .push_sum_members import PushSumMembers

_ODD = 3  # members: neither an even number nor a power of two, which some topologies need


@dataclass(frozen=True)
class Elastic(Algorithm):
    """An algorithm for whatever members there are.

    Args:
        algorithm: SGP, DPSGD, LocalSGD, DiLoCo or NoLoCo, not bound to a number of ranks.
        membership: tells them.
        config: (name, value) pairs that a member must have; set by the trainer.
    """

    algorithm: Any
    membership: Membership
    config: Sequence[tuple[str, str]] = ()

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        fields = dict(self.algorithm.bind(_ODD).config_fields())
        return [
            ("version of pyparallel", sys.modules[__name__.partition(".")[0]].__version__),
            ("version of torch", torch.__version__),
            *(fields | {"algorithm": repr(self.algorithm)}).items(),
        ]

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> ElasticAverager:
        inner: MembersAverager
        algorithm = self.algorithm
        if algorithm.takes_outer_steps:
            start = partial(bind(algorithm, 1).start, module, optimizer, buckets, run)
            inner = OuterStepMembers(algorithm, start, module, buckets, run)
        else:
            inner = PushSumMembers(algorithm, module, optimizer, buckets, run)
        return ElasticAverager(inner, self.membership, self.config)


def make_elastic(algorithm: Any, membership: Any, process_group: object, module: object) -> Elastic:
    """Return the algorithm for members that come and go, or raise this process's error."""
    if process_group is not None:
        rule = "process_group and mesh must be None with membership"
        raise ValueError(f"{rule}, which makes groups")
    check_type("membership", membership, Membership, "an object such as Lighthouse()")
    raise_problem(find_algorithm_error(algorithm))
    if dist.is_initialized():
        raise ValueError(
            "process groups must be made by the membership, got a default group that is "
            "initialized; leave out init_process_group"
        )
    for name, each in module.named_parameters() if isinstance(module, nn.Module) else ():
        if each.requires_grad and (each.dtype != torch.float32 or not each.is_cpu):
            raise ValueError(
                "parameters must be float32 and on the CPU with membership, whose groups are of "
                f"gloo and whose push-sum weights differ, got {name} of {each.dtype} on "
                f"{each.device}"
            )
    if isinstance(topology := getattr(algorithm, "topology", None), Topology):
        raise ValueError(
            "topology must be a class or left out with membership, as the number of members "
            f"changes, got {topology!r}"
        )
    bind(algorithm, _ODD)
    return Elastic(algorithm, membership)
