"""Compressed gradients in DistributedDataParallel: a communication hook and its state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # an implicit re-export
from torch.futures import Future

from ...comm import (
    check_consistent_across_ranks,
    check_on_all_ranks,
    new_group,
    plain_name,
    uncompiled,
)
from ...comm.arguments import NonFinitePolicy, find_policy_error
from ...comm.collectives import CommStats
from ...comm.errors import NonFiniteError, PeerError
from ..compressor import AttachPoint, Compressor, validation_error_at
from ..corrupt_messages import CorruptMessageError
from ..layout import BufferLayout
from ..state_store import StateStore, steps_of
from ..wrappers.finite import Finite
from .bucket_reducer import BucketReducer
from .ddp_compiled import CustomOp, StepDetector
from .end_of_backward import at_end_of_backward, before_end_of_backward, is_in_backward

_RAISED_ON_ALL_RANKS = (CorruptMessageError, NonFiniteError)
Hook = Callable[["GradientCompression", GradBucket], Future[Tensor]]


class GradientCompression:
    """State of the DDP hook that `ddp_hook` returns.

    A DDP keeps its first hook for good; to change the compressor during a run, use `Switch`.

    Args:
        compressor: the compressor of all gradients.
        model: the module inside DDP, whose parameter names are the keys of the state; None:
            parameters are numbered in the order of their first gradients.
        process_group: DDP's process group; None: the default group.
        nonfinite: what is done about gradients with a nan or an inf.
    """

    def __init__(
        self,
        compressor: Compressor,
        model: nn.Module | None,
        process_group: dist.ProcessGroup | None,
        nonfinite: NonFinitePolicy = "raise",
    ) -> None:
        problem = validation_error_at(AttachPoint.DDP, compressor) or find_policy_error(nonfinite)
        fields = [("compressor", repr(compressor)), ("nonfinite", str(nonfinite))]
        check_consistent_across_ranks(fields, problem, process_group)
        named = [] if model is None else [(n, p) for n, p in named_parameters(model)]
        self._names = {id(parameter): name for name, parameter in named}
        self._is_named = model is not None
        # DDP then has all-reduces of its own; only a DDP tells.
        self._may_find_unused = getattr(model, "find_unused_parameters", True)
        layout = BufferLayout.of((n, _in_memory_order(p)) for n, p in named) if named else None
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._store = StateStore(compressor, rank, size, layout)
        own = new_group(range(size), process_group)
        checks_itself = nonfinite == "raise" and isinstance(compressor, Finite)
        self._reducer = BucketReducer(own, self._store, "allow" if checks_itself else nonfinite)
        self._layouts: dict[tuple[int, ...], BufferLayout] = {}
        self._started: list[Future[Tensor]] = []  # of the current step
        self._last = CommStats()
        self._step = 0
        self._step_detector = StepDetector()
        self._custom_op = CustomOp(self._reduce_one)
        self.reduce_one = self._custom_op.op

    @property
    def last_step(self) -> CommStats:
        """Bytes and seconds of this rank in the last finished step.

        If DDP is compiled with its Python reducer: of the current step so far.
        """
        return self._last

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all residuals; 0 without error feedback."""
        return self._store.norm("residual")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as `StateStore.state_dict`; call it between steps."""
        return self._store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state as `StateStore.load_state_dict`; all ranks call it between steps.

        Raises:
            DisagreementError: (a ValueError) on all ranks, which have changed nothing: that of a
                rank cannot be loaded, or ranks have states of different steps.
        """

        def check() -> list[tuple[str, str]]:
            self._store.check_state(state)
            return [("number of messages of state", steps_of(state))]

        check_on_all_ranks(check, self._reducer.collectives.check_consistent_across_ranks)
        self._store.load_state_dict(state)

    def reduce(self, gradients: Tensor, parameters: list[Tensor], *, last: bool) -> Future[Tensor]:
        """Average a bucket over ranks in the background.

        Args:
            gradients: (numel,) gradients of the bucket. Written.
            parameters: their parameters, in order.
            last: whether this is the step's last bucket.
        """
        layout = self._layout(parameters)
        self._reducer.collectives.step = self._step
        if not last:
            self._started.append(self._reducer.start(gradients, layout, None))
            return self._started[-1]
        others, self._started = self._started, []

        in_backward = is_in_backward()

        def end_step() -> None:
            for other in others:
                other.wait()
            self._reducer.end_step()
            self._end_step()
            if not in_backward:
                self._raise_failure()

        future = self._reducer.start(gradients, layout, end_step)
        if in_backward:  # a future would quote the error in a RuntimeError
            if self._may_find_unused and gradients.is_cpu:
                before_end_of_backward(lambda: self._raise_peer_error(future))
            at_end_of_backward(self._raise_failure)
        return future

    def _end_step(self) -> None:
        self._last = self._reducer.take_stats()
        self._step += 1

    def _raise_peer_error(self, last: Future[Tensor]) -> None:
        """Raise that a rank has failed, before an all-reduce of DDP's own raises gloo's error."""
        last.wait()  # so does DDP next
        if isinstance(self._reducer.failure, PeerError):
            raise self._reducer.failure

    def _raise_failure(self) -> None:
        """Raise the step's first error, when no bucket is in flight.

        Unless all ranks raised the same error, every later step raises it again: other ranks may
        still be in the middle of this step and would take later messages for those they wait for.
        """
        failure = self._reducer.failure
        if isinstance(failure, _RAISED_ON_ALL_RANKS):
            self._reducer.failure = None
        if failure is not None:
            raise failure

    @torch.no_grad()
    def _reduce_one(self, gradient: Tensor, parameter: Tensor) -> None:
        """Average one parameter's gradient, of any strides, over ranks; the backward pass waits.

        Entries are encoded in the memory order of the parameter, as in DDP's buckets.
        """
        layout, reducer = self._layout([parameter]), self._reducer
        if self._step_detector.is_new_step(layout.names[0]):
            self._last = reducer.collectives.stats = CommStats()
            reducer.collectives.step, self._step = self._step, self._step + 1
        in_order = gradient.permute(_memory_order(parameter))
        flat = in_order.reshape(-1)
        reducer.mean_(flat, layout)
        if not in_order.is_contiguous():  # then flat is a copy
            in_order.copy_(flat.view_as(in_order))

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientCompression":
        """Return itself: a copied DDP averages gradients without the hook, as in PyTorch."""
        return self

    def _layout(self, parameters: list[Tensor]) -> BufferLayout:
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._layouts:
            named = ((self._name(each), _in_memory_order(each)) for each in parameters)
            self._layouts[key] = BufferLayout.of(named)
        return self._layouts[key]

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            if self._is_named:
                raise RuntimeError(
                    "this hook must be used with the model it was created for, got gradients of a "
                    f"parameter of shape {list(parameter.shape)} that is not in it; create one "
                    "hook for each DistributedDataParallel"
                )
            self._names[id(parameter)] = str(len(self._names))
        return self._names[id(parameter)]


def ddp_hook(
    compressor: Compressor,
    model: nn.Module | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    nonfinite: NonFinitePolicy = "raise",
) -> tuple[GradientCompression, Hook]:
    """Return state and hook for ``DistributedDataParallel.register_comm_hook``.

    ``ddp.register_comm_hook(*ddp_hook(ErrorFeedback(TopK(0.01)), ddp))``: gradients are means over
    ranks, as without a hook. All ranks of the group must call it.

    A model may be compiled. If backward is compiled too (``torch._dynamo.config.optimize_ddp =
    "python_reducer"`` before DDP is created, and ``compiled_autograd``), DDP has no buckets: each
    parameter's gradient is a message of its own inside the graph, without overlap. The state can be
    moved between both forms.

    Gradients with a nan or an inf, by ``nonfinite``:

    * "raise": backward ends in the same `NonFiniteError` on all ranks, which names the first such
      rank and parameter. Nothing of that bucket is sent, the state of it and of all buckets after
      it is unchanged, and training can go on: skip the optimizer's step. Buckets averaged earlier
      in that backward pass have been sent, and their residuals hold only the rest: that part of the
      skipped step is lost. Costs a pass over the gradients, and an all-gather of a number for each
      bucket; ``Cast(accumulate=dtype)`` reads its means instead, the same on all ranks, and sends
      nothing. On a GPU the host does not wait: the rank's bucket counts as zeros, and all ranks
      raise when the next backward pass begins.
    * "skip": such a bucket of a rank counts as zeros in the mean, which is still divided by the
      number of ranks; no rank is told. With error feedback its residual is sent as usual. Costs a
      pass.
    * "allow": means have a nan or an inf on all ranks, and residuals stay finite. A ``GradScaler``
      needs it, to skip the step on all ranks and to lower its scale.

    With ``find_unused_parameters``, the residual of a parameter is lost in steps in which no rank
    uses it: DDP drops its part of the mean. Means are over all ranks of the group, also in
    ``join(divide_by_initial_world_size=False)``. A resumed run is bit-for-bit the same if its
    buckets are: DDP rebuilds buckets after the first step.

    Args:
        compressor: the compressor of all gradients, the same on all ranks.
        model: the module inside DDP, or DDP itself. Its parameter names are the keys of the saved
            state and are matched by ``PerParameter``. None: parameters are numbered.
        process_group: DDP's process group; None: that of the model if it is DDP itself, else the
            default group.
        nonfinite: "raise", "skip" or "allow"; see above.

    Raises:
        DisagreementError: the compressor does not support DDP, or an argument is invalid or differs
            between ranks.
    """
    ddp = None if model is None else uncompiled(model)
    if process_group is None and isinstance(ddp, nn.parallel.DistributedDataParallel):
        process_group = ddp.process_group
    return GradientCompression(compressor, model, process_group, nonfinite), compressed_hook


def compressed_hook(state: GradientCompression, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket, or in compiled DDP a (gradient, parameter) pair."""
    if isinstance(bucket, tuple):
        unused: Any = state.reduce_one(*bucket)
        return unused
    return state.reduce(bucket.buffer(), bucket.parameters(), last=bucket.is_last())


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with their names in the module inside DDP, compiled or not."""
    model = uncompiled(model)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return [(plain_name(name), each) for name, each in inner.named_parameters()]


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Permute dimensions to the order of the gradient's memory in a bucket (channels_last too)."""
    return parameter.permute(_memory_order(parameter))


def _memory_order(parameter: Tensor) -> list[int]:
    """Return dimensions by descending stride, or as they are if the tensor is not dense."""
    dimensions = list(range(parameter.dim()))
    order = sorted(dimensions, key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else dimensions
