"""The loss at the end of the pipe."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm import Value, tensors_of
from .microbatches import MicrobatchSplitter

Loss = Callable[[Any, Any], Tensor]


class Criterion:
    """The loss of each microbatch, and their mean over a call.

    Args:
        loss_fn: ``loss_fn(output, target)``: the mean over a microbatch.
        shares_update: whether the update that takes a microbatch's gradient takes the whole call's.
    """

    def __init__(self, loss_fn: Loss, shares_update: Callable[[int], bool]) -> None:
        self._loss_fn = loss_fn
        self._shares_update = shares_update
        self._losses: list[tuple[Tensor, float]] = []

    def another(self, loss_fn: Loss | None) -> "Criterion":
        """Of other outputs, weighed alike; ``loss_fn`` None: by the same function."""
        return Criterion(loss_fn or self._loss_fn, self._shares_update)

    def loss_for_backward(self, microbatch: int, output: Value, feed: MicrobatchSplitter) -> Tensor:
        """The loss to be derived: it weighs as much as the microbatch does in its update.

        Raises:
            FloatingPointError: it is not finite.
            ValueError: it does not depend on an output that requires a gradient.
        """
        loss = self.loss_for_report(microbatch, output, feed)
        if not loss.requires_grad and any(each.requires_grad for each in tensors_of(output)):
            raise ValueError(
                "loss_fn must return a loss that can be derived, got one that requires no gradient "
                "though the output does: leave out detach(), item() and no_grad()"
            )
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss must be finite, got {loss.item()}")
        return loss * feed.share(microbatch) if self._shares_update(microbatch) else loss

    def loss_for_report(self, microbatch: int, output: Value, feed: MicrobatchSplitter) -> Tensor:
        """The loss of a microbatch, which goes into the mean.

        Raises:
            ValueError: it is not a single number.
        """
        loss = self._loss_fn(output, feed.target(microbatch))
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"loss_fn must return a 0-d tensor, got one {what}")
        self._losses.append((loss.detach(), feed.share(microbatch)))
        return loss

    def report(self) -> float | None:
        """The mean over samples of what was noted since the last report; None: nothing was."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        return float(torch.stack([loss.double() * share for loss, share in losses]).sum())
