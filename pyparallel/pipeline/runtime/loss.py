"""The loss of a pipeline's last stage, weighted by microbatch."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...training import summarize
from ...training.host_copy import HostCopy, host_values
from ..messages import Value, tensors_of
from ..messages.format import Refusal, RefusalKind
from ..messages.refusals import refusal_of
from ..schedules.schedule import Schedule
from ..schedules.shape import PipelineShape
from .microbatches import MicrobatchSplitter
from .options import StageOptions

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Reported:
    """A 0-d loss in the next report, which must be finite if weights learn from it."""

    loss: HostCopy
    share: float
    microbatch: int
    must_be_finite: bool


@dataclass
class Criterion:
    """The loss of each microbatch, and their mean over a step.

    ``shares_update``: whether a microbatch's gradient goes into one update with its whole step's.
    ``is_trained``: whether a parameter that the loss itself reads is trained by a stage.
    """

    loss_fn: Loss
    shares_update: Callable[[int], bool]
    options: StageOptions = StageOptions()  # noqa: RUF009 - immutable
    is_trained: Callable[[nn.Parameter], bool] = bool
    _reported: list[_Reported] = field(default_factory=list, init=False)
    # Of the first of them, where the host knows them.
    _values: list[float] = field(default_factory=list, init=False)
    # Of the steps since the last update, with options.weighs_update.
    _weights: list[float] = field(default_factory=list, init=False)

    def with_loss_fn(self, loss_fn: Loss | None) -> "Criterion":
        """Return a new criterion, weighted alike; ``loss_fn`` None: with the same function."""
        return Criterion(loss_fn or self.loss_fn, self.shares_update, self.options, self.is_trained)

    def loss_for_backward(
        self, microbatch: int, output: Value, splitter: MicrobatchSplitter
    ) -> Tensor | Refusal:
        """Return the 0-d loss to differentiate, weighted by the microbatch's part of its update.

        A refusal if ``loss_fn`` fails; if it is not finite and the check is not deferred: then the
        host waits for it; if it trains other parameters than the stage's; or if nothing in its
        update has a weight.
        """
        defers_check = self.options.defers_check
        if not splitter.share(microbatch):
            shares_update = self.options.weighs_update or self.shares_update(microbatch)
            if not shares_update or not (self.options.weighs_update or splitter.weight):
                text = f"{splitter.place}: microbatch {microbatch} has the weight 0"
                return Refusal(RefusalKind.EMPTY, text)
        known = {each.grad_fn for each in tensors_of(output)}  # before loss_fn may write to them
        loss = self.loss_for_report(microbatch, output, splitter, must_be_finite=defers_check)
        if isinstance(loss, Refusal):
            return loss
        problem = None
        if not loss.requires_grad and any(each.requires_grad for each in tensors_of(output)):
            problem = "loss_fn must return a differentiable loss, got one that requires no gradient"
            problem += " though the output does: leave out detach(), item() and no_grad()"
        elif (own := self._find_own_parameter(loss, known)) is not None:
            rule = "loss_fn must train no parameters but the layers' of its rank"
            fix = "move it into the last layer, or freeze it with requires_grad_(False)"
            problem = f"{rule}, got one of shape {list(own.shape)}: {fix}"
        if problem is not None:
            return refusal_of(splitter.place, problem)
        if not defers_check and splitter.share(microbatch):
            self._values += host_values(self._reported[-1].loss)
            if not math.isfinite(self._values[-1]):
                return _non_finite(microbatch, self._values[-1], splitter)
        if not self.shares_update(microbatch):
            return loss
        share = splitter.share(microbatch) / self.options.steps_per_update
        if self.options.weighs_update:
            share = splitter.share(microbatch) * self._weight_in_update(splitter)
        loss_scale = self.options.loss_scale
        factor = 1.0 if loss_scale is None else loss_scale.factor
        if factor != 1:
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return loss * (share * factor)

    def loss_for_report(
        self,
        microbatch: int,
        output: Value,
        splitter: MicrobatchSplitter,
        *,
        must_be_finite: bool = False,
    ) -> Tensor | Refusal:
        """Return the unweighted 0-d loss of a microbatch, and add it to the reported mean.

        Without a weight in it there is nothing to take a mean of, and the loss is 0. A refusal if
        ``loss_fn`` fails, as of labels of a wrong dtype, shape or class.
        """
        if not splitter.share(microbatch):
            # Not a product with 0: an output may be infinite. The output has a gradient of zeros.
            parts = (each.flatten()[:0].sum().abs() for each in tensors_of(output))
            return sum(parts, torch.zeros((), device="cpu"))
        share, target = splitter.share(microbatch), splitter.target(microbatch)
        try:
            loss = self.loss_fn(output, target)
        except Exception as error:
            # One text for all microbatches, which is said once.
            rule = "loss_fn must take the outputs of the last stage and the target"
            problem = f"{rule}, got {type(error).__name__}: {error}"
            return refusal_of(splitter.place, problem, error)
        if not isinstance(loss, Tensor) or loss.dim():
            problem = f"loss_fn must return a 0-d tensor, got {summarize(loss)}"
            return refusal_of(splitter.place, problem)
        self._reported.append(_Reported(HostCopy(loss.detach()), share, microbatch, must_be_finite))
        return loss

    def find_non_finite(self, splitter: MicrobatchSplitter) -> Refusal | None:
        """Return the refusal of the first deferred loss that is not finite; the host waits."""
        unknown = self._reported[len(self._values) :]
        if not any(each.must_be_finite for each in unknown):
            return None
        self._values += host_values(*(each.loss for each in unknown))
        for each, value in zip(self._reported, self._values, strict=True):
            if each.must_be_finite and not math.isfinite(value):
                return _non_finite(each.microbatch, value, splitter)
        return None

    def report(self) -> float:
        """Return the mean loss over the samples since the last report.

        It is nan without any, or of microbatches without weight alone, as the mean over no tokens.
        """
        reported, self._reported = self._reported, []
        values, self._values = self._values, []
        if not reported:
            return math.nan
        shares = [each.share for each in reported]
        if len(values) == len(reported):
            return sum(map(operator.mul, values, shares), 0.0)
        values = host_values(*(each.loss for each in reported))
        products = list(map(operator.mul, values, shares))
        return float(torch.tensor(products, dtype=torch.float64, device="cpu").sum())

    def end_step(self, splitter: MicrobatchSplitter) -> None:
        """Count the weight of a step in its update, of which it has accumulated the gradients."""
        is_valid = splitter.find_target_error() is None
        self._weights.append(float(splitter.weight) if is_valid else 0.0)

    def end_update(self) -> tuple[float, float]:
        """Return the weight of an update's steps, and by what to multiply its gradients."""
        weights, self._weights = self._weights, []
        total = sum(weights)
        return total, next((each / total for each in weights if each), 1.0)

    def _weight_in_update(self, splitter: MicrobatchSplitter) -> float:
        """Return a step's weight over that of the update's first one, as the sum is not known."""
        weights = [*self._weights, splitter.weight]
        return weights[-1] / next((each for each in weights if each), 1.0)

    def _find_own_parameter(self, loss: Tensor, known: set[Any]) -> nn.Parameter | None:
        """Return a parameter that a loss trains besides those behind its output, or None."""
        waiting, seen = [loss.grad_fn], set(known)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = None if node.next_functions else getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and not self.is_trained(leaf):
                return leaf
            waiting += [each for each, _ in node.next_functions]
        return None


def shares_update_fn(schedule: Schedule, shape: PipelineShape) -> Callable[[int], bool]:
    """Return a function of a microbatch: whether its whole step goes into one update."""

    def shares_update(microbatch: int) -> bool:
        first = microbatch - microbatch % shape.num_microbatches
        last = first + shape.num_microbatches - 1
        return schedule.update_index(shape, first) == schedule.update_index(shape, last)

    return shares_update


def find_target_refusal(splitter: MicrobatchSplitter) -> Refusal | None:
    """Return why there will be no loss: the target is invalid; None: it is not."""
    problem = splitter.find_target_error()
    return None if problem is None else refusal_of(splitter.place, problem)


def _non_finite(microbatch: int, loss: float, splitter: MicrobatchSplitter) -> Refusal:
    text = f"{splitter.place}: the loss of microbatch {microbatch} must be finite, got {loss}"
    return Refusal(RefusalKind.NOT_FINITE, text)
