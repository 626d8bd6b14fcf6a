"""A stage: its module, weights, optimizer and microbatches in flight."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...training import (
    check_like,
    check_optimizer_kinds,
    check_optimizer_state,
    keys_of,
    load_copy,
    optimizer_kind,
    plain_keys,
    summarize,
)
from ...training.arguments import require
from ..messages import Value, tensors_of
from ..messages.format import Refusal
from .clipping import LastNormClipper
from .inputs import Arguments, Inputs, call_module
from .loss import Criterion, find_target_refusal
from .microbatches import MicrobatchSplitter
from .options import StageOptions
from .preserve_state import check_autocast, outside_autocast
from .replicated_predictor import ReplicatedPredictor
from .split_backward import WeightBackward, backward_input
from .stage_layers import owned_parameters
from .stage_weights import LiveWeights, Weights
from .values import (
    ExtraTensors,
    as_non_leaf,
    check_value,
    device_of,
    shares_storage,
)

SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass
class _InFlight:
    """A microbatch between its forward and the end of its backward."""

    inputs: list[Tensor]  # those that require a gradient
    outputs: tuple[Tensor, ...]
    single: bool
    weight_backward: WeightBackward | None = None
    input_grads: tuple[Tensor, ...] = ()
    found_inf: Tensor | None = None  # 0-d bool: its loss is not finite; None: known to the host
    refusal: Refusal | None = None  # why it has no gradient; then it has no outputs either


class Stage:
    """A part of the model.

    Without parameters to train it has no optimizers; only the last one has a criterion.
    ``schedulers``, one for each optimizer or none, are stepped after each update. Without a
    ``clipper`` updates are not clipped, or those of all stages together. ``replicated`` averages it
    with the same stage of other replicas; None: there are none.
    """

    skips_update = False  # a refused gradient would be in the next one
    num_updates = 0  # completed since the stage was built, and in what it has loaded
    num_skipped = 0  # since the stage was built, but on the device
    is_updating = False  # one has begun and not ended, or has failed
    head_loss: float | None = None  # of the last step, where the stage has a head of its own

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        weights: Weights,
        criterion: Criterion | None,
        options: StageOptions = StageOptions(),  # noqa: B008 - immutable
        schedulers: Sequence[LRScheduler] = (),
        replicated: ReplicatedPredictor | None = None,
    ) -> None:
        self.index = index
        self.replicated = replicated
        self.module = module
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.weights = weights
        self.options = options
        self.clipper = None if options.max_norm is None else LastNormClipper(options.max_norm)
        self._extras: ExtraTensors | None = None
        if self.clipper is not None or options.sends_found_inf:
            self._extras = ExtraTensors(self.clipper, options)
        self._criterion = criterion
        self.refusals: list[Refusal] = []  # of gradients it has not had, since last taken
        self._in_flight: dict[int, _InFlight] = {}  # by microbatch
        self._found_inf: Tensor | None = None  # in the gradients of the next update
        self._num_optimized = len(self.optimized)
        self._parts: dict[str, nn.Module] = {"": module}  # with parameters, by their prefix
        self._known: list[int] = []  # ids of all parameters when they were last looked for
        self._outside: dict[str, nn.Parameter] = {}  # those that no optimizer held then

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer, or None if nothing is trained; a RuntimeError if there are more."""
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
        """Return a microbatch's output, or its loss; if that is refused, backward says why."""
        if self.optimizers and not torch.is_grad_enabled():
            raise RuntimeError("step must not be called inside no_grad(), got gradients disabled")
        is_first = microbatch == splitter.first
        if is_first:
            if self.options.loss_scale is None:
                check_autocast()
            self._look_for_parameters()
            _check_optimized(self)
        if self._extras is not None and self.index:
            assert not isinstance(inputs, Arguments), "which are those of stage 0"
            inputs = self._extras.take_from_inputs(inputs)
        received = () if isinstance(inputs, Arguments) else tensors_of(inputs)
        leaves = [each for each in received if each.requires_grad]
        output: Value | Refusal | None = None
        with self.weights.forward(microbatch):
            if self._criterion is not None:
                output = find_target_refusal(splitter)
            if output is None:
                refuse = splitter.refuse_inputs if is_first and not self.index else None
                found = call_module(self.module, as_non_leaf(inputs), refuse)
                output = check_value(found, self.module)
                if self._criterion is not None:
                    output = self._criterion.loss_for_backward(microbatch, output, splitter)
        if isinstance(output, Refusal):
            self._in_flight[microbatch] = _InFlight(leaves, (), single=False, refusal=output)
            return ()
        outputs, found_inf = tensors_of(output), None
        if self._criterion is not None and self.options.sends_found_inf:
            found_inf = ~outputs[0].detach().isfinite()
        single = isinstance(output, Tensor)
        self._in_flight[microbatch] = _InFlight(leaves, outputs, single, found_inf=found_inf)
        if self._extras is None or self._criterion is not None:
            return output
        return self._extras.append_to_output(output)

    def evaluate(
        self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter
    ) -> Value | Refusal:
        """Run a forward on the live weights without a backward; or return why there is no loss."""
        if self._criterion is None:
            return self.predict(microbatch, inputs, splitter)
        if (refusal := find_target_refusal(splitter)) is not None:
            return refusal
        output = self.predict(microbatch, inputs, splitter)
        return self._criterion.loss_for_report(microbatch, output, splitter)

    def predict(self, microbatch: int, inputs: Inputs, splitter: MicrobatchSplitter) -> Value:
        """Run a forward on the live weights without a backward or a loss."""
        may_refuse = not self.index and microbatch == splitter.first
        refuse = splitter.refuse_inputs if may_refuse else None
        return check_value(call_module(self.module, inputs, refuse), self.module)

    def backward(self, microbatch: int, gradients: Value | Refusal | None) -> Value | Refusal:
        """Accumulate the parameters' gradients; return those of the inputs, or why there are none.

        ``gradients`` are of the differentiable outputs; None on the last stage.
        """
        in_flight = self._in_flight.pop(microbatch)
        if in_flight.refusal is not None:
            gradients = in_flight.refusal
        if isinstance(gradients, Refusal):
            self.skip_update(gradients)
            self.weights.end_backward(microbatch)
            return gradients
        found_inf = in_flight.found_inf
        if self._extras is not None and gradients is not None:
            gradients, found_inf = self._extras.take_from_gradients(gradients, microbatch)
        unset = [p for p in self.optimized if p.grad is None] if in_flight.inputs else []
        with self.weights.backward(microbatch), outside_autocast():
            roots = [output for output in in_flight.outputs if output.requires_grad]
            if roots:  # without gradients a loss, whose own is 1
                output_grads = None if gradients is None else tensors_of(gradients)
                torch.autograd.backward(roots, output_grads)
        self.weights.end_backward(microbatch)
        grads = tuple(
            torch.zeros_like(each) if each.grad is None else each.grad for each in in_flight.inputs
        )
        # Of views of one sum an input's gradient shares memory with a parameter's new one, which is
        # about to be accumulated into while the input's is being sent.
        own = [p.grad for p in unset if p.grad is not None]
        grads = tuple(grad.clone() if shares_storage(grad, own) else grad for grad in grads)
        if self._extras is None:
            return grads
        if found_inf is not None:
            self._found_inf = found_inf if self._found_inf is None else self._found_inf | found_inf
        return self._extras.append_to_gradients(
            grads, microbatch, self.optimized, device_of(in_flight.outputs), found_inf
        )

    def backward_input(self, microbatch: int, gradients: Value | Refusal | None) -> Value | Refusal:
        """Run the first half of a backward; return the gradients of the inputs, as ``backward``."""
        in_flight = self._in_flight[microbatch]
        if in_flight.refusal is not None:
            gradients = in_flight.refusal
        if isinstance(gradients, Refusal):
            self.skip_update(gradients)
            refused = _InFlight(in_flight.inputs, (), in_flight.single, refusal=gradients)
            self._in_flight[microbatch] = refused
            return gradients
        inputs = in_flight.inputs
        with self.weights.backward(microbatch), outside_autocast():
            roots = [output for output in in_flight.outputs if output.requires_grad]
            ones = [torch.ones_like(root) for root in roots]
            output_grads = ones if gradients is None else tensors_of(gradients)
            found, rest = backward_input(roots, output_grads, inputs)
        pairs = zip(inputs, found, strict=True)
        grads = tuple(torch.zeros_like(each) if grad is None else grad for each, grad in pairs)
        halved = _InFlight(inputs, (), in_flight.single, rest, grads)
        self._in_flight[microbatch] = halved
        return grads

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
            if gradient is not None and shares_storage(gradient, in_flight.input_grads):
                parameter.grad = gradient.clone()
        self.weights.end_backward(microbatch)

    def skip_update(self, refusal: Refusal | None = None) -> None:
        """Skip the next update, as a part of its gradient is refused, or infinite by its scale."""
        self.skips_update = True
        if refusal is not None:
            self.refusals.append(refusal)

    def update(self) -> None:
        """Step the optimizers on the gradients, and the schedulers; or skip, and only zero them."""
        _check_optimized(self)
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

    def state_dict(self, *, is_rescued: bool = False) -> dict[str, Any]:
        """Return the state of the module, the optimizers and the schedulers.

        After a failure, ``is_rescued``, without that of the averages with other replicas.
        """
        module = plain_keys(self.module.state_dict())
        state: dict[str, Any] = {"module": module, "updates": self.num_updates}
        if self.optimizers:
            state["optimizer_kinds"] = [optimizer_kind(each) for each in self.optimizers]
            state["optimizers"] = [each.state_dict() for each in self.optimizers]
        if self.schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        if self.clipper is not None and self.clipper.last is not None:
            state["squared_norms"] = self.clipper.last
        if self.replicated is not None and not is_rescued:
            state["averager"] = self.replicated.averager.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], *, is_rescued: bool = False) -> None:
        """Load what ``state_dict`` returned, after ``check_state``.

        ``is_rescued``: on a rank at least; all replicas then begin again with the first one's.
        """
        self.module.load_state_dict(keys_of(self.module, state["module"]))
        if self.optimizers:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                load_copy(optimizer, saved)
        if self.schedulers:
            for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
                load_copy(scheduler, saved)
        if self.replicated is not None and is_rescued:
            self.replicated.restart()
        elif self.replicated is not None:
            self.replicated.averager.load_state_dict(state["averager"])
        self.load_updates(state["updates"], state.get("squared_norms"))

    def load_updates(self, num_updates: int, squared_norms: Tensor | None) -> None:
        """Go on after so many updates, the last of them with these norms of its gradients."""
        self.num_updates = num_updates
        if self.clipper is not None:
            self.clipper.resume(squared_norms)

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Raise an error, of any type, if ``load_state_dict`` cannot load a state."""
        own = plain_keys(self.module.state_dict())
        check_like(state["module"], own, f"{path}.module")
        check_like(state["updates"], self.num_updates, f"{path}.updates")
        if self.clipper is not None and "squared_norms" in state:
            norms = torch.zeros(len(self.optimized), dtype=torch.float64, device="cpu")
            check_like(state["squared_norms"], norms, f"{path}.squared_norms")
        if self.replicated is not None and not state.get("rescued", False):
            self.replicated.averager.check_state(state["averager"])
        _check_training_state(self, state, path)

    def _look_for_parameters(self) -> None:
        """Find the parameters that no optimizer holds: layers may have got some since a step."""
        modules = (module for part in self._parts.values() for module in part.modules())
        known = [id(parameter) for module in modules for parameter in module._parameters.values()]
        if known != self._known:
            self._known, held = known, {id(each) for each in self.optimized}
            named = ((prefix, owned_parameters(part)) for prefix, part in self._parts.items())
            every = {prefix + name: p for prefix, own in named for name, p in own.items()}
            self._outside = {name: p for name, p in every.items() if id(p) not in held}


def _check_optimized(stage: Stage) -> None:
    thawed = [name for name, each in stage._outside.items() if each.requires_grad]
    if thawed:
        held = {id(parameter) for parameter in stage.optimized}
        thawed = [name for name in thawed if id(stage._outside[name]) not in held]
    if thawed:
        raise RuntimeError(
            "parameters that train must be held by an optimizer of their stage, got "
            f"{thawed[0]}, which was unfrozen or added after the stage was built; create a new "
            "PipelineTrainer, or freeze what is to train later only after it was built"
        )
    if not isinstance(stage.weights, LiveWeights):
        num_added = len(stage.optimized) - stage._num_optimized
        if num_added > 0:
            raise RuntimeError(
                "the optimizer must hold the parameters that it was built with, as the "
                f"schedule keeps versions of their weights, got {num_added} more; create a new "
                "PipelineTrainer, or use a schedule that flushes"
            )


def _check_training_state(stage: Stage, state: dict[str, Any], path: str) -> None:
    """Raise an error, of any type, if a stage's optimizers and schedulers cannot load a state."""
    if stage.optimizers:
        check_optimizer_kinds(stage.optimizers, state["optimizer_kinds"])
        for number, optimizer in enumerate(stage.optimizers):
            saved = state["optimizers"][number]
            check_optimizer_state(optimizer, saved, f"{path}.optimizers.{number}")
    if stage.schedulers:
        saved, count = state["schedulers"], len(stage.schedulers)
        fits = isinstance(saved, list) and len(saved) == count
        fits = fits and all(isinstance(each, dict) for each in saved)
        require(fits, f"{path}.schedulers must be {count} dicts", summarize(saved))
