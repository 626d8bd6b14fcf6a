"""One stage at work: its module, its weights, its optimizer, and the microbatches inside it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...comm import FlatBuckets, Value, tensors_of
from ..schedules.schedule import Flushing, Schedule
from ..schedules.shape import PipelineShape
from .loss import Criterion
from .microbatches import MicrobatchSplitter
from .split_backward import WeightBackward, backward_input
from .stage_weights import LiveWeights, StageWeights, Weights

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass
class _Passing:
    """A microbatch between its forward and the end of its backward."""

    inputs: Value
    outputs: tuple[Tensor, ...]
    single: bool
    rest: WeightBackward | None = None
    sent: tuple[Tensor, ...] = ()


class Stage:
    """A part of the model, and what is in it.

    Args:
        index: its number, from 0.
        module: its layers.
        optimizer: of its parameters; None: it has none to train.
        weights: in as many versions as its schedule reads.
        criterion: of the last stage; None for others.
    """

    head_loss: float | None = None  # the last call's, where the stage has a head of its own

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizer: Optimizer | None,
        weights: Weights,
        criterion: Criterion | None,
    ) -> None:
        self.index = index
        self.module = module
        self.optimizer = optimizer
        self.scheduler: LRScheduler | None = None
        self.weights = weights
        self._criterion = criterion
        self._passing: dict[int, _Passing] = {}

    @property
    def optimized(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def forward(self, microbatch: int, inputs: Value, feed: MicrobatchSplitter) -> Value:
        """What the module makes of a microbatch; of the last stage, its loss.

        Raises:
            TypeError: the module's output is neither a tensor nor a tuple of tensors.
        """
        if self.optimizer is not None and not torch.is_grad_enabled():
            raise RuntimeError("step must not come inside no_grad(), where nothing learns")
        with self.weights.forward(microbatch):
            output = check_value(self.module(_entered(inputs)))
            if self._criterion is not None:
                output = self._criterion.loss_for_backward(microbatch, output, feed)
        self._passing[microbatch] = _Passing(inputs, tensors_of(output), isinstance(output, Tensor))
        return output

    def evaluate(self, microbatch: int, inputs: Value, feed: MicrobatchSplitter) -> Value:
        """A forward on the live weights that leaves nothing behind."""
        output = check_value(self.module(inputs))
        return (
            output
            if self._criterion is None
            else self._criterion.loss_for_report(microbatch, output, feed)
        )

    def backward(self, microbatch: int, gradients: Value | None) -> Value:
        """Add to the parameters' gradients; what those of the inputs are that have any."""
        passing = self._passing.pop(microbatch)
        with self.weights.backward(microbatch):
            roots, seeds = roots_of(passing.outputs, gradients)
            if roots:
                torch.autograd.backward(roots, seeds)
        self.weights.end_backward(microbatch)
        return self._apart(_gradient_of(each) for each in differentiable(passing.inputs))

    def backward_input(self, microbatch: int, gradients: Value | None) -> Value:
        """The first half of a backward: the gradients of the inputs alone."""
        passing = self._passing[microbatch]
        inputs = differentiable(passing.inputs)
        with self.weights.backward(microbatch):
            roots, seeds = roots_of(passing.outputs, gradients)
            found, passing.rest = backward_input(roots, seeds, inputs)
        passing.outputs = ()
        pairs = zip(inputs, found, strict=True)
        passing.sent = tuple(torch.zeros_like(each) if g is None else g for each, g in pairs)
        return passing.sent

    def backward_weight(self, microbatch: int) -> None:
        """The second half: add to the parameters' gradients."""
        passing = self._passing.pop(microbatch)
        assert passing.rest is not None, "a schedule lets it follow the first half"
        with self.weights.backward(microbatch):
            passing.rest.run()
        sent = {gradient.untyped_storage().data_ptr() for gradient in passing.sent}
        for parameter in self.optimized:
            gradient = parameter.grad
            if gradient is not None and _shares(gradient, sent):
                parameter.grad = gradient.clone()
        self.weights.end_backward(microbatch)

    def update(self) -> None:
        """Step the optimizer on the gradients so far, and begin new ones; then the scheduler."""
        self.weights.update()
        torch.clear_autocast_cache()  # it holds casts of weights by the parameter, not its contents
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()

    def schedule_rates(self, scheduler_fn: SchedulerFactory) -> None:
        """Let a scheduler step after each update, if there is anything to train."""
        if self.optimizer is not None:
            self.scheduler = scheduler_fn(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Of the module, the optimizer and the scheduler."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        state = {"module": self.module.state_dict(), "optimizer": optimizer}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def _apart(self, gradients: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Copies of those that share memory with a parameter's gradient.

        Autograd gives both the same memory where both come from views of one sum. The parameter's
        is about to be added to, while the other travels.
        """
        mine = {p.grad.untyped_storage().data_ptr() for p in self.optimized if p.grad is not None}
        return tuple(each.clone() if _shares(each, mine) else each for each in gradients)


def build_stage(
    index: int,
    module: nn.Module,
    optimizer_fn: OptimizerFactory,
    schedule: Schedule,
    layout: PipelineShape,
    criterion: Criterion | None,
) -> Stage:
    """A stage with its optimizer, and weights as the schedule reads them.

    Raises:
        ValueError: the schedule cannot predict where this optimizer goes.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        return Stage(index, module, None, LiveWeights(None), criterion)
    optimizer = optimizer_fn(parameters)
    optimizer.zero_grad(set_to_none=True)  # what a broken pipe may have left
    flat = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
    weight_predictor = schedule.weight_predictor(layout, index, optimizer, flat)
    weights: Weights = LiveWeights(weight_predictor)
    if not isinstance(schedule, Flushing):
        weights = StageWeights(
            flat,
            weight_predictor,
            schedule.versions(layout),
            index,
            lambda microbatch: schedule.update_index(layout, microbatch),
        )
    return Stage(index, module, optimizer, weights, criterion)


def check_value(output: Any) -> Value:
    """The output of a layer, if it can travel.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and all(isinstance(each, Tensor) for each in output):
        return output
    what = type(output).__name__
    if isinstance(output, tuple):
        what = f"a tuple with {', '.join(sorted({type(each).__name__ for each in output}))}"
    raise TypeError(
        f"a layer's output must be a tensor or a tuple of tensors, got {what}; return the tensors "
        "themselves"
    )


class _Enter(torch.autograd.Function):
    """The same memory, but no leaf: operations in place may write to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _entered(value: Value) -> Value:
    """As the layer before would give it in one process, whose output is no leaf either."""
    # Torch leaves Function.apply without types.
    entered = tuple(_Enter.apply(t) if t.requires_grad else t for t in tensors_of(value))  # type: ignore[no-untyped-call]
    return entered[0] if isinstance(value, Tensor) else entered


def differentiable(value: Value) -> list[Tensor]:
    """The tensors of a value that require a gradient."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


def _shares(tensor: Tensor, addresses: set[int]) -> bool:
    return tensor.untyped_storage().data_ptr() in addresses


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def roots_of(
    outputs: tuple[Tensor, ...], gradients: Value | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs to derive, and the gradients that have come for them; a loss's is 1."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if gradients is None:
        return roots, [torch.ones_like(root) for root in roots]
    return roots, list(tensors_of(gradients))
