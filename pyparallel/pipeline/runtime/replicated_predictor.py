"""A stage of one replica, which averages its weights with the same stage of the others."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...training import FlatBuckets, ModelAverager
from ...training.averager import JoinedOptimizers
from ...training.buckets import join_buckets
from ...training.consensus import assigned, average
from ..prediction.base import WeightPredictor

StartAverager = Callable[[nn.Module, Any, FlatBuckets, Run], ModelAverager]


class ReplicatedPredictor(WeightPredictor):
    """A predictor whose steps take a round with the same stage of the other replicas.

    What a round merges is a part of the update: the weights before it were stashed by then, and
    what is predicted are steps of this replica's own optimizer from the merged weights, no merges.
    """

    def __init__(
        self,
        inner: WeightPredictor,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        weights: Sequence[FlatBuckets],
    ) -> None:
        self._inner, self._module, self._optimizers = inner, module, optimizers
        self._buckets = join_buckets(weights)
        self._averager: ModelAverager | None = None

    @property
    def averager(self) -> ModelAverager:
        """Return the averager; None before ``start`` is an error."""
        assert self._averager is not None, "build_stages starts it"
        return self._averager

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are averaged."""
        return self._buckets.parameters

    def start(self, start: StartAverager | None, run: Run) -> None:
        """Begin with the weights and buffers of the first replica; all replicas call it together.

        ``start`` None: weights are never averaged, as gradients are.
        """
        self._copy_from_first(run)
        joined: Any = JoinedOptimizers(self._optimizers)
        whole = self._optimizers[0] if len(self._optimizers) == 1 else joined
        self._joined = joined  # averagers hold it weakly
        if start is None:
            self._averager = ModelAverager(self._buckets.buffers, run)
        else:
            self._averager = start(self._module, whole, self._buckets, run)

    def restart(self) -> None:
        """Begin again, as ``start`` does; all replicas call it together."""
        self._copy_from_first(self.averager.run)
        self.averager.reset()

    def _copy_from_first(self, run: Run) -> None:
        collectives, trained = Collectives(run), {id(each) for each in self._buckets.parameters}
        frozen = (p for p in self._module.parameters() if id(p) not in trained)
        for tensor in [*self._buckets.buffers, *frozen, *self._module.buffers()]:
            collectives.broadcast_(tensor.detach(), 0)

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        self._take_round(lambda: self._inner.step(delayed=delayed))
        if horizon:
            self._inner.predict(horizon, out)

    @override
    def skip(self) -> None:
        self._take_round(self._inner.skip)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        self._inner.predict(horizon, out)

    def _take_round(self, update: Callable[[], None]) -> None:
        averager = self.averager
        with averager.run.interruptible():
            averager.before_step()
            averager.before_update()
            update()
            averager.after_update()
            averager.after_step()

    def consensus(self) -> AbstractContextManager[None]:
        """Return a context in which weights and buffers are the average over replicas."""
        values, weight = self.averager.as_evaluated()
        collectives = Collectives(self.averager.run)
        buffers = [buffer for buffer in self._module.buffers() if buffer.is_floating_point()]
        averages = average(values, weight, collectives)
        averages += average(buffers, torch.ones_like(weight), collectives)
        return assigned([*self._buckets.buffers, *buffers], averages)
