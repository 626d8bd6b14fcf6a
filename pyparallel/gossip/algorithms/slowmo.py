"""SlowMo: slow momentum around another algorithm."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import FlatBuckets, ModelAverager
from ...training.arguments import check_in, require
from .base import Algorithm, check_inner, check_is_algorithm, copy_all
from .periodic import PeriodicAverager, check_interval


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


@dataclass(frozen=True)
class SlowMo(Algorithm):
    """Slow momentum around another algorithm (Wang et al., ICLR 2020, arXiv 1910.00643).

    Every ``interval`` steps the ranks average exactly, update the slow momentum
    ``u = momentum * u + (x_old - average) / lr``, where x_old is the result of the last outer step,
    and continue from ``x_old - outer_lr * lr * u``, with the ``lr`` of the first parameter group of
    rank 0's optimizer, or of its first one.

    Args:
        inner: ``SGP(...)``, ``OSGP(...)`` or ``DPSGD(...)``; None: no communication between
            averages.
        momentum: about 0.2 for 4 ranks, 0.5 for 8, 0.6 for 16.
        outer_lr: outer learning rate; with 1 and momentum 0 the result is the average itself.
        reset_momentum: zero SGD's momentum buffers at each average, as the paper does; Adam's
            moments are kept either way.
    """

    inner: Algorithm | None
    interval: int
    momentum: float = 0.5
    outer_lr: float = 1.0
    reset_momentum: bool = True

    def __post_init__(self) -> None:
        if self.inner is not None:
            check_is_algorithm(self.inner, "inner")
        check_interval(self.interval)
        check_in("momentum", self.momentum, "[0, 1)")
        require(self.outer_lr > 0, "outer_lr must be positive", self.outer_lr)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self)), *(self.inner.config_fields() if self.inner else [])]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return self.inner.validation_error(num_ranks) if self.inner else None

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "SlowMomentumAverager":
        inner = ModelAverager(buckets.buffers, run)
        if self.inner:
            started = self.inner.start(module, optimizer, buckets, run)
            inner = check_inner(started, self.inner)
        return SlowMomentumAverager(inner, self, optimizer, run)


class SlowMomentumAverager(PeriodicAverager):
    """SlowMo on one rank: the outer step moves along the slow momentum."""

    def __init__(
        self, inner: ModelAverager, options: SlowMo, optimizer: Optimizer, run: Run
    ) -> None:
        super().__init__(inner, options.interval, run)
        self._options = options
        self._optimizer: Any = weakref.proxy(optimizer)  # its hooks reference the trainer
        self._before = [buffer.float().clone() for buffer in self.buffers]
        self._slow = [torch.zeros_like(before) for before in self._before]

    @override
    @torch.no_grad()
    def outer_step(self) -> None:
        lr = self._common_lr()
        if lr == 0:  # parameters must not move
            copy_all(self._before, self.buffers)
            return
        momentum, outer_lr = self._options.momentum, self._options.outer_lr
        for buffer, x, u in zip(self.buffers, self._before, self._slow, strict=True):
            slowmo_(x, u, buffer.float(), lr=lr, momentum=momentum, outer_lr=outer_lr)
            buffer.copy_(x)
        if self._options.reset_momentum:
            for state in self._optimizer.state.values():
                if torch.is_tensor(state.get("momentum_buffer")):
                    state["momentum_buffer"].zero_()

    def _common_lr(self) -> float:
        """Broadcast rank 0's lr: schedules may differ if a rank has no batches or skips a step."""
        lr = torch.tensor(
            float(self._optimizer.param_groups[0]["lr"]), dtype=torch.float64, device="cpu"
        )
        lr = lr.to(self._before[0].device)
        self._collectives.broadcast_(lr, 0)
        return float(lr)

    @override
    def outer_state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "slow": self._slow}

    @override
    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        copy_all(self._before, state["before"])
        copy_all(self._slow, state["slow"])

    @override
    def reset(self) -> None:
        super().reset()
        copy_all(self._before, self.buffers)
        for slow in self._slow:
            slow.zero_()
