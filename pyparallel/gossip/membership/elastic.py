"""Algorithms whose number of ranks changes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, wrong_type
from ..algorithms import SGP, Algorithm, DiLoCo, LocalSGD, NoLoCo
from .averager import ElasticAverager
from .base import Membership
from .members import MembersAverager
from .outer_members import OuterStepMembers
from .push_sum_members import PushSumMembers

_MOST_CHECKED = 8  # numbers of members for which algorithms are made and compared at the beginning
_OF_A_NUMBER = (SGP, NoLoCo)  # of members, for which each is made


@dataclass(frozen=True)
class Elastic(Algorithm):
    """An algorithm for whatever members there are.

    Args:
        make: returns the algorithm for a number of members: SGP, DPSGD or NoLoCo, or always the
            same one of outer steps.
        membership: tells them.
        config: (name, value) pairs that a member must have; set by the trainer.
    """

    make: Callable[[int], Algorithm]
    membership: Membership
    config: Sequence[tuple[str, str]] = ()

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [
            ("version of pyparallel", sys.modules[__name__.partition(".")[0]].__version__),
            ("version of torch", torch.__version__),
            *(field for n in range(1, _MOST_CHECKED + 1) for field in self.make(n).config_fields()),
        ]

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> ElasticAverager:
        make = partial(_make_checked, self.make)
        made = make(1)
        inner: MembersAverager
        if isinstance(made, SGP):
            inner = PushSumMembers(make, module, optimizer, buckets, run)
        else:
            start = partial(made.start, module, optimizer, buckets, run)
            inner = OuterStepMembers(make, start, module, buckets, run)
        return ElasticAverager(inner, self.membership, self.config)


def make_elastic(algorithm: Any, membership: Any, process_group: object, module: object) -> Elastic:
    """Return the algorithm for members that come and go, or raise this process's error."""
    if process_group is not None:
        rule = "process_group, mesh and replica_ranks must be None with membership"
        raise ValueError(f"{rule}, which makes groups")
    is_of_all = isinstance(algorithm, Algorithm) and not isinstance(algorithm, _OF_A_NUMBER)
    make = (lambda num_ranks: algorithm) if is_of_all else algorithm
    raise_own(_find_elastic_error(make, membership, module))
    return Elastic(make, membership)


def raise_own(problem: str | TypeError | None) -> None:
    """Raise the error of a process that is not a member yet."""
    if problem is not None:
        raise problem if isinstance(problem, TypeError) else ValueError(problem)


def _find_elastic_error(make: object, membership: object, module: object) -> str | TypeError | None:
    """Return why members cannot come and go with an algorithm and a module, or None."""
    if not isinstance(membership, Membership):
        return wrong_type("membership", "an object such as Lighthouse()", membership)
    if isinstance(make, _OF_A_NUMBER) or not callable(make):
        example = "lambda num_ranks: SGP(OnePeerExponential(num_ranks))"
        rule = f"a function of the number of members with membership, as {example}, or DiLoCo()"
        return wrong_type("algorithm", rule, make)
    if dist.is_initialized():
        return (
            "process groups must be made by the membership, got a default group that is "
            "initialized; leave out init_process_group"
        )
    for name, each in module.named_parameters() if isinstance(module, nn.Module) else ():
        if each.requires_grad and (each.dtype != torch.float32 or not each.is_cpu):
            return (
                "parameters must be float32 and on the CPU with membership, whose groups are of "
                f"gloo and whose push-sum weights differ, got {name} of {each.dtype} on "
                f"{each.device}"
            )
    first: Any = None
    for num_ranks in range(1, _MOST_CHECKED + 1):
        try:
            made = _make_checked(make, num_ranks)
            first = first or made
            are_sgp = isinstance(made, SGP) and isinstance(first, SGP)
            are_pairs = isinstance(made, NoLoCo) and isinstance(first, NoLoCo)
            alike = replace(made, topology=first.topology) if are_pairs else made
            if not are_sgp and alike.config_fields() != first.config_fields():
                raise ValueError(f"all but the topology must be the same for all, got {made!r}")
        except (ValueError, TypeError) as error:
            return f"algorithm must be made for any number of members, got for {num_ranks}: {error}"
    return None


def _make_checked(make: Callable[[int], Any], num_ranks: int) -> Any:
    """Return the algorithm for a number of members; a ValueError if it cannot run on them."""
    made = make(num_ranks)
    is_sgp = isinstance(made, SGP) and made.transport == "process_group"
    if is_sgp or (isinstance(made, NoLoCo) and made.is_at_once):
        if problem := made.validation_error(num_ranks):
            raise ValueError(problem)
        return made
    if isinstance(made, (LocalSGD, DiLoCo)) and made.is_at_once:
        return made
    raise ValueError(
        "with membership it must be SGP or DPSGD over a process group, or LocalSGD, DiLoCo or "
        "NoLoCo of whole models and without delay, as all others need all ranks to stay, got "
        f"{made!r}"
    )
