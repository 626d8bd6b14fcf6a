"""A stage that learns from the losses of a window, its own head's among them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...comm import Value, tensors_of
from ..runtime.loss import Criterion
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.stage import Stage, differentiable, roots_of
from ..runtime.stage_weights import Weights

Gradients = tuple[Tensor, ...]  # of those tensors that a stage hands on which require one


@dataclass(frozen=True)
class HeadRuntime:
    """What judges what a stage hands on.

    Args:
        module: called with that, and with the shared weight if it reads one.
        criterion: its loss.
        reads_shared: whether it does.
    """

    module: nn.Module
    criterion: Criterion
    reads_shared: bool

    def head_backward(
        self, microbatch: int, value: Value, shared: Tensor | None, feed: MicrobatchSplitter
    ) -> Tensor:
        """The loss."""
        output = self.module(value, shared) if self.reads_shared else self.module(value)
        return self.criterion.loss_for_backward(microbatch, output, feed)


class InterlockingStage(Stage):
    """A stage whose gradients come apart, one for each loss, and leave apart.

    Args:
        index: its number, from 0.
        module: its layers.
        optimizer: of its parameters and those of its head; None: they have none to train.
        weights: stepped by it.
        criterion: of the last stage; None for others.
        head: of the others; None for the last.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizer: Optimizer | None,
        weights: Weights,
        criterion: Criterion | None,
        head: HeadRuntime | None,
    ) -> None:
        super().__init__(index, module, optimizer, weights, criterion)
        self.head = head
        self._takes_several = True  # its graph, as far as is known
        self._parameters = [each for each in module.parameters() if each.requires_grad]

    def head_backward(
        self, microbatch: int, shared: Tensor | None, feed: MicrobatchSplitter
    ) -> Gradients:
        """The loss of the stage's own head: the head learns from it.

        Returns:
            The gradients of what the stage handed on.
        """
        assert self.head is not None, "the last stage's loss is in its forward"
        passing = self._passing[microbatch]
        entry = tuple(each.detach().requires_grad_(each.requires_grad) for each in passing.outputs)
        value = entry[0] if passing.single else entry
        loss = self.head.head_backward(microbatch, value, shared, feed)
        if loss.requires_grad:
            loss.backward()
        wanted = [each for each in entry if each.requires_grad]
        return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in wanted)

    def input_vjp(self, microbatch: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        """What gradients of the outputs are as gradients of the inputs; no weights learn.

        Args:
            microbatch: which one.
            gradients: of several losses. All go through the graph at once (``vmap``), unless there
                is something in it which takes no more than one: a function of the user's, or layers
                with dropout that are recomputed. That is said once, as a warning.
        """
        passing = self._passing[microbatch]
        roots, _ = roots_of(passing.outputs, ())
        inputs = differentiable(passing.inputs)
        if not roots or not inputs:
            return [tuple(map(torch.zeros_like, inputs)) for _ in gradients]
        if len(gradients) > 1 and self._takes_several:
            try:
                return _derive_together(roots, inputs, gradients)
            except Exception as error:  # whatever else it is comes again, one by one
                self._takes_several = False
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                warnings.warn(
                    f"stage {self.index} pulls gradients back one by one, as its graph does not "
                    f"take several at once ({why})",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return [_derive(roots, inputs, each) for each in gradients]

    def output_grads(self, microbatch: int) -> Gradients:
        """The gradient of the last stage's loss by itself."""
        _, ones = roots_of(self._passing[microbatch].outputs, None)
        return tuple(ones)

    def learn(self, microbatch: int, gradients: Gradients) -> None:
        """Add to the gradients of the weights, and forget the microbatch.

        Args:
            microbatch: which one.
            gradients: of the outputs.
        """
        passing = self._passing.pop(microbatch)
        roots, output_grads = roots_of(passing.outputs, gradients)
        if roots and output_grads and self._parameters:
            torch.autograd.backward(roots, output_grads, inputs=self._parameters)

    def backward_and_input_vjp(self, microbatch: int, gradients: Gradients) -> Gradients:
        """Both, in one pass through the graph."""
        return tensors_of(self.backward(microbatch, gradients))

    def update(self) -> None:
        """As ``Stage.update``; ``head_loss`` becomes the mean over the call's samples."""
        super().update()
        if self.head is not None:
            self.head_loss = self.head.criterion.report()

    def state_dict(self) -> dict[str, Any]:
        """Of the module, the head and the optimizer."""
        head = None if self.head is None else self.head.module.state_dict()
        return {**super().state_dict(), "head": head}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        super().load_state_dict(state)
        if self.head is not None:
            self.head.module.load_state_dict(state["head"])


def _derive(roots: list[Tensor], inputs: list[Tensor], gradients: Gradients) -> Gradients:
    found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    return tuple(
        torch.zeros_like(each) if gradient is None else gradient
        for each, gradient in zip(inputs, found, strict=True)
    )


def _derive_together(
    roots: list[Tensor], inputs: list[Tensor], gradients: Sequence[Gradients]
) -> list[Gradients]:
    output_grads = [torch.stack(each) for each in zip(*gradients, strict=True)]
    found = torch.autograd.grad(
        roots, inputs, output_grads, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    whole = [
        each.new_zeros(len(gradients), *each.shape) if gradient is None else gradient
        for each, gradient in zip(inputs, found, strict=True)
    ]
    return list(zip(*whole, strict=True))
