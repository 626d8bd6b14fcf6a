"""The loss of a pipeline's last stage, weighted by microbatch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm import Value, tensors_of
from .microbatches import MicrobatchSplitter

Loss = Callable[[Any, Any], Tensor]


class Criterion:
    """The loss of each microbatch, and their mean over a step.

    Args:
        loss_fn: ``loss_fn(output, target)``: the mean over a microbatch.
        shares_update: whether a microbatch's gradient goes into one update with its whole step's.
    """

    def __init__(self, loss_fn: Loss, shares_update: Callable[[int], bool]) -> None:
        self.loss_fn = loss_fn
        self._shares_update = shares_update
        self._losses: list[tuple[Tensor, float]] = []

    def with_loss_fn(self, loss_fn: Loss | None) -> "Criterion":
        """Return a new criterion, weighted alike; ``loss_fn`` None: with the same function."""
        return Criterion(loss_fn or self.loss_fn, self._shares_update)

    def loss_for_backward(
        self, microbatch: int, output: Value, splitter: MicrobatchSplitter
    ) -> Tensor:
        """Return the 0-d loss to differentiate, weighted by the microbatch's part of its update.

        Raises:
            FloatingPointError: it is not finite.
            ValueError: it requires no gradient although an output does.
        """
        loss = self.loss_for_report(microbatch, output, splitter)
        if not loss.requires_grad and any(each.requires_grad for each in tensors_of(output)):
            raise ValueError(
                "loss_fn must return a differentiable loss, got one that requires no gradient "
                "though the output does: leave out detach(), item() and no_grad()"
            )
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss must be finite, got {loss.item()}")
        return loss * splitter.share(microbatch) if self._shares_update(microbatch) else loss

    def loss_for_report(
        self, microbatch: int, output: Value, splitter: MicrobatchSplitter
    ) -> Tensor:
        """Return the unweighted 0-d loss of a microbatch, and add it to the reported mean.

        Raises:
            ValueError: it is not a single number.
        """
        loss = self.loss_fn(output, splitter.target(microbatch))
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"loss_fn must return a 0-d tensor, got one {what}")
        self._losses.append((loss.detach(), splitter.share(microbatch)))
        return loss

    def report(self) -> float | None:
        """Return the mean loss over the samples since the last report; None without any."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        return float(torch.stack([loss.double() * share for loss, share in losses]).sum())
