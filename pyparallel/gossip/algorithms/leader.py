"""The leader of a process group: its choice by loss, and the pull towards its parameters."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import Collectives


def find_leader(losses: Sequence[float], ranks: Iterable[int]) -> int | None:
    """Return the rank with the lowest finite loss, the lowest rank of equals; None without one."""
    candidates = [rank for rank in ranks if math.isfinite(losses[rank])]
    return min(candidates, key=lambda rank: (losses[rank], rank), default=None)


class MeanLoss:
    """The mean loss over several steps; recording needs no host synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.count = 0

    @torch.no_grad()
    def record(self, loss: Tensor | float) -> None:
        """Add one loss: a number or a tensor of one element."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be one number, got a tensor of shape {list(loss.shape)}")
        value = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
        self.total += value
        self.count += 1

    def mean(self) -> Tensor:
        """Return the mean, 0-d float64 on the device; NaN without losses."""
        return self.total / self.count if self.count else torch.full_like(self.total, math.nan)

    def clear(self) -> None:
        """Drop all recorded losses."""
        self.total.zero_()
        self.count = 0


class Leader:
    """The parameters of the last known leader of a process group, and the pull towards them.

    Args:
        buffers: the rank's parameters, which are pulled.
        pull: fraction of the distance to move when a leader is chosen.
        drift: fraction of the distance to move in every later step.
        collectives: of the ranks it leads.
    """

    def __init__(
        self, buffers: Sequence[Tensor], pull: float, drift: float, collectives: Collectives
    ) -> None:
        self._buffers = buffers
        self._pull = pull
        self._drift = drift
        self._collectives = collectives
        self._parameters: list[Tensor] | None = None

    @torch.no_grad()
    def follow(self, leader: int) -> None:
        """Broadcast the parameters of ``leader``, a rank of the group, and move towards them."""
        if self._parameters is None:
            self._parameters = [torch.empty_like(buffer) for buffer in self._buffers]
        for parameters, buffer in zip(self._parameters, self._buffers, strict=True):
            if leader == self._collectives.rank:
                parameters.copy_(buffer)
            self._collectives.broadcast_(parameters, leader)
        self._interpolate(self._pull)

    def pull(self) -> None:
        """Move towards the last known parameters of the leader."""
        self._interpolate(self._drift)

    @torch.no_grad()
    def _interpolate(self, fraction: float) -> None:
        if self._parameters is None or fraction == 0:  # 0 * (inf - x) would not be 0
            return
        for buffer, parameters in zip(self._buffers, self._parameters, strict=True):
            buffer.lerp_(parameters, fraction)

    def reset(self) -> None:
        """Forget the leader until the next choice."""
        self._parameters = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the leader's parameters, or None before the first choice."""
        known = self._parameters
        return {"parameters": known and [parameters.clone() for parameters in known]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        known = state["parameters"]
        self._parameters = known and [
            saved.to(buffer, copy=True) for saved, buffer in zip(known, self._buffers, strict=True)
        ]
