"""SlowMo: slow momentum around another algorithm."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...training import Algorithm, FlatBuckets, Place
from ...training.arguments import check_in, raise_problem, require
from ...training.consensus import copy_all
from .base import OuterRule, Periodic, find_algorithm_error
from .periodic import PeriodicAverager


def slowmo_(
    x: Tensor, u: Tensor, average: Tensor, *, lr: float, momentum: float, outer_lr: float
) -> None:
    """Take an outer step of SlowMo, which writes x and the slow momentum u.

    Args:
        x: (d,) parameters after the last outer step.
        u: (d,) slow momentum.
        average: (d,) the parameters of all ranks now, averaged exactly.
        lr: gamma of the paper.
        momentum: beta of the paper.
        outer_lr: alpha of the paper.
    """
    u.mul_(momentum).add_((x - average) / lr)  # u <- beta u + (x - average) / gamma
    x.sub_(u * (outer_lr * lr))  # x <- x - alpha gamma u


@dataclass(frozen=True, repr=False)
class SlowMo(Periodic):
    """Slow momentum around another algorithm (Wang et al., ICLR 2020, arXiv 1910.00643).

    Every ``interval`` steps the ranks average exactly and update the slow momentum
    ``u = momentum * u + (x_old - average) / lr``, where x_old is the result of the last outer step.
    They continue from ``x_old - outer_lr * lr * u``. The ``lr`` is that of the first parameter
    group of rank 0's (first) optimizer.

    Args:
        inner: ``SGP(...)``, ``OSGP(...)`` or ``DPSGD(...)``; None: no communication between
            averages.
        momentum: about 0.2 for 4 ranks, 0.5 for 8, 0.6 for 16.
        outer_lr: outer learning rate; with 1 and momentum 0 the result is the average itself.
        reset_momentum: zero SGD's momentum buffers at each average, as the paper does; Adam's
            moments are kept either way.
    """

    averages_over_all = True
    inner: Algorithm | None
    interval: int
    momentum: float = 0.5
    outer_lr: float = 1.0
    reset_momentum: bool = True

    def __post_init__(self) -> None:
        if self.inner is not None:
            raise_problem(find_algorithm_error(self.inner, "inner"))
        self.check_options(self.interval)
        if self.inner is not None:
            fix = "or SlowMo(None, ...), which averages at the interval alone"
            rule = "fragments must be 1 and delay 0 with an inner algorithm"
            require(self.is_at_once, rule, f"{self.fragments!r} and {self.delay}", fix)
        rule = "reset_momentum must be False with fragments, as it resets that of all parameters"
        require(self.fragments == 1 or not self.reset_momentum, rule, self.reset_momentum)
        check_in("momentum", self.momentum, "[0, 1)")
        require(self.outer_lr > 0, "outer_lr must be positive", self.outer_lr)

    @property
    @override
    def can_have_members(self) -> bool:
        return False

    @override
    def bind(self, num_ranks: int) -> Self:
        return replace(self, inner=self.inner.bind(num_ranks)) if self.inner else self

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self)), *(self.inner.config_fields() if self.inner else [])]

    @override
    def error_at(self, place: Place) -> str | None:
        if (error_text := super().error_at(place)) or self.inner is None:
            return error_text
        return self.inner.error_at(replace(place, is_inner=True))

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PeriodicAverager:
        inner = None
        if self.inner:
            inner = self.inner.start(module, optimizer, buckets, run)
        return PeriodicAverager(self, self.interval, optimizer, module, buckets, run, inner)

    @override
    def make_rule(self, slow: list[Tensor], optimizer: Optimizer, ranks: Collectives) -> OuterRule:
        return SlowMomentumRule(self, optimizer, ranks, slow)


class SlowMomentumRule(OuterRule):
    """The outer step of SlowMo, along the slow momentum."""

    def __init__(
        self,
        options: SlowMo,
        optimizer: Optimizer,
        collectives: Collectives,
        slow: Sequence[Tensor],
    ) -> None:
        super().__init__(slow)
        self._options, self._collectives = options, collectives
        self._optimizer: Any = weakref.proxy(optimizer)  # its hooks reference the trainer
        self._momentum = [torch.zeros_like(each) for each in self.slow]

    @override
    def step(self, averages: list[Tensor]) -> list[Tensor]:
        lr = self._common_lr()
        if lr == 0:  # parameters must not move
            return super().step(averages)
        momentum, outer_lr = self._options.momentum, self._options.outer_lr
        for x, u, average in zip(self.slow, self._momentum, averages, strict=True):
            slowmo_(x, u, average, lr=lr, momentum=momentum, outer_lr=outer_lr)
        if self._options.reset_momentum:
            for state in self._optimizer.state.values():
                if torch.is_tensor(state.get("momentum_buffer")):
                    state["momentum_buffer"].zero_()
        return self.slow

    def _common_lr(self) -> float:
        """Broadcast rank 0's lr: schedules may differ if a rank has no batches or skips a step."""
        lr = torch.tensor(
            float(self._optimizer.param_groups[0]["lr"]), dtype=torch.float64, device="cpu"
        )
        lr = lr.to(self.slow[0].device)
        self._collectives.broadcast_(lr, 0)
        return float(lr)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "momentum": self._momentum}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_all(self.slow, state["slow"])
        copy_all(self._momentum, state["momentum"])

    @override
    def reset(self, weights: list[Tensor]) -> None:
        super().reset(weights)
        for each in self._momentum:
            each.zero_()
