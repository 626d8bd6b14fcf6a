"""A stage: its module, weights, optimizer and microbatches in flight."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...comm import (
    FlatBuckets,
    Value,
    check_like,
    check_optimizer_state,
    keys_of,
    optimizer_kind,
    plain_keys,
    summarize,
    tensors_of,
)
from ...comm.wire_format import Refusal
from ...optim import FusedOptimizer
from ..schedules.schedule import Flushing, Schedule
from ..schedules.shape import PipelineShape
from .loss import Criterion, find_target_refusal
from .microbatches import Arguments, Inputs, MicrobatchSplitter, call_module
from .split_backward import WeightBackward, backward_input
from .stage_weights import LiveWeights, StageWeights, Weights

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass
class _InFlight:
    """A microbatch between its forward and the end of its backward.

    Args:
        refusal: why it has no gradient; then it has no outputs either.
        found_inf: 0-d bool: its loss is not finite; None: that is known to the host.
    """

    inputs: Inputs
    outputs: tuple[Tensor, ...]
    single: bool
    weight_backward: WeightBackward | None = None
    input_grads: tuple[Tensor, ...] = ()
    found_inf: Tensor | None = None
    refusal: Refusal | None = None


class Stage:
    """A part of the model.

    Args:
        index: its number, from 0.
        module: its layers.
        optimizer: of its parameters; None: it has none to train.
        weights: in the versions that its schedule reads.
        criterion: of the last stage; None for others.

    Attributes:
        refusals: of gradients that the stage has not had, since they were last taken.
        skips_update: such a gradient would be in the next update.
        sends_found_inf: a gradient's last tensor is whether its microbatch's loss is not finite:
            0-d, bool, on the stage's device. The optimizer skips the update there, as it does with
            a GradScaler.
        num_updates: completed since the stage was built, and in what it has loaded.
        is_updating: an update has begun and not ended, or has failed.
    """

    skips_update = False
    sends_found_inf = False
    num_updates = 0
    is_updating = False
    head_loss: float | None = None  # of the last step, where the stage has a head of its own

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
        self.refusals: list[Refusal] = []
        self._in_flight: dict[int, _InFlight] = {}  # by microbatch
        self._found_inf: Tensor | None = None  # in the gradients of the next update
        self._num_optimized = len(self.optimized)

    @property
    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer holds."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def forward(self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter) -> Value:
        """Return the module's output for a microbatch; on the last stage, its loss.

        If that is not finite, or the target invalid, the backward will return a refusal.

        Raises:
            RuntimeError: gradients are disabled, or parameters were added to the optimizer.
            TypeError: the module's output is neither a tensor nor a tuple of tensors.
        """
        if self.optimizer is not None and not torch.is_grad_enabled():
            raise RuntimeError("step must not be called inside no_grad(), got gradients disabled")
        self._check_optimized()
        output: Value | Refusal | None = None
        with self.weights.forward(microbatch):
            if self._criterion is not None:
                output = find_target_refusal(splitter)
            if output is None:
                output = check_value(call_module(self.module, _as_non_leaf(inputs)))
                if self._criterion is not None:
                    output = self._criterion.loss_for_backward(microbatch, output, splitter)
        if isinstance(output, Refusal):
            self._in_flight[microbatch] = _InFlight(inputs, (), single=False, refusal=output)
            return ()
        single = isinstance(output, Tensor)
        in_flight = _InFlight(inputs, tensors_of(output), single)
        if self.sends_found_inf and self._criterion is not None:
            in_flight.found_inf = ~in_flight.outputs[0].detach().isfinite()
        self._in_flight[microbatch] = in_flight
        return output

    def evaluate(self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter) -> Value:
        """Run a forward on the live weights without a backward; none if the target is invalid."""
        if self._criterion is not None and splitter.find_target_error() is not None:
            return ()
        output = check_value(call_module(self.module, inputs))
        return (
            output
            if self._criterion is None
            else self._criterion.loss_for_report(microbatch, output, splitter)
        )

    def backward(self, microbatch: int, gradients: Value | Refusal | None) -> Value | Refusal:
        """Accumulate the parameters' gradients; return those of the differentiable inputs.

        Args:
            microbatch: which one.
            gradients: of the differentiable outputs; None on the last stage. Why there are none is
                returned instead of the inputs' gradients.
        """
        in_flight = self._in_flight.pop(microbatch)
        if in_flight.refusal is not None:
            gradients = in_flight.refusal
        if isinstance(gradients, Refusal):
            self.skip_update(gradients)
            self.weights.end_backward(microbatch)
            return gradients
        found_inf = in_flight.found_inf
        if self.sends_found_inf and gradients is not None:
            *rest, found_inf = tensors_of(gradients)
            gradients = tuple(rest)
        with self.weights.backward(microbatch):
            roots, output_grads = roots_of(in_flight.outputs, gradients)
            if roots:
                torch.autograd.backward(roots, output_grads)
        self.weights.end_backward(microbatch)
        grads = self._copy_if_shared([_grad_of(each) for each in differentiable(in_flight.inputs)])
        if found_inf is None:
            return grads
        self._found_inf = found_inf if self._found_inf is None else self._found_inf | found_inf
        return *grads, found_inf

    def backward_input(self, microbatch: int, gradients: Value | Refusal | None) -> Value | Refusal:
        """Run the first half of a backward; return the gradients of the inputs, as ``backward``."""
        in_flight = self._in_flight[microbatch]
        if in_flight.refusal is not None:
            gradients = in_flight.refusal
        if isinstance(gradients, Refusal):
            self.skip_update(gradients)
            in_flight.refusal, in_flight.outputs = gradients, ()
            return gradients
        inputs = differentiable(in_flight.inputs)
        with self.weights.backward(microbatch):
            roots, output_grads = roots_of(in_flight.outputs, gradients)
            grads, in_flight.weight_backward = backward_input(roots, output_grads, inputs)
        in_flight.outputs = ()
        pairs = zip(inputs, grads, strict=True)
        in_flight.input_grads = tuple(
            torch.zeros_like(each) if grad is None else grad for each, grad in pairs
        )
        return in_flight.input_grads

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of a backward, which accumulates the parameters' gradients."""
        in_flight = self._in_flight.pop(microbatch)
        if in_flight.refusal is not None:
            self.weights.end_backward(microbatch)
            return
        assert in_flight.weight_backward is not None, "a schedule runs backward_input first"
        with self.weights.backward(microbatch):
            in_flight.weight_backward.run()
        for parameter in self.optimized if in_flight.input_grads else ():
            gradient = parameter.grad
            if gradient is not None and _shares_storage(gradient, in_flight.input_grads):
                parameter.grad = gradient.clone()
        self.weights.end_backward(microbatch)

    def skip_update(self, refusal: Refusal) -> None:
        """Skip the next update, as a part of its gradient is refused."""
        self.skips_update = True
        self.refusals.append(refusal)

    def update(self) -> None:
        """Step the optimizer on the accumulated gradients, zero them, and step the scheduler.

        An update that is skipped counts for the versions of the weights, and only zeroes.
        """
        self._check_optimized()
        if self.skips_update:
            self.weights.skip_update()
        else:
            self.is_updating = True
            with self._skipping_on_device():
                self.weights.update()
            torch.clear_autocast_cache()  # its casts are of the old contents
        self._found_inf = None
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and not self.skips_update:
            self.scheduler.step()
        if not self.skips_update:
            self.num_updates += 1
        self.skips_update = self.is_updating = False

    @contextmanager
    def _skipping_on_device(self) -> Iterator[None]:
        """Have the optimizer skip a step inside if a loss of its gradients is not finite."""
        if self._found_inf is None or self.optimizer is None:
            yield
            return
        optimizer: Any = self.optimizer  # torch's name for what GradScaler sets
        optimizer.found_inf = self._found_inf.float()
        try:
            yield
        finally:
            del optimizer.found_inf

    def schedule_rates(self, scheduler_fn: SchedulerFactory) -> None:
        """Step a scheduler after each update, if the stage has an optimizer."""
        if self.optimizer is not None:
            self.scheduler = scheduler_fn(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module, the optimizer and the scheduler."""
        module = plain_keys(self.module.state_dict())
        state: dict[str, Any] = {"module": module, "optimizer": None, "updates": self.num_updates}
        if self.optimizer is not None:
            state["optimizer_kind"] = optimizer_kind(self.optimizer)
            state["optimizer"] = self.optimizer.state_dict()
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, after ``check_state``."""
        self.module.load_state_dict(keys_of(self.module, state["module"]))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.num_updates = state.get("updates", 0)  # which older versions did not save

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Check that ``load_state_dict`` can load a state; changes nothing.

        Raises:
            Exception: of any type, if it cannot.
        """
        own = plain_keys(self.module.state_dict())
        check_like(plain_keys(state["module"]), own, f"{path}.module")
        check_like(state.get("updates", 0), self.num_updates, f"{path}.updates")
        if self.optimizer is not None:
            kind, optimizer_path = state.get("optimizer_kind"), f"{path}.optimizer"
            check_optimizer_state(self.optimizer, state["optimizer"], kind, optimizer_path)
        if self.scheduler is not None and not isinstance(state["scheduler"], dict):
            raise ValueError(
                f"{path}.scheduler must be a dict, got {summarize(state['scheduler'])}"
            )

    def _check_optimized(self) -> None:
        """Check that the optimizer has no parameters of which the schedule keeps no versions."""
        if not isinstance(self.weights, LiveWeights) and self.optimizer is not None:
            groups = self.optimizer.param_groups
            num_added = sum(len(group["params"]) for group in groups) - self._num_optimized
            if num_added > 0:
                raise RuntimeError(
                    "the optimizer must hold the parameters that it was built with, as the "
                    f"schedule keeps versions of their weights, got {num_added} more; create a new "
                    "PipelineTrainer, or use a schedule that flushes"
                )

    def _copy_if_shared(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy those input gradients that share memory with a parameter's gradient.

        Autograd gives both the same memory where both come from views of one sum. The parameter's
        is about to be accumulated into while the input's is being sent.
        """
        if not gradients:
            return ()
        own = [parameter.grad for parameter in self.optimized if parameter.grad is not None]
        return tuple(each.clone() if _shares_storage(each, own) else each for each in gradients)


def build_stage(
    index: int,
    module: nn.Module,
    optimizer_fn: OptimizerFactory,
    schedule: Schedule,
    shape: PipelineShape,
    criterion: Criterion | None,
) -> Stage:
    """Build a stage with its optimizer, and weights in the versions that the schedule reads.

    Raises:
        ValueError: the schedule cannot predict the steps of this optimizer.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        return Stage(index, module, None, LiveWeights(None), criterion)
    optimizer, flat = build_optimizer(parameters, optimizer_fn)
    weight_predictor = schedule.weight_predictor(shape, index, optimizer, flat)
    weights: Weights = LiveWeights(weight_predictor)
    if not isinstance(schedule, Flushing):
        weights = StageWeights(
            flat,
            weight_predictor,
            schedule.versions(shape),
            index,
            lambda microbatch: schedule.update_index(shape, microbatch),
        )
    return Stage(index, module, optimizer, weights, criterion)


def build_optimizer(
    parameters: list[nn.Parameter], optimizer_fn: OptimizerFactory
) -> tuple[Optimizer, list[FlatBuckets]]:
    """Build the optimizer of a stage, and the flat buffers of its parameter groups."""
    optimizer = optimizer_fn(parameters)
    optimizer.zero_grad(set_to_none=True)  # gradients that a failed pipeline may have left
    if isinstance(optimizer, FusedOptimizer):
        optimizer.adopt()
        return optimizer, optimizer.lay_out()
    return optimizer, [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]


def check_value(output: Any) -> Value:
    """Return a layer's output after checking its type.

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


class _NonLeaf(torch.autograd.Function):
    """The same memory, but not a leaf: in-place operations may write to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _as_non_leaf(value: Inputs) -> Inputs:
    """Return a value as the previous layer would in one process, whose output is no leaf."""
    if isinstance(value, Arguments):  # of a batch: no tensor in them requires a gradient
        return value
    # Torch leaves Function.apply without types.
    result = tuple(_NonLeaf.apply(t) if t.requires_grad else t for t in tensors_of(value))  # type: ignore[no-untyped-call]
    return result[0] if isinstance(value, Tensor) else result


def differentiable(value: Inputs) -> list[Tensor]:
    """Return the tensors of a value that require a gradient; none of a batch's arguments do."""
    tensors = () if isinstance(value, Arguments) else tensors_of(value)
    return [tensor for tensor in tensors if tensor.requires_grad]


def _shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether another tensor begins in the memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    end = begin + storage.nbytes()
    return any(begin <= other.data_ptr() < end for other in others)


def _grad_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def roots_of(
    outputs: tuple[Tensor, ...], gradients: Value | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that require a gradient, and their gradients: 1 where None are given."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if gradients is None:
        return roots, [torch.ones_like(root) for root in roots]
    return roots, list(tensors_of(gradients))
