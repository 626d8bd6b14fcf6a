"""A flat buffer with its push-sum weight, and the received messages it is averaged with."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.profiling import profiled
from ...training import check_like
from ...training.arguments import require
from ..messages import Round
from ..topology import Neighbors

MASS_TOLERANCE = 1e-6
"""Relative error of a total mass in float64 after any number of rounds, and more."""


class Numerator:
    """Tensors of z on whose numerator x = w * z an optimizer steps: x <- x + update.

    Of an optimizer that reads parameters for their decay alone, the tensors are x meanwhile. Others
    may keep copies of z, so they step on z, and their change of it is that of x.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._before: list[Tensor] = []  # z before a step on z
        self.is_open = False

    @torch.no_grad()
    def begin(self, weight: Tensor, *, keeps_values: bool) -> None:
        """Begin, or go on after ``pause``; do nothing if it has begun.

        ``keeps_values``: the optimizer steps on z, as it was at the first call since ``end``.
        """
        if self.is_open:
            return
        self.is_open = True
        if keeps_values and not self._before:
            self._before = [tensor.clone() for tensor in self._tensors]
        elif keeps_values:
            for each, before in zip(self._tensors, self._before, strict=True):
                each.sub_(before).mul_(weight).add_(before)
        else:
            for each in self._tensors:
                each.mul_(weight)

    @torch.no_grad()
    def pause(self, weight: Tensor) -> None:
        """Turn the tensors into z, of which x is w times; do nothing if they are."""
        if not self.is_open:
            return
        self.is_open = False
        if self._before:
            for each, before in zip(self._tensors, self._before, strict=True):
                each.sub_(before).div_(weight).add_(before)
        else:
            for tensor in self._tensors:
                tensor.div_(weight)

    def end(self) -> None:
        """Forget z from before the step, after ``pause``."""
        self._before = []


class RoundBuffer(ABC):
    """De-biased values z, push-sum weight w, and the messages of one round in flight.

    The numerator x = w * z of the papers exists only while an optimizer steps on it. A subclass
    defines what a message is and how it is sent and received.
    ``values`` are z: flat, of a real dtype, and written in place. After an error what was sent is
    part of z and w again, unless ``takes_back`` is False.
    """

    message_lengths = ""
    """The lengths of messages in bytes, which ranks compare; "": those of the values."""

    def __init__(self, values: Tensor, *, takes_back: bool = True) -> None:
        self.values, self._takes_back = values, takes_back
        self.weight = torch.ones((), dtype=torch.float64, device=values.device)
        self.numerator = Numerator([values])
        self.in_flight = False
        self._round: Round | None = None  # that is not waited for
        self._received_masses = self.weight.new_zeros(0)

    @abstractmethod
    def send(self, neighbors: Neighbors, step: int) -> None:
        """Start a round of the topology: send the messages and subtract their mass from w.

        A PeerError of a neighbor that is known to have failed leaves w unchanged.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait for the messages of the round in flight, if any, without averaging them.

        After a PeerError z and w are as before the round, but other neighbors may have merged what
        this rank sent.
        """

    @property
    @abstractmethod
    def snapshot(self) -> Tensor:
        """The message that was sent last, as its receivers merge it."""

    @abstractmethod
    def take_snapshot(self) -> None:
        """Prepare to send z as it is, unless that has been done."""

    def release(self) -> None:
        """Forget the round in flight, and what receivers have of z; ``snapshot`` stays."""
        self._round, self.in_flight = None, False

    def reset_weight(self) -> None:
        """Set w to 1; called by all ranks together, between rounds."""
        self.weight.fill_(1)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Wait for the round in flight; return the state except z."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, except z; discard the round in flight."""

    def check_state(self, state: dict[str, Any], num_ranks: int, path: str) -> None:
        """Raise a ValueError, with the path, if a state cannot be loaded; change nothing.

        A weight or a mass in flight must be finite, positive and at most ``num_ranks``, which is
        the total mass.
        """
        check_like(state["weight"], self.weight, f"{path}.weight")
        named = [("weight", state["weight"])]
        if (in_flight := state["in_flight"]) is not None:
            masses = in_flight["masses"]
            check_like(masses, self.weight.new_zeros(len(masses)), f"{path}.in_flight.masses")
            named += [("mass in flight", mass) for mass in masses]
        for name, mass in named:
            rule = f"{path}: a {name} must be positive and at most {num_ranks}, the number of ranks"
            require(0 < float(mass) <= num_ranks * (1 + MASS_TOLERANCE), rule, float(mass))

    def _receive(self) -> None:
        if self._round is not None:
            self._received_masses = self._round.wait().masses
            self._round = None  # kept if the wait was interrupted, so that it can be repeated

    @torch.no_grad()
    def merge(self) -> None:
        """Wait for the messages of the round in flight, if any, and average; raises as ``wait``."""
        self.wait()
        if self.in_flight:
            with profiled("pyparallel::gossip_merge"):
                self._average(self.values, self.weight)
            self.in_flight = False

    def step(self, step: Callable[..., None], *, merges: bool, sends: bool) -> None:
        """Step the optimizer on x = w * z without turning z into it.

        ``step`` is ``FusedOptimizer.step_bucket`` of the bucket. If the round in flight ``merges``
        before the update, an error of ``merge`` means that the step has not been taken. ``sends``:
        ``send`` comes next.
        """
        if merges:
            self.merge()
        step(mass=self.weight)

    @torch.no_grad()
    def as_merged(self) -> tuple[Tensor, Tensor]:
        """Return z and w with the round in flight merged; change nothing and raise as ``wait``."""
        self.wait()
        if not self.in_flight:
            return self.values, self.weight
        values, weight = self.values.clone(), self.weight.clone()
        self._average(values, weight)
        return values, weight

    @abstractmethod
    def _average(self, values: Tensor, weight: Tensor) -> None:
        """Do ``mix_`` with the received messages, whose masses were checked when they arrived."""

    def to_numerator(self, *, keeps_values: bool) -> None:
        """Let an optimizer step on x = w * z, as ``Numerator.begin``; ``pause`` turns it into z."""
        self.numerator.begin(self.weight, keeps_values=keeps_values)

    def outgoing_mass(self, shares: tuple[float, ...]) -> Tensor:
        """Return w times each share, (k,) float64; w does not change."""
        return self.weight * _shares_on(self.weight.device, shares)


@functools.lru_cache(maxsize=64)
def _shares_on(device: torch.device, shares: tuple[float, ...]) -> Tensor:
    """Return the shares, (k,) float64; kept, as a copy from the host waits for the device."""
    return torch.tensor(shares, dtype=torch.float64, device=device)


def total_mass(masses: Tensor) -> Tensor:
    """Return the sum of masses, 0-d; without a kernel for one."""
    return masses[0] if len(masses) == 1 else masses.sum()
