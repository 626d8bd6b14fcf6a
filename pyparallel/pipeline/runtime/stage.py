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
    Value,
    check_like,
    check_optimizer_state,
    keys_of,
    optimizer_kind,
    plain_keys,
    summarize,
    tensors_of,
    uncompiled,
)
from ...comm.wire_format import Refusal
from .clipping import LastNormClipper
from .inputs import Arguments, Inputs, call_module
from .loss import Criterion, find_target_refusal
from .microbatches import MicrobatchSplitter
from .preserve_state import check_autocast, outside_autocast
from .split_backward import WeightBackward, backward_input
from .stage_layers import owned_parameters
from .stage_weights import LiveWeights, Weights

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
        optimizers: of its parameters; none if it has none to train.
        weights: in the versions that its schedule reads.
        criterion: of the last stage; None for others.

    Attributes:
        refusals: of gradients that the stage has not had, since they were last taken.
        skips_update: such a gradient would be in the next update.
        scales_loss: there is a loss scale, which float16 needs.
        sends_found_inf: a gradient's last tensor is whether its microbatch's loss is not finite:
            0-d, bool, on the stage's device. The optimizer skips the update there, as it does with
            a GradScaler.
        clipper: of its updates; None: they are not clipped, or all stages' together.
        num_updates: completed since the stage was built, and in what it has loaded.
        num_skipped: updates that were skipped since the stage was built, but on the device.
        is_updating: an update has begun and not ended, or has failed.
    """

    skips_update = False
    scales_loss = False
    sends_found_inf = False
    clipper: LastNormClipper | None = None
    num_updates = 0
    num_skipped = 0
    is_updating = False
    head_loss: float | None = None  # of the last step, where the stage has a head of its own

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        weights: Weights,
        criterion: Criterion | None,
    ) -> None:
        self.index = index
        self.module = module
        self.optimizers = list(optimizers)
        self.schedulers: list[LRScheduler] = []
        self.weights = weights
        self._criterion = criterion
        self.refusals: list[Refusal] = []
        self._in_flight: dict[int, _InFlight] = {}  # by microbatch
        self._found_inf: Tensor | None = None  # in the gradients of the next update
        self._num_optimized = len(self.optimized)
        named = owned_parameters(module)
        self._frozen = {name: each for name, each in named.items() if not each.requires_grad}

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer; None if there is none to train.

        Raises:
            RuntimeError: there are several.
        """
        if len(self.optimizers) > 1:
            raise RuntimeError(
                f"optimizer must be read of a stage with one, got {len(self.optimizers)}; read "
                "optimizers"
            )
        return self.optimizers[0] if self.optimizers else None

    @property
    def optimized(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers hold."""
        groups = (group for each in self.optimizers for group in each.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def gradients(self) -> list[Tensor]:
        """Return the accumulated gradients of the parameters that have some."""
        return [each.grad for each in self.optimized if each.grad is not None]

    def forward(self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter) -> Value:
        """Return the module's output for a microbatch; on the last stage, its loss.

        If that is not finite, or the target invalid, the backward will return a refusal.

        Raises:
            RuntimeError: gradients are disabled, or autocast is to float16, or parameters were
                unfrozen, or added to the optimizer.
            TypeError: the module's output is neither a tensor nor a tuple of tensors.
        """
        if self.optimizers and not torch.is_grad_enabled():
            raise RuntimeError("step must not be called inside no_grad(), got gradients disabled")
        if not self.scales_loss:
            check_autocast()
        self._check_optimized()
        if self.clipper is not None and self.index and not isinstance(inputs, Arguments):
            inputs = self.clipper.unpack_activations(inputs)
        output: Value | Refusal | None = None
        with self.weights.forward(microbatch):
            if self._criterion is not None:
                output = find_target_refusal(splitter)
            if output is None:
                output = check_value(call_module(self.module, _as_non_leaf(inputs)), self.module)
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
        if self.clipper is not None and self._criterion is None:
            return self.clipper.pack_activations(output)
        return output

    def evaluate(self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter) -> Value:
        """Run a forward on the live weights without a backward; none if the target is invalid."""
        if self._criterion is not None and splitter.find_target_error() is not None:
            return ()
        output = self.predict(inputs)
        return (
            output
            if self._criterion is None
            else self._criterion.loss_for_report(microbatch, output, splitter)
        )

    def predict(self, inputs: Inputs) -> Value:
        """Run a forward on the live weights without a backward or a loss."""
        return check_value(call_module(self.module, inputs), self.module)

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
        if self.clipper is not None and gradients is not None:
            gradients = self.clipper.unpack_gradients(microbatch, gradients)
        with self.weights.backward(microbatch), outside_autocast():
            roots, output_grads = roots_of(in_flight.outputs, gradients)
            if roots:
                torch.autograd.backward(roots, output_grads)
        self.weights.end_backward(microbatch)
        grads = self._copy_if_shared([_grad_of(each) for each in differentiable(in_flight.inputs)])
        if self.clipper is not None:
            own = [each.grad for each in self.optimized]
            grads = self.clipper.pack_gradients(grads, own, microbatch, in_flight.outputs)
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
        with self.weights.backward(microbatch), outside_autocast():
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
        with self.weights.backward(microbatch), outside_autocast():
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
        """Step the optimizers on the accumulated gradients, zero them, and step the schedulers.

        An update that is skipped counts for the versions of the weights, and only zeroes.
        """
        self._check_optimized()
        if self.skips_update:
            self.num_skipped += 1
            self.weights.skip_update()
        else:
            self.is_updating = True
            if self.clipper is not None:
                self.clipper.clip_(self.gradients, self._found_inf)
            with self._skipping_on_device():
                self.weights.update()
            torch.clear_autocast_cache()  # its casts are of the old contents
        self._found_inf = None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if not self.skips_update:
            for scheduler in self.schedulers:
                scheduler.step()
            self.num_updates += 1
        self.skips_update = self.is_updating = False

    @contextmanager
    def _skipping_on_device(self) -> Iterator[None]:
        """Have the optimizers skip a step inside if a loss of its gradients is not finite."""
        if self._found_inf is None:
            yield
            return
        optimizers: list[Any] = self.optimizers  # found_inf: torch's name for what GradScaler sets
        for each in optimizers:
            each.found_inf = self._found_inf.float()
        try:
            yield
        finally:
            for each in optimizers:
                del each.found_inf

    def schedule_rates(self, scheduler_fn: SchedulerFactory) -> None:
        """Step a scheduler of each optimizer after each update."""
        self.schedulers = [scheduler_fn(optimizer) for optimizer in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module, the optimizers and the schedulers."""
        module = plain_keys(self.module.state_dict())
        state: dict[str, Any] = {"module": module, "optimizer": None, "updates": self.num_updates}
        if self.optimizers:
            kinds = [optimizer_kind(optimizer) for optimizer in self.optimizers]
            state["optimizer_kind"] = _one_or_all(kinds)
            state["optimizer"] = _one_or_all([each.state_dict() for each in self.optimizers])
        if self.schedulers:
            state["scheduler"] = _one_or_all([each.state_dict() for each in self.schedulers])
        if self.clipper is not None and self.clipper.last is not None:
            state["squared_norms"] = self.clipper.last
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, after ``check_state``."""
        self.module.load_state_dict(keys_of(self.module, state["module"]))
        if self.optimizers:
            for optimizer, saved in zip(self.optimizers, _all(state["optimizer"]), strict=True):
                optimizer.load_state_dict(saved)
        if self.schedulers:
            for scheduler, saved in zip(self.schedulers, _all(state["scheduler"]), strict=True):
                scheduler.load_state_dict(saved)
        self.num_updates = state.get("updates", 0)  # which older versions did not save
        if self.clipper is not None:
            self.clipper.last = state.get("squared_norms")

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Check that ``load_state_dict`` can load a state; changes nothing.

        Raises:
            Exception: of any type, if it cannot.
        """
        own = plain_keys(self.module.state_dict())
        check_like(plain_keys(state["module"]), own, f"{path}.module")
        check_like(state.get("updates", 0), self.num_updates, f"{path}.updates")
        if self.clipper is not None and "squared_norms" in state:
            norms = torch.zeros(len(self.optimized), dtype=torch.float64)
            check_like(state["squared_norms"], norms, f"{path}.squared_norms")
        if self.optimizers:
            self._check_optimizer_states(state, f"{path}.optimizer")
        if self.schedulers:
            saved = _all(state["scheduler"])
            if len(saved) != len(self.schedulers) or not all(isinstance(s, dict) for s in saved):
                what = "a dict" if len(self.schedulers) == 1 else f"{len(self.schedulers)} dicts"
                raise ValueError(
                    f"{path}.scheduler must be {what}, got {summarize(state['scheduler'])}"
                )

    def _check_optimizer_states(self, state: dict[str, Any], path: str) -> None:
        saved, kinds = _all(state["optimizer"]), _all(state.get("optimizer_kind"))
        if len(saved) != len(self.optimizers) or len(kinds) != len(saved):
            mine = ", ".join(map(optimizer_kind, self.optimizers))
            raise ValueError(
                f"{path} must be of the same optimizers, {mine}, got {', '.join(map(str, kinds))}"
            )
        for number, optimizer in enumerate(self.optimizers):
            own_path = path if len(saved) == 1 else f"{path}.{number}"
            check_optimizer_state(optimizer, saved[number], kinds[number], own_path)

    def _check_optimized(self) -> None:
        """Check that the optimizers have all parameters, and none without versions of its weights.

        Raises:
            RuntimeError: parameters were unfrozen, or added to an optimizer.
        """
        thawed = [name for name, each in self._frozen.items() if each.requires_grad]
        if thawed:
            held = {id(parameter) for parameter in self.optimized}
            thawed = [name for name in thawed if id(self._frozen[name]) not in held]
        if thawed:
            raise RuntimeError(
                "parameters that train must be held by an optimizer of their stage, got "
                f"{thawed[0]}, which was unfrozen after the stage was built; create a new "
                "PipelineTrainer, or freeze what is to train later only after it was built"
            )
        if not isinstance(self.weights, LiveWeights):
            num_added = len(self.optimized) - self._num_optimized
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
        own = self.gradients
        return tuple(each.clone() if _shares_storage(each, own) else each for each in gradients)


def _one_or_all(values: list[Any]) -> Any:
    """Return the only value itself, as states of one optimizer have always been."""
    return values[0] if len(values) == 1 else values


def _all(saved: Any) -> list[Any]:
    return saved if isinstance(saved, list) else [saved]


def check_value(output: Any, module: nn.Module | None = None) -> Value:
    """Return a layer's output after checking its type.

    Args:
        output: the layer's.
        module: of the stage, whose last layer it is, to name it.

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
    whose = "a layer's output"
    if isinstance(module, nn.Sequential) and len(module):
        name, last = list(module.named_children())[-1]
        whose = f"the output of layers[{name}], {type(uncompiled(last)).__name__},"
    raise TypeError(
        f"{whose} must be a tensor or a tuple of tensors, got {what}; return the tensors "
        "themselves, or wrap the layer in a module that does"
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
