"""What kinds of algorithms share: a topology, or outer steps at an interval."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...compression import AttachPoint, Compressor
from ...compression.compressor import find_error_at
from ...training import Algorithm, Place, check_like, wrong_type
from ...training.arguments import check_in, check_integer, raise_problem, require
from ...training.consensus import copy_all
from ..messages.averages import Pairs
from ..topology import BaseGraph, OnePeerExponential, Topology
from ..topology.base import check_topology

TRANSPORT = "transport"  # a config field that is no part of states


@dataclass(frozen=True)
class OnTopology(Algorithm):
    """An algorithm whose ranks exchange with the neighbors of a topology."""

    default: ClassVar[type[Topology] | None] = None  # the topology of any number of ranks
    topology: Topology | type[Topology] | None = None

    def __post_init__(self) -> None:
        given = self.topology
        if given is not None and not (isinstance(given, type) and issubclass(given, Topology)):
            check_topology(given)

    def default_topology(self, num_ranks: int) -> Topology:
        """Return the topology for a number of ranks where none is given."""
        best = OnePeerExponential if num_ranks.bit_count() == 1 else BaseGraph
        return (self.default or best)(num_ranks)

    @property
    def bound_topology(self) -> Topology:
        """Return the topology; a ValueError before ``bind``."""
        if isinstance(self.topology, Topology):
            return self.topology
        raise ValueError(f"algorithm must be bound to a number of ranks, got {self!r}; call bind()")

    @override
    def bind(self, num_ranks: int) -> Self:
        given = self.topology
        if isinstance(given, Topology):
            return self
        topology = self.default_topology(num_ranks)
        if given is not None:
            try:
                topology = given(num_ranks)
            except Exception as error:  # as of a user's class, or one that needs a graph
                rule, reason = f"topology must be a class for {num_ranks} ranks", str(error)
                got = f"{given.__name__}: {reason.partition('; ')[0]}"
                raise ValueError(f"{rule}, got {got}; leave it out for {topology!r}") from error
        return replace(self, topology=topology)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        # Also by its edges: two custom topologies may have the same repr.
        return [*super().config_fields(), ("topology", self.bound_topology.fingerprint())]

    @override
    def error_at(self, place: Place) -> str | None:
        if error_text := super().error_at(place):
            return error_text
        topology, num_ranks = self.bound_topology, place.num_ranks
        error_text = topology.validation_error(num_ranks)
        if topology.num_ranks == num_ranks:
            return error_text
        fix = f"leave it out for {self.default_topology(num_ranks)!r}"
        return f"{place.size_rule}{error_text}; {fix}"


@dataclass(frozen=True, repr=False)
class Periodic(Algorithm):
    """Local steps, and an outer step of the model, or of each of its fragments, at an interval.

    Args:
        compressor: of the differences between a rank's weights and those after the last outer step,
            such as ``ErrorFeedback(Int4())``; None: ranks send their weights, ``widened``.
        fragments: how many parts of the model take their outer steps one after the other, evenly
            spread over the interval, so that less is sent at once (Douillard et al., arXiv
            2501.18512): a part has every so many-th layer. Or the names of the modules or
            parameters of each.
        delay: local steps for which what was sent travels, beside them, until the outer step; below
            the interval. 0: ranks wait.
        mix: share of a rank's own weights, in [0, 1), in those from which it goes on after an outer
            step; None: 0, or with a delay 0.5, as otherwise what it learned meanwhile were lost.
    """

    takes_outer_steps = True
    compressor: Compressor | None = field(default=None, kw_only=True)
    fragments: int | Sequence[Sequence[str]] = field(default=1, kw_only=True)
    delay: int = field(default=0, kw_only=True)
    mix: float | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        """Return the options; of those that all outer steps have, the ones that were changed."""
        shown = [each for each in fields(self) if each.repr]
        shown = [e for e in shown if not (e.kw_only and getattr(self, e.name) == e.default)]
        options = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in shown)
        return f"{type(self).__name__}({options})"

    @property
    def share_kept(self) -> float:
        """Return the share of a rank's own weights after an outer step."""
        return (0.5 if self.delay else 0.0) if self.mix is None else self.mix

    @property
    def num_fragments(self) -> int:
        """Return how many parts of the model take outer steps of their own."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def is_at_once(self) -> bool:
        """Whether whole models are averaged while the ranks wait."""
        return self.fragments == 1 and not self.delay

    @property
    @override
    def can_have_members(self) -> bool:
        return self.is_at_once

    def make_rule(
        self, slow: list[Tensor], optimizer: Optimizer, ranks: Collectives
    ) -> "OuterRule":
        """Return the rule of a fragment for its weights, ``widened`` copies; here local SGD's."""
        return OuterRule(slow if self.compressor else ())

    def start_averages(self, run: Run) -> Pairs | None:
        """Return the averages over pairs of a group's ranks; None: averages are over all."""
        return None

    def check_options(self, interval: int) -> None:
        """Raise a ValueError or TypeError for options that do not fit the interval."""
        check_integer("interval", interval, rule="a positive number of steps")
        if self.compressor is not None:
            raise_problem(find_error_at(AttachPoint.OUTER_STEPS, self.compressor))
        if isinstance(self.fragments, int):
            check_integer("fragments", self.fragments)
        count = self.num_fragments
        rule = f"fragments must be from 1 to the {interval} steps of the interval"
        require(1 <= count <= interval, rule, count)
        check_integer("delay", self.delay, 0)
        rule = f"delay must be below the interval of {interval} steps"
        require(self.delay < interval, rule, self.delay)
        check_in("mix", self.share_kept, "[0, 1)")


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is if it has that or a wider dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class OuterRule:
    """The outer step of a fragment; of this class, local SGD's: ranks go on from the average.

    Args:
        slow: weights after the last outer step, ``widened``, one tensor for each span; empty if the
            rule reads none, and nothing is compressed.
    """

    def __init__(self, slow: Sequence[Tensor] = ()) -> None:
        self.slow = list(slow)

    evaluates_slow = False  # instead of the ranks' own weights

    def message(self, weights: list[Tensor]) -> list[Tensor]:
        """Return what is averaged, for this rank's weights, which must not be written."""
        return weights

    def step(self, averages: list[Tensor]) -> list[Tensor]:
        """Take the outer step, equally where averages are equal; return the weights to go on from.

        It writes ``slow``.
        """
        if self.slow:
            copy_all(self.slow, averages)
        return averages

    def take(
        self, averages: list[Tensor], frozen: Sequence[tuple[int, slice, bool]]
    ) -> list[Tensor]:
        """Take ``step``, and leave parameters that are frozen out of it.

        Args:
            frozen: tensor and entries of each, and whether it is ``slow`` on all ranks, which then
                stays; otherwise the average is what is gone on from.
        """
        values = [(self.slow if still else averages)[i][part].clone() for i, part, still in frozen]
        new = self.step(averages)
        for (i, part, _), each in zip(frozen, values, strict=True):
            new[i][part] = each
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be the live ones."""
        return {"slow": self.slow} if self.slow else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        if self.slow:
            copy_all(self.slow, state["slow"])

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Raise any error for a state that ``load_state_dict`` cannot load; change nothing."""
        check_like(state, self.state_dict(), path)

    def reset(self, weights: list[Tensor]) -> None:
        """Start again from these weights."""
        if self.slow:
            copy_all(self.slow, weights)


def find_algorithm_error(algorithm: object, name: str = "algorithm") -> TypeError | None:
    """Return why an argument is not an algorithm, or None."""
    if isinstance(algorithm, Algorithm):
        return None
    fix = ""
    if isinstance(algorithm, Topology):
        fix = f"wrap it, SGP({algorithm!r})"
    elif isinstance(algorithm, type) and issubclass(algorithm, Topology):
        fix = f"give it to an algorithm, SGP({algorithm.__name__})"
    return wrong_type(name, "an object such as SGP()", algorithm, fix)
