"""A stage that learns from the losses of a window of stages."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from ...training import check_like
from ..messages import Value
from ..messages.format import Refusal
from ..runtime.loss import Criterion, find_target_refusal
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.options import StageOptions
from ..runtime.preserve_state import outside_autocast
from ..runtime.replicated_predictor import ReplicatedPredictor
from ..runtime.stage import Stage
from ..runtime.stage_weights import Weights

Gradients = tuple[Tensor, ...]  # of the stage's differentiable outputs, or inputs


@dataclass(frozen=True)
class HeadRuntime:
    """A stage's head and its loss; ``reads_shared``: the module reads the shared weight."""

    module: nn.Module
    criterion: Criterion
    reads_shared: bool

    def loss(
        self, microbatch: int, value: Value, shared: Tensor | None, splitter: MicrobatchSplitter
    ) -> Tensor | Refusal:
        """Return the 0-d loss of the head's output, or why there is none."""
        if (refusal := find_target_refusal(splitter)) is not None:
            return refusal
        output = self.module(value, shared) if self.reads_shared else self.module(value)
        return self.criterion.loss_for_backward(microbatch, output, splitter)


class InterlockingStage(Stage):
    """A stage that receives and sends a separate gradient for each loss; the last has no head."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        weights: Weights,
        criterion: Criterion | None,
        head: HeadRuntime | None,
        options: StageOptions = StageOptions(),  # noqa: B008 - immutable
        schedulers: Sequence[LRScheduler] = (),
        replica: ReplicatedPredictor | None = None,
    ) -> None:
        super().__init__(
            index, module, optimizers, weights, criterion, options, schedulers, replica
        )
        self.head = head
        self._supports_batched = True  # until its graph has failed under vmap
        if head is not None:
            self._parts["head."] = head.module

    def head_backward(
        self, microbatch: int, shared: Tensor | None, splitter: MicrobatchSplitter
    ) -> Gradients | Refusal:
        """Run the head; return the gradients of the stage's outputs, or why there are none."""
        assert self.head is not None, "the last stage's loss is in its forward"
        in_flight = self._in_flight[microbatch]
        inputs = tuple(
            output.detach().requires_grad_(output.requires_grad) for output in in_flight.outputs
        )
        value = inputs[0] if in_flight.single else inputs
        loss = self.head.loss(microbatch, value, shared, splitter)
        if isinstance(loss, Refusal):
            self.skip_update(loss)
            return loss
        if loss.requires_grad:
            with outside_autocast():
                loss.backward()
        leaves = [each for each in inputs if each.requires_grad]
        return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in leaves)

    def input_vjp(self, microbatch: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Return the input gradients for output gradients; accumulate no weight gradients.

        Those of several losses are batched by ``vmap``, or go one by one if the graph does not
        support it (a custom function, or recomputed dropout).
        """
        in_flight = self._in_flight[microbatch]
        roots = [output for output in in_flight.outputs if output.requires_grad]
        inputs = in_flight.inputs
        if not roots or not inputs:
            return [tuple(map(torch.zeros_like, inputs)) for _ in gradients]
        if len(gradients) > 1 and self._supports_batched:
            try:
                return _input_grads_batched(roots, inputs, gradients)
            except Exception as error:  # any other error is raised again below
                self._supports_batched = False
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                warnings.warn(
                    f"stage {self.index} computes input gradients one by one, as its graph does "
                    f"not support vmap ({why})",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return [_input_grads(roots, inputs, gradient) for gradient in gradients]

    def output_grads(self, microbatch: int) -> Gradients | Refusal:
        """Return the gradient of the last stage's loss by itself, 1; or why there is none."""
        in_flight = self._in_flight[microbatch]
        if in_flight.refusal is not None:
            return in_flight.refusal
        return tuple(torch.ones_like(each) for each in in_flight.outputs if each.requires_grad)

    # Not named backward: Stage.backward returns input gradients too.
    def accumulate_grads(self, microbatch: int, gradients: Gradients) -> None:
        """Accumulate the gradients of the weights alone, and release the microbatch's graph."""
        in_flight = self._in_flight.pop(microbatch)
        roots = [output for output in in_flight.outputs if output.requires_grad]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if roots and gradients and trained:
            with outside_autocast():
                torch.autograd.backward(roots, gradients, inputs=trained)

    @override
    def update(self) -> None:
        super().update()
        if self.head is not None:
            self.head_loss = self.head.criterion.report()

    @override
    def state_dict(self, *, is_rescued: bool = False) -> dict[str, Any]:
        head = None if self.head is None else self.head.module.state_dict()
        return {**super().state_dict(is_rescued=is_rescued), "head": head}

    @override
    def load_state_dict(self, state: dict[str, Any], *, is_rescued: bool = False) -> None:
        super().load_state_dict(state, is_rescued=is_rescued)
        if self.head is not None:
            self.head.module.load_state_dict(state["head"])

    @override
    def check_state(self, state: dict[str, Any], path: str) -> None:
        super().check_state(state, path)
        if self.head is not None:
            check_like(state["head"], self.head.module.state_dict(), f"{path}.head")


def _input_grads(roots: list[Tensor], inputs: list[Tensor], gradients: Gradients) -> Gradients:
    with outside_autocast():
        grads = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    return tuple(
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(inputs, grads, strict=True)
    )


def _input_grads_batched(
    roots: list[Tensor], inputs: list[Tensor], gradients: Sequence[Gradients]
) -> list[Gradients]:
    output_grads = [torch.stack(each) for each in zip(*gradients, strict=True)]
    with outside_autocast():
        batched = torch.autograd.grad(
            roots, inputs, output_grads, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    stacked = [
        each.new_zeros(len(gradients), *each.shape) if grad is None else grad
        for each, grad in zip(inputs, batched, strict=True)
    ]
    return list(zip(*stacked, strict=True))
