"""Compressed gradients in DistributedDataParallel: a communication hook and its state."""

import copy
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # an implicit re-export
from torch.futures import Future

from ...comm import DisagreementError, Run, StepCounts
from ...comm.errors import NonFiniteError, PeerError
from ...comm.profiling import profiled
from ...comm.stats import CommStats
from ...training import check_on_all_ranks, plain_name, uncompiled, wrong_type
from ...training.arguments import raise_problem, require
from ...training.module_checks import describe_tensors
from ...training.nonfinite import NonFinitePolicy, find_policy_error
from ..compressor import AttachPoint, Compressor, validation_error_at
from ..corrupt_messages import CorruptMessageError
from ..layout import BufferLayout
from ..state_store import StateStore, steps_of
from . import end_of_backward
from .bucket_reducer import BucketReducer

_RAISED_ON_ALL_RANKS = (CorruptMessageError, NonFiniteError)
Hook = Callable[["GradientCompression", GradBucket], Future[Tensor]]


class GradientCompression:
    """State of the DDP hook that `ddp_hook` returns, and its arguments.

    A DDP keeps its first hook for good; to change the compressor during a run, use `Switch`. What
    needs a process group is created, and compared between ranks, with this object if there is a
    group by then, else at the first bucket or ``load_state_dict``.
    """

    def __init__(
        self,
        compressor: Compressor,
        model: nn.Module | None,
        process_group: dist.ProcessGroup | None,
        nonfinite: NonFinitePolicy = "raise",
    ) -> None:
        problem = validation_error_at(AttachPoint.DDP, compressor) or find_policy_error(nonfinite)
        if model is not None and not isinstance(model, nn.Module):
            rule = "the module inside DistributedDataParallel, or None"
            problem, model = problem or wrong_type("model", rule, model), None
        self._prepare(compressor, model, model is not None, process_group, nonfinite, None)
        if self._has_group:
            self._start(problem)
        else:
            raise_problem(problem)

    def _prepare(
        self,
        compressor: Compressor,
        model: nn.Module | None,
        is_named: bool,
        process_group: dist.ProcessGroup | None,
        nonfinite: NonFinitePolicy,
        loaded: dict[str, Any] | None,
    ) -> None:
        """Set what needs no process group."""
        self._compressor, self._nonfinite = compressor, nonfinite
        self._model, self._is_named, self._group = model, is_named, process_group
        self._model_ref = None if model is None else weakref.ref(model)
        # DDP then has all-reduces of its own; only a DDP tells.
        self._may_find_unused = getattr(model, "find_unused_parameters", True)
        self._loaded = loaded  # before there was a group
        self._is_started = False
        self._names: dict[int, str] = {}  # of parameters, by id
        self._store: StateStore
        self._reducer: BucketReducer
        self._layouts: dict[tuple[int, ...], BufferLayout] = {}
        self._started: list[Future[Tensor]] = []  # of the current step
        self._last = CommStats()
        self._sent_before = 0.0  # bytes, in the steps before
        self._counts = StepCounts()

    @property
    def last_step(self) -> CommStats:
        """Bytes and seconds of this rank in the last finished step."""
        return self._last

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all residuals; 0 without error feedback or before the first bucket."""
        return self._store.norm("residual") if self._is_started else 0.0

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged. On a GPU the host waits for the residual's norm.

        * ``rank/bytes_sent`` so far, assuming ring or pairwise collectives;
        * ``rank/waiting_seconds``: for which the host has waited at the end of the last backward
          pass, when all gradients had been computed, for buckets not averaged yet. On NCCL streams
          wait instead;
        * ``rank/encode_seconds`` and ``rank/decode_seconds`` of the last step, as in ``last_step``;
        * ``rank/residual_norm``: the Euclidean norm of what error feedback has not sent yet;
        * ``rank/steps`` that have averaged gradients.
        """
        return metrics_of(self._last, self._sent_before, self.residual_norm, self._counts.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as `StateStore.state_dict`; call it between steps."""
        if self._loaded is not None:
            return self._loaded
        return (self._store if self._is_started else self._new_store()).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state as `StateStore.load_state_dict`; all ranks call it between steps.

        Before there is a process group, a copy is kept until the first bucket, at which the ranks
        compare theirs; what is wrong with it here is a ValueError at once. States that are damaged,
        of another compressor or of different steps are a DisagreementError on all ranks, which have
        changed nothing.
        """
        if not self._has_group:
            saved = state if isinstance(state, dict) else {}
            rank, num_ranks = saved.get("rank", 0), saved.get("num_ranks", 1)
            StateStore(self._compressor, rank, num_ranks).check_state(state)
            self._loaded = copy.deepcopy(state)
            return
        self._start()

        def check() -> list[tuple[str, str]]:
            self._store.check_state(state)
            return [("number of messages of state", steps_of(state))]

        check_on_all_ranks(check, self._reducer.collectives.run.agree)
        self._store.load_state_dict(state)

    def reduce(self, gradients: Tensor, parameters: list[Tensor], *, last: bool) -> Future[Tensor]:
        """Average the gradients (numel,) of a bucket over ranks in the background, in place."""
        try:
            self._start()
            self._reducer.collectives.run.check_usable()
        except (DisagreementError, RuntimeError) as error:  # on all ranks: each keeps its gradients
            end_of_backward.raise_at_end_of_backward(error)
            unchanged: Future[Tensor] = Future(devices=[gradients.device] * gradients.is_cuda)
            unchanged.set_result(gradients)
            return unchanged
        layout = self._layout(parameters)
        if not last:
            self._started.append(self._reducer.start(gradients, layout, None))
            return self._started[-1]
        others, self._started = self._started, []

        in_backward = end_of_backward.is_in_backward()

        def end_step() -> None:
            for other in others:
                other.wait()
            self._reducer.end_step()
            self._end_step()
            if not in_backward:
                self._raise_failure()

        future = self._reducer.start(gradients, layout, end_step)
        if in_backward:  # a future would quote the error in a RuntimeError
            if gradients.is_cpu:
                end_of_backward.before_end_of_backward(lambda: self._wait(future))
            end_of_backward.at_end_of_backward(self._raise_failure)
        return future

    def _end_step(self) -> None:
        self._sent_before += self._last.wire_bytes
        self._last = self._reducer.take_stats()
        self._counts.count_step()

    def _wait(self, last: Future[Tensor]) -> None:
        """Wait for the step's last bucket, before DDP's own all-reduce raises gloo's error."""
        begin = time.perf_counter()
        with profiled("pyparallel::wait_for_buckets"):
            last.wait()
        self._last.waiting_seconds = time.perf_counter() - begin  # the host's, not the worker's
        if self._may_find_unused and isinstance(self._reducer.failure, PeerError):
            raise self._reducer.failure

    def _raise_failure(self) -> None:
        """Raise the step's first error, when no bucket is in flight.

        Unless all ranks raised it, every later step raises it again: other ranks may still be in
        the middle of this step and would take later messages for those they wait for.
        """
        failure = self._reducer.failure
        if isinstance(failure, _RAISED_ON_ALL_RANKS):
            self._reducer.failure = None
        if failure is not None:
            raise failure

    @property
    def _has_group(self) -> bool:
        return self._group is not None or dist.is_initialized()

    def _start(self, problem: str | TypeError | None = None) -> None:
        """Compare the arguments of all ranks, and create what needs a process group; only once."""
        if self._is_started:
            return
        store, steps = self._new_store(), "none"
        if self._loaded is not None:
            steps = steps_of(self._loaded)
            try:
                store.load_state_dict(self._loaded)
            except ValueError as error:
                problem = str(error)
        fields = [("compressor", repr(self._compressor)), ("nonfinite", str(self._nonfinite))]
        fields.append(("number of messages of state", steps))
        fields += _describe_sent_buffers(self._model)
        run = Run(self._group, counts=self._counts)
        run.agree(fields, problem)
        own = run.within(range(run.size))
        self._store, self._reducer = store, BucketReducer(own, store, self._nonfinite)
        if self._model is not None:
            self._names = {id(each): name for name, each in named_parameters(self._model)}
        self._model, self._loaded, self._is_started = None, None, True

    def _new_store(self) -> StateStore:
        if not self._has_group:
            raise RuntimeError(
                "a compressed hook needs the process group of DistributedDataParallel, got none: "
                "call torch.distributed.init_process_group before the first backward pass"
            )
        named = [] if self._model is None else named_parameters(self._model)
        layout = BufferLayout.of((n, _in_memory_order(p)) for n, p in named) if named else None
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        return StateStore(self._compressor, rank, size, layout)

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments, the model and its state; without a process group, as in PyTorch."""
        return {
            "compressor": self._compressor,
            "model": self._model_ref and self._model_ref(),
            "is_named": self._is_named,
            "nonfinite": self._nonfinite,
            "loaded": self._store.state_dict() if self._is_started else self._loaded,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load what was pickled, for the default group; ranks compare it at the first bucket."""
        self._prepare(**state, process_group=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientCompression":
        """Return itself: a copied DDP averages gradients without the hook, as in PyTorch."""
        return self

    def _layout(self, parameters: list[Tensor]) -> BufferLayout:
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._layouts:
            for each in parameters:
                got = f"those of {self._name(each)} of {each.dtype}"
                fix = "use torch.view_as_real in the module"
                rule = "gradients must be of real numbers to be compressed"
                require(not each.is_complex(), rule, got, fix)
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

    It may be called before ``init_process_group``, and before the model is wrapped: what is wrong
    on this rank alone is raised at once, and the ranks compare their arguments at the first bucket,
    where backward raises the same DisagreementError on all of them.

    A model's forward may be compiled. Its backward may not: a DDP with the reducer for that has no
    buckets, which is a ValueError in backward.

    Gradients with a nan or an inf, by ``nonfinite``:

    * "raise": backward ends in the same `NonFiniteError` on all ranks, which names the first such
      rank and parameter. Nothing of that bucket is sent, the state of it and of all later ones is
      unchanged, and training can go on: skip the optimizer's step. What earlier buckets of that
      pass have sent is lost. Costs a pass over the gradients, and an all-gather of a number for
      each bucket; ``Cast(accumulate=dtype)`` reads its means instead. On a GPU the host does not
      wait: the rank's bucket counts as zeros, and all ranks raise when the next backward pass
      begins. With `TopK`, `Sign` and the quantizers with scales the encoder finds the nan, which
      costs no pass; that rank's residual of the bucket becomes 0.
    * "skip": such a bucket of a rank counts as zeros in the mean, which is still divided by the
      number of ranks; no rank is told. Costs a pass.
    * "allow": means have a nan or an inf on all ranks, and residuals stay finite. A ``GradScaler``
      needs it, to skip the step on all ranks and to lower its scale.

    With ``find_unused_parameters``, the residual of a parameter is lost in steps in which no rank
    uses it: DDP drops its part of the mean. Means are over all ranks of the group, also in
    ``join(divide_by_initial_world_size=False)``. A resumed run is bit-for-bit the same if its
    buckets are: DDP rebuilds buckets after the first step.

    Args:
        compressor: of all gradients, the same on all ranks.
        model: the module inside DDP, or DDP itself. Its parameter names are the keys of the saved
            state and are matched by ``PerParameter``. Of DDP itself the ranks compare the buffers
            that it broadcasts. None: parameters are numbered.
        process_group: DDP's process group; None: that of the model if it is DDP itself, else the
            default group.

    A compressor that does not support DDP, and an argument that is invalid or differs between
    ranks, are a DisagreementError, or a ValueError or TypeError if there is no process group yet.
    """
    ddp = uncompiled(model) if isinstance(model, nn.Module) else None
    if process_group is None and isinstance(ddp, nn.parallel.DistributedDataParallel):
        process_group = ddp.process_group
    return GradientCompression(compressor, model, process_group, nonfinite), compressed_hook


def compressed_hook(state: GradientCompression, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket."""
    rule, got = "a compressed hook must get DDP's buckets", "a gradient, as of a compiled backward"
    fix = 'create DDP without torch._dynamo.config.optimize_ddp = "python_reducer"'
    require(not isinstance(bucket, tuple), rule, got, fix)
    return state.reduce(bucket.buffer(), bucket.parameters(), last=bucket.is_last())


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with their names in the module inside DDP, compiled or not."""
    model = uncompiled(model)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return [(plain_name(name), each) for name, each in inner.named_parameters()]


def metrics_of(stats: CommStats, sent_before: float, norm: float, steps: int) -> dict[str, float]:
    """Return the metrics of a step's statistics, after bytes of the steps before."""
    return {
        "rank/bytes_sent": sent_before + stats.wire_bytes,
        "rank/waiting_seconds": stats.waiting_seconds,
        "rank/encode_seconds": stats.encode_seconds,
        "rank/decode_seconds": stats.decode_seconds,
        "rank/residual_norm": norm,
        "rank/steps": float(steps),
    }


def _describe_sent_buffers(model: nn.Module | None) -> list[tuple[str, str]]:
    """Return config fields of the buffers that DDP broadcasts in a forward, and never compares."""
    ddp = uncompiled(model) if isinstance(model, nn.Module) else None
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        return []
    if not getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers):
        return []
    named = [each for each in ddp.module.named_buffers() if each[0] not in ddp.parameters_to_ignore]
    return [("number of buffers", str(len(named))), *describe_tensors("buffer", named)]


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Permute dimensions by descending stride, as a dense gradient lies in a bucket."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    permuted = parameter.permute(order)
    return permuted if permuted.is_contiguous() else parameter
