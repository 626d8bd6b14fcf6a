"""Algorithms whose number of ranks changes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, wrong_type
from ..algorithms import SGP, Algorithm
from .averager import ElasticAverager
from .base import Membership

_MOST_CHECKED = 8  # numbers of members for which algorithms are made and compared at the beginning


@dataclass(frozen=True)
class Elastic(Algorithm):
    """An algorithm for whatever members there are.

    Args:
        make: returns the algorithm for a number of members.
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
        return ElasticAverager(self.membership, make, self.config, module, buckets, run)


def make_elastic(algorithm: Any, membership: Any, process_group: object, module: object) -> Elastic:
    """Return the algorithm for members that come and go, or raise this process's error."""
    if process_group is not None:
        raise ValueError("process_group and mesh must be None with membership, which makes groups")
    raise_own(_find_elastic_error(algorithm, membership, module))
    return Elastic(algorithm, membership)


def raise_own(problem: str | TypeError | None) -> None:
    """Raise the error of a process that is not a member yet."""
    if problem is not None:
        raise problem if isinstance(problem, TypeError) else ValueError(problem)


def _find_elastic_error(make: object, membership: object, module: object) -> str | TypeError | None:
    """Return why members cannot come and go with an algorithm and a module, or None."""
    if not isinstance(membership, Membership):
        return wrong_type("membership", "an object such as Lighthouse()", membership)
    example = "lambda num_ranks: SGP(OnePeerExponential(num_ranks))"
    if isinstance(make, Algorithm) or not callable(make):
        return wrong_type(
            "algorithm", f"a function of the number of members with membership, as {example}", make
        )
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
    for num_ranks in range(1, _MOST_CHECKED + 1):
        try:
            _make_checked(make, num_ranks)
        except (ValueError, TypeError) as error:
            return f"algorithm must be made for any number of members, got for {num_ranks}: {error}"
    return None


def _make_checked(make: Callable[[int], object], num_ranks: int) -> SGP:
    """Return the algorithm for a number of members; a ValueError if it cannot run on them."""
    made = make(num_ranks)
    is_plain = isinstance(made, SGP) and made.overlap == 0 and made.compressor is None
    if not isinstance(made, SGP) or not is_plain or made.transport != "process_group":
        raise ValueError(
            "with membership it must be SGP or DPSGD with overlap=0 and without a compressor, as "
            f"all others need all ranks to stay, got {made!r}"
        )
    if problem := made.validation_error(num_ranks):
        raise ValueError(problem)
    return made
