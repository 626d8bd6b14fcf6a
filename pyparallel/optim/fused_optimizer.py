"""The base class of the fused optimizers: flat buckets, one op for each in a step."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from typing_extensions import override

from ..training import FlatBuckets, join_buckets
from .bucket import MASTER, STEP, Bucket, Gradients, Span
from .validation import check_apart, check_options, check_parameters, check_unsharded

NO_LIMIT = 1 << 62
_ZERO = torch.zeros((), dtype=torch.float64, device="cpu")
_ONE = torch.ones((), dtype=torch.float64, device="cpu")
_NO_MASSES = torch.empty(0, dtype=torch.float64, device="cpu")

Group = dict[str, Any]


class FusedOptimizer(Optimizer):
    """An optimizer of torch whose step is one fused pass over each flat bucket of its parameters.

    A subclass derives from this class and then from torch's, whose constructor it has. The first
    step makes the parameters views of flat buckets, one for each parameter group, dtype and device,
    and lays out the optimizer's state likewise; the ``nn.Parameter`` objects stay the same. Views
    of their old memory no longer follow them, such as those that
    ``torch.distributed.optim.ZeroRedundancyOptimizer`` makes with
    ``parameters_as_bucket_view=True``. Gradients stay where autograd has put them and are not
    written, also not unscaled under ``GradScaler``; a parameter without one is not stepped.

    A trainer of pyparallel takes the buckets over (``lay_out``, ``adopt``) and has ``step_bucket``
    also mix received messages in, write the next message and predict weights, in the same pass.
    """

    __signature__: inspect.Signature
    nonfinite: Tensor | None = None
    """Counter of the elements with a gradient that is not finite, 0-d float64 where the parameters
    are: they are not stepped, and their number is added to it in the same pass. None: all are."""

    master_weights = False
    """Whether 16-bit parameters are stepped in float32 copies, and rounded from them."""

    # GradScaler then passes its scale, and whether it found an inf, without reading them.
    _step_supports_amp_scaling = True
    _weights: list[FlatBuckets] | None = None
    _buckets: Sequence[Bucket] = ()
    _laid_out: Sequence[Sequence[Tensor]] = ()  # the parameters of all groups, then
    _outside: Sequence[Tensor] = ()  # those of them that are in no bucket
    _is_adopted = False
    _step_buckets: "Callable[[FusedOptimizer], None] | None" = None

    def __init__(self, *args: Any, master_weights: bool = False, **kwargs: Any) -> None:
        self.master_weights = master_weights
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Show the arguments of torch's constructor, for help() and editors."""
        super().__init_subclass__()
        theirs = inspect.signature(super().__init__)
        _, *torchs = theirs.parameters.values()
        ours = inspect.signature(FusedOptimizer).parameters["master_weights"]
        cls.__signature__ = theirs.replace(parameters=[*torchs, ours])

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as torch's optimizers do."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        if not self._is_adopted:  # a trainer raises in its next step
            self._weights = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_weights": self.master_weights}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch's optimizers do; with ``master_weights`` float32 stays float32."""
        super().load_state_dict(state_dict)
        if not self.master_weights:
            return
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                # Torch has cast it to the dtype of the parameter.
                if name != STEP and isinstance(value, Tensor) and value.dtype == torch.float32:
                    copied = value.to(parameter.device, copy=True)
                    self.state[parameter][name] = copied

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            self._check_group(group)
        super().__setstate__(state)
        for bucket in self._buckets:
            bucket.drop_state()

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_options(group, type(self).__name__)
        if not self._is_adopted and (self._weights is None or self._has_changed()):
            parameters = (p for group in self.param_groups for p in group["params"])
            check_unsharded(parameters, type(self).__name__)
            self.lay_out()
        for bucket in self._buckets:
            bucket.collect_gradients()
        if self._step_buckets is not None:
            self._step_buckets(self)
        else:
            for index in range(self.num_buckets):
                self.step_bucket(index)
        return loss

    @_disable_dynamo  # backends cannot trace parameters that become views
    @torch.inference_mode(False)
    @torch.no_grad()
    def lay_out(self, cap_bytes: int = NO_LIMIT) -> list[FlatBuckets]:
        """Make the parameters that require gradients views of new flat buffers, and return these.

        An entry has those of a group, of about ``cap_bytes`` each, numbered in this order. Two
        parameters that share memory are a ValueError.
        """
        chosen: list[list[nn.Parameter]] = []
        for group in self.param_groups:
            self._check_group(group)
            chosen.append([p for p in group["params"] if _may_have_gradient(p)])
        check_apart(chain(*chosen))
        self._laid_out = [list(group["params"]) for group in self.param_groups]
        inside = set(map(id, chain(*chosen)))
        self._outside = [p for p in chain(*self._laid_out) if id(p) not in inside]
        self._weights, buckets = [], []
        for index, parameters in enumerate(chosen):
            weights = [
                FlatBuckets([p for p in parameters if p.device == device], cap_bytes)
                for device in dict.fromkeys(parameter.device for parameter in parameters)
            ]
            self._weights.append(join_buckets(weights))
            count = len(self._weights[-1].buffers)
            buckets += [
                Bucket(self, index, self._weights[-1], each, master_weights=self.master_weights)
                for each in range(count)
            ]
        self._buckets = buckets
        return self._weights

    def adopt(self, step_buckets: "Callable[[FusedOptimizer], None] | None" = None) -> None:
        """Give the buckets to a trainer, whose ``step_buckets`` steps each once; None: all step."""
        self._is_adopted, self._step_buckets = True, step_buckets

    def release(self) -> None:
        """Take the buckets back from a trainer."""
        self._is_adopted, self._step_buckets = False, None

    @property
    def ends_with_pass(self) -> bool:
        """Whether a step ends with the pass over the buckets: nothing writes parameters after it.

        A hook may, and the step of a subclass; then what the pass would write of the new
        parameters, a prediction or a message, has to be written after the step.
        """
        has_hooks = bool(self._optimizer_step_post_hooks or _global_optimizer_post_hooks)
        return not has_hooks and inspect.unwrap(self.step) is inspect.unwrap(FusedOptimizer.step)

    @property
    def num_buckets(self) -> int:
        """The number of buckets, 0 before ``lay_out``."""
        return len(self._buckets)

    def step_bucket(
        self,
        index: int,
        *,
        mass: Tensor | None = None,
        messages: Sequence[Tensor] = (),
        masses: Tensor | None = None,
        mix_after: bool = False,
        horizon: int = 0,
        prediction: Tensor | None = None,
        message: Tensor | None = None,
    ) -> None:
        """Step bucket ``index`` in one pass; arguments are those of ``ops.adamw_step_``."""
        bucket = self._buckets[index]
        group = self.param_groups[bucket.group]
        gradients = bucket.take_gradients()
        if bucket.has_masters:
            assert message is None, "a trainer that mixes refuses master weights"
            bucket.update_masters()
            bucket.publish(MASTER)
            message = bucket.values
        spans = self._begin_step(bucket, group, len(gradients.tensors))
        scale, found_inf = self._amp()
        ahead = as_double(horizon) if horizon else _ZERO
        for span in spans:
            begin, end, _ = span
            # The mass is updated once: by the last part.
            own = _ONE if mass is None else mass if span is spans[-1] else mass.clone()
            mixing = (
                own,
                [part(each, span) for each in messages],
                _NO_MASSES if masses is None else masses,
            )
            outputs = (out if out is None else out[begin:end] for out in (prediction, message))
            self._step_span(
                bucket,
                group,
                span,
                gradients if len(spans) == 1 else gradients.within(begin, end),
                (*mixing, mix_after, scale, found_inf, self.nonfinite, ahead, *outputs),
            )
        self._end_step(bucket, group, found_inf)

    @torch.no_grad()
    def predict_bucket(self, index: int, horizon: int, out: Tensor) -> None:
        """Write a bucket's parameters predicted ``horizon`` steps ahead to ``out``, (n,)."""
        bucket = self._buckets[index]
        group = self.param_groups[bucket.group]
        bucket.update_masters()
        self._predict(bucket, group, as_double(horizon), out)

    @property
    @abstractmethod
    def skips_on_device(self) -> bool:
        """Return whether a GPU's ``found_inf`` skips a step without a wait of the host."""

    @abstractmethod
    def _begin_step(self, bucket: Bucket, group: Group, num_gradients: int) -> Sequence[Span]:
        """Prepare the state of a step; return the spans that need a call each."""

    @abstractmethod
    def _step_span(
        self, bucket: Bucket, group: Group, span: Span, gradients: Gradients, rest: tuple[Any, ...]
    ) -> None:
        """Call the op on a span; ``rest`` are the op's arguments from ``mass`` on."""

    @abstractmethod
    def _end_step(self, bucket: Bucket, group: Group, found_inf: Tensor | None) -> None:
        """Enter new state, or count the step back if GradScaler found an inf: it was skipped."""

    @abstractmethod
    def _predict(self, bucket: Bucket, group: Group, horizon: Tensor, out: Tensor) -> None:
        """Predict a bucket's parameters."""

    def _check_group(self, group: Group) -> None:
        """Raise a ValueError on what torch's optimizer can step and this one cannot."""
        check_options(group, type(self).__name__)
        check_parameters(group["params"], type(self).__name__)

    def _has_changed(self) -> bool:
        """Return whether parameters are others, have other storage, or new ones have gradients."""
        now = [group["params"] for group in self.param_groups]
        return (
            list(map(len, now)) != list(map(len, self._laid_out))
            or not all(map(is_, chain(*now), chain(*self._laid_out)))
            or any(parameter.grad is not None for parameter in self._outside)
            or not all(bucket.is_in_place() for bucket in self._buckets)
        )

    def _amp(self) -> tuple[Tensor | None, Tensor | None]:
        """Return GradScaler's scale and whether it found an inf; None where it is not in use."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        # Without any gradient torch sets numbers.
        return (
            scale if isinstance(scale, Tensor) else None,
            found_inf if isinstance(found_inf, Tensor) else None,
        )


def part(flat: Tensor, span: Span) -> Tensor:
    """Return the span's elements of a flat buffer."""
    whole = span.begin == 0 and span.end == flat.numel()
    return flat if whole else flat[span.begin : span.end]


def as_double(number: float | Tensor) -> Tensor:
    """Return a number, or a tensor of one element, as a 0-d float64 tensor on its device."""
    if isinstance(number, Tensor):
        return (number.reshape(()) if number.dim() else number).to(torch.float64)
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _may_have_gradient(parameter: Tensor) -> bool:
    return (parameter.requires_grad and not is_lazy(parameter)) or parameter.grad is not None
