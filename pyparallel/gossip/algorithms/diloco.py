"""Distributed low-communication training: an outer optimizer over hundreds of local steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...comm import FlatBuckets
from .periodic import LocalRounds, check_interval, copy_all, start_periodically
from .rounds import GossipSession


def _nesterov(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class DiLoCo:
    """Hundreds of local steps, then one of an outer optimizer (Douillard et al., arXiv 2311.08105).

    The outer gradient is where all were after the last outer step minus the average of where they
    have come since. Each rank holds the outer optimizer's state, equal on all.

    Args:
        interval: local steps between two outer ones.
        outer_optimizer: makes any torch optimizer from a list of tensors; default: the paper's, SGD
            with Nesterov momentum 0.9 and learning rate 0.7.
    """

    interval: int = 500
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(default=_nesterov, repr=False)

    def __post_init__(self) -> None:
        check_interval(self.interval)

    def config_fields(self) -> list[tuple[str, str]]:
        """The algorithm, and the outer optimizer as torch prints it."""
        outer = self.outer_optimizer([torch.zeros(1, requires_grad=True)])
        return [("algorithm", repr(self)), ("outer optimizer", repr(outer))]

    def validation_error(self, num_ranks: int) -> str | None:
        """None: it runs on any number of ranks."""
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin without communication, from parameters equal on all ranks."""
        rounds, outer = LocalRounds(buckets), _OuterOptimizer(self.outer_optimizer, buckets.buffers)
        return start_periodically(module, rounds, outer, self.interval, buckets, process_group)


class _OuterOptimizer:
    def __init__(self, make: Callable[[list[Tensor]], Optimizer], buffers: Sequence[Tensor]):
        self._anchors = [buffer.float().clone().requires_grad_() for buffer in buffers]
        self._optimizer: Any = make(list(self._anchors))

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Step against the way the average has come."""
        for anchor, buffer in zip(self._anchors, buffers, strict=True):
            anchor.grad = anchor.detach() - buffer.float()
        self._optimizer.step()
        for anchor, buffer in zip(self._anchors, buffers, strict=True):
            anchor.grad = None
            buffer.copy_(anchor.detach())

    def state_dict(self) -> dict[str, Any]:
        """Where the last outer step has come to, and its optimizer; equal on all ranks."""
        anchors = [anchor.detach() for anchor in self._anchors]
        return {"anchors": anchors, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        copy_all([anchor.detach() for anchor in self._anchors], state["anchors"])
        self._optimizer.load_state_dict(state["optimizer"])

    def restart(self, buffers: Sequence[Tensor]) -> None:
        """From there, with an optimizer that has taken no step."""
        copy_all([anchor.detach() for anchor in self._anchors], buffers)
        self._optimizer.state.clear()
