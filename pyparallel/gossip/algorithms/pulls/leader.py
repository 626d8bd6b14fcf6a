"""The leader of a process group: its choice by loss, and the pull towards its parameters."""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....comm import Collectives
from ....training import FlatBuckets, summarize

# Whether a rank has a mean loss to compare, and why not; all-gathered with it.
_HAS_LOSS, _NO_LOSS_RECORDED, _NO_BATCHES = 0.0, 1.0, 2.0


def find_leader(losses: Sequence[float], ranks: Iterable[int]) -> int | None:
    """Return the rank with the lowest finite loss, the lowest rank of equals; None without one."""
    candidates = [rank for rank in ranks if math.isfinite(losses[rank])]
    return min(candidates, key=lambda rank: (losses[rank], rank), default=None)


def check_losses(
    losses: Sequence[float], statuses: Sequence[float], nodes: Iterable[range], num_steps: int
) -> None:
    """Raise a ValueError if a rank's loss is missing, or none of a node's is finite."""

    def up_to_now(ranks: Sequence[int]) -> str:
        what = "ranks" if len(ranks) > 1 else "rank"
        return f"{what} {', '.join(map(str, ranks))} in the steps up to {num_steps}"

    missing = [rank for rank, status in enumerate(statuses) if status == _NO_LOSS_RECORDED]
    if missing:
        raise ValueError(
            "record_loss(loss) must be called in every step before optimizer.step(), as "
            f"LeaderSGD compares losses, got none from {up_to_now(missing)}"
        )
    for node in nodes:
        reporting = [rank for rank in node if statuses[rank] == _HAS_LOSS]
        if reporting and find_leader(losses, node) is None:
            raise ValueError(
                "losses must be finite on at least one rank of each node, got "
                f"{', '.join(str(losses[rank]) for rank in reporting)} from {up_to_now(reporting)}"
            )


class MeanLoss:
    """The mean loss over several steps; recording needs no host synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.count = 0

    @torch.no_grad()
    def record(self, loss: Tensor | float) -> None:
        """Add one loss: a number or a tensor of one element."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be one number, got {summarize(loss)}")
        value = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
        self.total += value
        self.count += 1

    def mean(self) -> Tensor:
        """Return the mean, 0-d float64 on the device; NaN without losses."""
        return self.total / self.count if self.count else torch.full_like(self.total, math.nan)

    def status(self, *, has_batches: bool) -> float:
        """Return whether there is a mean loss to compare, and why not, for ``check_losses``."""
        if self.count:
            return _HAS_LOSS
        return _NO_LOSS_RECORDED if has_batches else _NO_BATCHES

    def clear(self) -> None:
        """Drop all recorded losses."""
        self.total.zero_()
        self.count = 0


@dataclass
class Leader:
    """The parameters of the last known leader of a process group, and the pull towards them."""

    buffers: Sequence[Tensor]
    collectives: Collectives
    strength: float  # lambda of the paper, which ``PullAtGradient`` scales by the learning rate
    choice_pull: float  # of the authors' code: the fraction to move when a leader is chosen
    drift: float  # of the authors' code: the fraction to move in every later step
    _parameters: list[Tensor] | None = None

    @property
    def pulls_at_gradient(self) -> bool:
        """Whether a leader is known and the paper's pull towards it is not 0."""
        return self._parameters is not None and self.strength > 0

    def pull_of(self, index: int) -> Tensor:
        """Return strength * (leader - x) of a buffer."""
        assert self._parameters is not None
        return (self._parameters[index] - self.buffers[index]).mul_(self.strength)

    @torch.no_grad()
    def follow(self, leader: int) -> None:
        """Broadcast the parameters of ``leader``, a rank of the group, and move towards them."""
        if self._parameters is None:
            self._parameters = [torch.empty_like(buffer) for buffer in self.buffers]
        for parameters, buffer in zip(self._parameters, self.buffers, strict=True):
            if leader == self.collectives.rank:
                parameters.copy_(buffer)
            self.collectives.broadcast_(parameters, leader)
        self._interpolate(self.choice_pull)

    def pull(self) -> None:
        """Move towards the last known parameters of the leader."""
        self._interpolate(self.drift)

    @torch.no_grad()
    def _interpolate(self, fraction: float) -> None:
        if self._parameters is None or fraction == 0:  # 0 * (inf - x) would not be 0
            return
        for buffer, parameters in zip(self.buffers, self._parameters, strict=True):
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
            saved.to(buffer, copy=True) for saved, buffer in zip(known, self.buffers, strict=True)
        ]


class PullAtGradient:
    """The pull of the paper's rule, ``lr * sum(strength * (leader - x))`` at the gradient's x.

    x is the parameters at the beginning of a step. The pull is computed there and added after the
    optimizer's update, which therefore sees x itself: pulling before the update would change weight
    decay, the gradients of a second evaluation of a closure, and LBFGS's line search. That takes a
    further copy of the parameters within a step. The optimizer, whose learning rates are read in
    every step, is only weakly referenced, as its hooks reference the trainer.
    """

    def __init__(self, buckets: FlatBuckets, optimizer: Optimizer) -> None:
        self._buckets = buckets
        self._optimizer: Any = weakref.proxy(optimizer)
        self._spans: list[list[tuple[int, int, int]]] | None = None  # until the first pull
        self._pulls: list[Tensor] | None = None  # None: not yet computed in this step

    def clear(self) -> None:
        """Forget the pull of a step that did not end."""
        self._pulls = None

    @torch.no_grad()
    def compute(self, leaders: Iterable[Leader]) -> None:
        """Compute the step's pull, unless an earlier evaluation of a closure has."""
        if self._pulls is not None:
            return
        known = [leader for leader in leaders if leader.pulls_at_gradient]
        self._pulls = []
        if not known:
            return
        if self._spans is None:
            self._spans = _spans_of_groups(self._buckets, self._optimizer)
        for index, spans in enumerate(self._spans):
            total = known[0].pull_of(index)
            for leader in known[1:]:
                total += leader.pull_of(index)
            for begin, end, group in spans:
                total[begin:end] *= self._optimizer.param_groups[group]["lr"]
            self._pulls.append(total)

    @torch.no_grad()
    def apply(self) -> None:
        """Add the step's pull to the parameters."""
        if self._pulls:
            torch._foreach_add_(self._buckets.buffers, self._pulls)
        self._pulls = None


def _spans_of_groups(
    buckets: FlatBuckets, optimizer: Optimizer
) -> list[list[tuple[int, int, int]]]:
    """Return each buffer's (begin, end, parameter group); padding, which is 0, joins a span."""
    groups = enumerate(optimizer.param_groups)
    group_of = {id(p): index for index, group in groups for p in group["params"]}
    spans: list[list[tuple[int, int, int]]] = [[] for _ in buckets.buffers]
    for parameter, segment in zip(buckets.parameters, buckets.segments, strict=True):
        group, mine = group_of[id(parameter)], spans[segment.bucket]
        begin = segment.offset
        if mine and mine[-1][2] == group:
            begin = mine.pop()[0]
        mine.append((begin, segment.offset + segment.numel, group))
    return spans
