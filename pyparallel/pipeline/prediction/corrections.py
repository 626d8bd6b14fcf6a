"""Corrections of delayed gradients: error feedback of updates, and momentum by stage."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ...optim import FusedOptimizer
from ...training import FlatBuckets
from ...training.arguments import is_number, require
from .base import WeightPredictor
from .flat_state import FlatState

LAST_UNCORRECTED = "last_uncorrected_update"


class DelayedOptimizer(NamedTuple):
    """One optimizer of a stage whose gradients are delayed by ``delay`` updates, at least 1.

    ``weights`` has one entry for each parameter group.
    """

    optimizer: Optimizer
    weights: Sequence[FlatBuckets]
    delay: int
    num_stages: int


class Correction(Protocol):
    """Protocol of a correction of delayed gradients, for schedules that do not flush."""

    def wrap(self, predictor: WeightPredictor, delayed: DelayedOptimizer) -> WeightPredictor:
        """Return a predictor whose steps are corrected; a ValueError: they cannot be."""


@dataclass(frozen=True)
class UpdateErrorFeedback(Correction):
    """Error feedback of updates (arXiv 2606.30634): each is extrapolated by its last change.

    With u the whole update that the optimizer computes from a delayed gradient, learning rate and
    decoupled weight decay included, the step is ``w -= u + coefficient * (u - last u)``; the first
    one is plain. In the paper gradients are delayed by one update, and the coefficient is 1. The
    last u is kept in the optimizer's state, which takes one more copy of the weights' size.

    Args:
        coefficient: above 0; None: by how many updates the stage's gradients are delayed. Stages
            without a delay are not corrected.
    """

    coefficient: float | None = 1.0

    def __post_init__(self) -> None:
        given = self.coefficient
        fits = given is None or (is_number(given) and 0 < given < math.inf)
        rule, fix = "coefficient must be a finite number above 0, or None", "1 is the paper's"
        require(fits, rule, repr(given), fix)

    @override
    def wrap(self, predictor: WeightPredictor, delayed: DelayedOptimizer) -> WeightPredictor:
        optimizer, weights, delay, _ = delayed
        if isinstance(optimizer, FusedOptimizer) and optimizer.master_weights:
            raise ValueError(
                "optimizer must, for UpdateErrorFeedback, have master_weights=False, got True: it "
                "corrects the 16-bit parameters, not their float32 copies; use StageMomentum"
            )
        coefficient = delay if self.coefficient is None else self.coefficient
        return _ErrorFeedbackPredictor(predictor, optimizer, weights, float(coefficient))


@dataclass(eq=False)
class _ErrorFeedbackPredictor(WeightPredictor):
    _predictor: WeightPredictor
    _optimizer: Optimizer
    _weights: Sequence[FlatBuckets]
    _coefficient: float

    def __post_init__(self) -> None:
        self._states = [FlatState(self._optimizer, each) for each in self._weights]

    @override
    @torch.no_grad()
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        if not delayed:
            self._predictor.step(horizon, out, delayed)
            return
        updates = [[buffer.clone() for buffer in each.buffers] for each in self._weights]
        self._predictor.step()
        for each, state, of_group in zip(self._weights, self._states, updates, strict=True):
            for update, buffer in zip(of_group, each.buffers, strict=True):
                torch.sub(update, buffer, out=update)
            last = state.buffers(LAST_UNCORRECTED)
            self._leave_out(each, state, of_group)
            for update, before, buffer in zip(of_group, last, each.buffers, strict=True):
                buffer.add_(before.sub_(update), alpha=self._coefficient)
                before.copy_(update)
            state.publish(LAST_UNCORRECTED, [p for p in each.parameters if p.grad is not None])
        if horizon:
            self.predict(horizon, out)

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        self._predictor.predict(horizon, out)

    def _leave_out(self, weights: FlatBuckets, state: FlatState, updates: list[Tensor]) -> None:
        """Make the last update and this one equal for parameters that are not to be corrected."""
        state_of = self._optimizer.state.get
        known = [LAST_UNCORRECTED in state_of(each, {}) for each in weights.parameters]
        if all(known) and all(parameter.grad is not None for parameter in weights.parameters):
            return
        views = state.views(LAST_UNCORRECTED), weights.views(updates)
        for parameter, is_known, last, update in zip(
            weights.parameters, known, *views, strict=True
        ):
            if not is_known:
                last.copy_(update)
            elif parameter.grad is None:
                update.copy_(last)


@dataclass(frozen=True)
class StageMomentum(Correction):
    """A momentum that grows with the delay (AsyncPP; Ajanthan et al., arXiv 2505.01099).

    With gradients delayed by ``delay`` updates on a stage of ``num_stages``, it steps with
    the momentum ``m + delay * (limit - m) / num_stages``, where m is the parameter groups' own:
    ``momentum``, or the first of ``betas``. The groups keep m, as a scheduler may change it.

    Args:
        limit: of the momentum, in (0, 1).
    """

    limit: float = 0.99

    def __post_init__(self) -> None:
        fits = is_number(self.limit) and 0 < self.limit < 1
        require(fits, "limit must be a number in (0, 1)", repr(self.limit))

    @override
    def wrap(self, predictor: WeightPredictor, delayed: DelayedOptimizer) -> WeightPredictor:
        optimizer, _, delay, num_stages = delayed
        for group in optimizer.param_groups:
            momentum = _momentum_of(group)
            if not momentum or momentum > self.limit:
                found = "none" if momentum is None else f"{momentum:g}"
                raise ValueError(
                    "optimizer must, for StageMomentum, have a momentum (or betas) above 0 and at "
                    f"most the limit {self.limit:g}, got {found} in {type(optimizer).__qualname__}"
                )
        return _StageMomentumPredictor(predictor, optimizer, self.limit, delay / num_stages)


@dataclass(eq=False)
class _StageMomentumPredictor(WeightPredictor):
    _predictor: WeightPredictor
    _optimizer: Optimizer
    _limit: float
    _share: float  # of the way from the momentum to the limit

    @override
    def step(self, horizon: int = 0, out: Sequence[Tensor] = (), delayed: bool = True) -> None:
        if delayed:
            with self._adjusted():
                self._predictor.step(horizon, out)
            return
        self._predictor.step(delayed=False)
        if horizon:
            self.predict(horizon, out)  # of a delayed update

    @override
    def predict(self, horizon: int, out: Sequence[Tensor]) -> None:
        with self._adjusted():
            self._predictor.predict(horizon, out)

    @contextmanager
    def _adjusted(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [{name: group[name] for name in _NAMES if name in group} for group in groups]
        try:
            for group in groups:
                momentum = _momentum_of(group)
                assert momentum is not None, "wrap has checked it"
                own = momentum + self._share * (self._limit - momentum)
                if "betas" in group:
                    group["betas"] = (own, *group["betas"][1:])
                else:
                    group["momentum"] = own
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


_NAMES = "betas", "momentum"


def _momentum_of(group: Mapping[str, Any]) -> float | None:
    """Return the first of a parameter group's betas, or its momentum; None: it has neither."""
    momentum = group["betas"][0] if "betas" in group else group.get("momentum")
    return None if momentum is None else float(momentum)
