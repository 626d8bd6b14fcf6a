"""Elastic averaging SGD: ranks are pulled towards a center, and the center towards the ranks."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ....comm import Run
from ....compression import BufferLayout
from ....training import Algorithm, FlatBuckets, ModelAverager, SavedProgress, check_like
from ....training.arguments import check_in, check_integer
from ....training.consensus import copy_all
from ...messages.averages import AllRanks
from ..base import widened


def easgd(x: Tensor, center: Tensor, update: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return x of all n ranks and the center after a step with an exchange.

    Args:
        x: (n, d) parameters, at which the gradients are: a row for each rank.
        center: (d,).
        update: (n, d) of the optimizers: with SGD, lr * gradient.
        alpha: beta / n.
    """
    pull = alpha * (x - center)
    x = x - update - pull  # x_i <- x_i - lr g_i - alpha (x_i - center)
    return x, center + pull.sum(0)  # center <- (1 - beta) center + beta mean(x_i)


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Synchronous elastic averaging SGD (Zhang, Choromanska, LeCun, NIPS 2015, arXiv 1412.6651).

    All ranks have the same center, which begins at their parameters. Every ``interval`` steps each
    is pulled towards it, and it towards the mean of all, by their places before the step::

        x      <- x - update(gradient at x) - beta / n * (x - center)
        center <- center + beta * (mean(x) - center)

    ``consensus()`` evaluates the center, as the paper does. Where the ranks' losses differ, or
    have several minima, the ranks come to rest where gradient and pull cancel, so the center need
    not be a stationary point of the mean loss: ``LeaderSGD`` pulls towards a rank instead.

    With ``SGD(momentum=delta, nesterov=True)`` it is the paper's EAMSGD. torch's parameters are
    then x + delta v, of momentum v, and x is what is pulled and averaged. The update may be that of
    any other optimizer, and then the parameters are pulled. A step inside ``no_sync()`` counts for
    nothing. Every rank keeps two copies of the parameters, in float32 or wider.

    In ``join()`` a rank without batches is pulled, and pulls the center.

    Args:
        interval: steps from one exchange, an all-reduce of the parameters, to the next.
        beta: moving rate of the center, in (0, 1]; the paper's 0.9.
    """

    averages_over_all = True
    can_be_inner = False
    refuses_shards = (
        "read no momentum for",
        ", which does with Nesterov's: use LocalSGD or LeaderSGD",
    )
    interval: int = 10
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, rule="a positive number of steps")
        check_in("beta", self.beta, "(0, 1]")

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "CenterAverager":
        return CenterAverager(self, buckets, optimizer, run)


class CenterAverager(ModelAverager):
    """EASGD on one rank: places are exchanged after a step, and pull in the next one."""

    def __init__(
        self, options: EASGD, buckets: FlatBuckets, optimizer: Optimizer, run: Run
    ) -> None:
        super().__init__(buckets.buffers, run)
        self._options, self._buckets = options, buckets
        self._optimizer: Any = weakref.proxy(optimizer)  # its hooks reference the trainer
        self._average = AllRanks(run, self.buffers[0].device, None, in_background=False)
        self._layouts = [BufferLayout.flat(buffer.numel()) for buffer in self.buffers]
        self._steps = 0
        self._center = list(map(_wide_copy, self.buffers))
        self._pull: list[Tensor] = []  # of the next step

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        """Add the pull, which is of the place where the gradient is."""
        for buffer, pull in zip(self.buffers, self._pull, strict=bool(self._pull)):
            buffer.sub_(pull)
        self._pull = []

    @override
    def after_step(self) -> None:
        self.after_update()  # of a rank without batches, which has no update
        self._steps += 1
        if self._steps % self._options.interval == 0:
            self._exchange()
            self._average.headers.raise_nonfinite()

    @torch.no_grad()
    def _exchange(self) -> None:
        places = self._places()
        alpha = self._options.beta / self.run.size
        self._pull = [
            alpha * (place - center)
            for place, center in zip(places, self._center, strict=True)
        ]  # fmt: skip
        index = self._steps // self._options.interval
        means = self._average.start(self._layouts, places, index=index, weight=self._weight)()
        for center, mean in zip(self._center, means, strict=True):
            center.add_(mean - center, alpha=self._options.beta)

    def _places(self) -> list[Tensor]:
        """Return x of each buffer: with Nesterov's momentum, without what torch adds to it."""
        places = list(map(_wide_copy, self.buffers))
        groups = self._optimizer.param_groups
        ahead = {
            id(parameter): (-1 if group["maximize"] else 1) * float(group["lr"]) * group["momentum"]
            for group in groups
            if group.get("nesterov") and "dampening" in group  # of SGD: Muon's is another one
            for parameter in group["params"]
        }
        if not ahead:
            return places
        state = self._optimizer.state
        for parameter, place in zip(
            self._buckets.parameters, self._buckets.views(places), strict=True
        ):
            momentum = state.get(parameter, {}).get("momentum_buffer")
            if id(parameter) in ahead and momentum is not None:
                place.add_(momentum, alpha=ahead[id(parameter)])  # v = -lr * momentum
        return places

    @override
    def as_evaluated(self) -> tuple[list[Tensor], Tensor]:
        pairs = zip(self._center, self.buffers, strict=True)
        return [center.to(buffer.dtype) for center, buffer in pairs], self._weight

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "center": self._center, "pull": self._pull}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        copy_all(self._center, state["center"])
        pairs = zip(state["pull"], self._center, strict=False)
        self._pull = [pull.to(center, copy=True) for pull, center in pairs]

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        pull = self._center if state["pull"] else []  # of another step there may be one
        own = {"steps": self._steps, "center": self._center, "pull": pull}
        check_like(state, own, "algorithm")
        return SavedProgress({"step": state["steps"]})

    @override
    def reset(self) -> None:
        self._center = self._average.agree(list(map(_wide_copy, self.buffers)))  # of all ranks
        self._pull = []


def _wide_copy(buffer: Tensor) -> Tensor:
    return widened(buffer.detach()).clone()
