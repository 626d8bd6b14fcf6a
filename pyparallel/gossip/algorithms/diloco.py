"""DiLoCo: an outer optimizer step after hundreds of local steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, ModelAverager, check_like, check_optimizer_state
from .base import Algorithm, copy_all
from .periodic import PeriodicAverager, check_interval


def _nesterov(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def diloco_(
    theta: Sequence[Tensor], averages: Sequence[Tensor], outer_optimizer: Optimizer
) -> None:
    """Take an outer step of DiLoCo, which writes theta.

    Args:
        theta: parameters after the last outer step, on which the outer optimizer steps.
        averages: the parameters of all ranks now, averaged exactly, of the same shapes.
    """
    for anchor, average in zip(theta, averages, strict=True):
        anchor.grad = anchor.detach() - average  # Delta = (1/n) sum_i (theta - theta_i)
    outer_optimizer.step()  # theta <- OuterOpt(theta, Delta)
    outer_optimizer.zero_grad()


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """Hundreds of local steps, then one outer optimizer step (Douillard et al., arXiv 2311.08105).

    The outer gradient is the parameters after the last outer step minus the current average over
    ranks. Each rank holds the outer optimizer's state, which is equal on all ranks.

    Args:
        outer_optimizer: creates any torch optimizer from a list of tensors; default: the paper's
            SGD with Nesterov momentum 0.9 and learning rate 0.7.
    """

    interval: int = 500
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(default=_nesterov, repr=False)

    def __post_init__(self) -> None:
        check_interval(self.interval)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        outer = self.outer_optimizer([torch.zeros(1, requires_grad=True, device="cpu")])
        return [("algorithm", repr(self)), ("outer optimizer", repr(outer))]

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "OuterOptimizerAverager":
        local = ModelAverager(buckets.buffers, run)
        return OuterOptimizerAverager(local, self, run)


class OuterOptimizerAverager(PeriodicAverager):
    """DiLoCo on one rank: the outer step is that of a torch optimizer."""

    def __init__(self, inner: ModelAverager, options: DiLoCo, run: Run) -> None:
        super().__init__(inner, options.interval, run)
        self._anchors = [buffer.float().clone().requires_grad_() for buffer in self.buffers]
        self._optimizer: Any = options.outer_optimizer(list(self._anchors))

    @override
    def outer_step(self) -> None:
        diloco_(self._anchors, [buffer.float() for buffer in self.buffers], self._optimizer)
        copy_all(self.buffers, [anchor.detach() for anchor in self._anchors])

    @override
    def outer_state_dict(self) -> dict[str, Any]:
        """Return the parameters after the last outer step and the outer optimizer's state."""
        anchors = [anchor.detach() for anchor in self._anchors]
        return {"anchors": anchors, "optimizer": self._optimizer.state_dict()}

    @override
    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        copy_all([anchor.detach() for anchor in self._anchors], state["anchors"])
        self._optimizer.load_state_dict(state["optimizer"])

    @override
    def check_outer_state(self, state: dict[str, Any]) -> None:
        own, path = [anchor.detach() for anchor in self._anchors], "algorithm.outer"
        check_like(state["anchors"], own, f"{path}.anchors")
        check_optimizer_state(self._optimizer, state["optimizer"], None, f"{path}.optimizer")

    @override
    def reset(self) -> None:
        super().reset()
        copy_all([anchor.detach() for anchor in self._anchors], self.buffers)
        self._optimizer.state.clear()
