"""DiLoCo: an outer optimizer step after hundreds of local steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...compression import (
    Cast,
    Chain,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    Fp4,
    PerParameter,
    Statistical,
)
from ...training import (
    FlatBuckets,
    check_like,
    check_optimizer_kinds,
    check_optimizer_state,
    load_copy,
    optimizer_kind,
)
from ...training.arguments import require
from ...training.consensus import copy_all
from .base import OuterRule, Periodic
from .periodic import PeriodicAverager


def _nesterov(parameters: list[Tensor], lr: float = 0.7) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def _slower_nesterov(parameters: list[Tensor]) -> Optimizer:
    return _nesterov(parameters, 0.4)


def _faster_nesterov(parameters: list[Tensor]) -> Optimizer:
    return _nesterov(parameters, 0.8)


def _sgd(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.4)


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


@dataclass(frozen=True, repr=False)
class DiLoCo(Periodic):
    """Hundreds of local steps, then one outer optimizer step (Douillard et al., arXiv 2311.08105).

    The outer gradient is the parameters after the last outer step minus the current average over
    ranks. Each rank holds the outer optimizer's state, which is equal on all ranks.

    Args:
        outer_optimizer: creates any torch optimizer from a list of tensors; default: the paper's
            SGD with Nesterov momentum 0.9 and learning rate 0.7.
    """

    averages_over_all = True
    interval: int = 500
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(default=_nesterov, repr=False)

    def __post_init__(self) -> None:
        self.check_options(self.interval)
        self.config_fields()  # makes an outer optimizer, and checks it

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        tensor = torch.zeros(1, requires_grad=True, device="cpu")
        outer = self.outer_optimizer([tensor])
        stepped = [each for group in outer.param_groups for each in group["params"]]
        rule = "outer_optimizer must return an optimizer of the tensors that it is called with"
        require([*map(id, stepped)] == [id(tensor)], rule, f"{type(outer).__name__} of others")
        return [("algorithm", repr(self)), ("outer optimizer", repr(outer))]

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PeriodicAverager:
        return PeriodicAverager(self, self.interval, optimizer, module, buckets, run)

    @override
    def make_rule(self, slow: list[Tensor], optimizer: Optimizer, ranks: Collectives) -> OuterRule:
        return OuterOptimizerRule(self.outer_optimizer, slow)


@dataclass(frozen=True, repr=False)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo whose fragments travel as FP4 while the ranks train (arXiv 2501.18512).

    The paper's: three layers a fragment, strided; here the number of fragments is given instead.
    """

    interval: int = 100
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(
        default=_slower_nesterov, repr=False
    )
    compressor: Compressor | None = field(default=Fp4(), kw_only=True)
    fragments: int | Sequence[Sequence[str]] = field(default=3, kw_only=True)
    delay: int = field(default=5, kw_only=True)


@dataclass(frozen=True, repr=False)
class SparseLoCo(DiLoCo):
    """DiLoCo that sends the largest entries of each chunk, in two bits, with error feedback.

    Sarfi et al., arXiv 2508.15706, with the defaults of their public training code. Unlike there,
    ranks' differences are not clipped to their median norm, and an entry is averaged over all ranks
    instead of those that sent it. 0.22 bits a parameter and outer step.
    """

    interval: int = 30
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(default=_sgd, repr=False)
    compressor: Compressor | None = field(
        default=ErrorFeedback(Chain(ChunkTopK(), Statistical(2)), decay=0.95), kw_only=True
    )


@dataclass(frozen=True, repr=False)
class MuLoCo(DiLoCo):
    """DiLoCo for ranks that train with Muon: differences in two bits, with error feedback.

    Therien et al., arXiv 2505.23725. Muon is up to the trainer's optimizers. Norms, biases and
    embeddings are sent as bfloat16, by their usual names; else pass a ``PerParameter`` of yours.
    """

    interval: int = 30
    outer_optimizer: Callable[[list[Tensor]], Optimizer] = field(
        default=_faster_nesterov, repr=False
    )
    compressor: Compressor | None = field(
        default=PerParameter({
            **dict.fromkeys(("*norm*", "*ln_*", "*.bias", "*emb*", "*wte*", "*wpe*"), Cast()),
            "*": ErrorFeedback(Statistical(2), decay=0.9),
        }),
        kw_only=True,
    )  # fmt: skip


class OuterOptimizerRule(OuterRule):
    """The outer step of a torch optimizer, as of DiLoCo."""

    evaluates_slow = True

    def __init__(self, make: Callable[[list[Tensor]], Optimizer], slow: Sequence[Tensor]) -> None:
        super().__init__(slow)
        self._parameters = [each.requires_grad_() for each in self.slow]
        self._optimizer: Any = make(list(self._parameters))
        self.slow = [parameter.detach() for parameter in self._parameters]

    @override
    def step(self, averages: list[Tensor]) -> list[Tensor]:
        diloco_(self._parameters, averages, self._optimizer)
        return self.slow

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the parameters after the last outer step and the outer optimizer's state."""
        kind, optimizer = optimizer_kind(self._optimizer), self._optimizer.state_dict()
        return {"slow": self.slow, "optimizer_kind": kind, "optimizer": optimizer}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_all(self.slow, state["slow"])
        load_copy(self._optimizer, state["optimizer"])

    @override
    def check_state(self, state: dict[str, Any], path: str) -> None:
        check_like(state["slow"], self.slow, f"{path}.slow")
        check_optimizer_kinds([self._optimizer], [state["optimizer_kind"]])
        check_optimizer_state(self._optimizer, state["optimizer"], f"{path}.optimizer")

    @override
    def reset(self, weights: list[Tensor]) -> None:
        super().reset(weights)
        self._optimizer.state.clear()
