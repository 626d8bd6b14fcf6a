"""Compressed gradients in DistributedDataParallel: a communication hook and its state."""

import time
from typing import Any

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # an implicit re-export
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ...comm import Run, StepCounts
from ...comm.errors import NonFiniteError, PeerError, concise
from ...comm.profiling import profiled
from ...comm.stats import CommStats
from ...training import check_on_all_ranks, plain_name, uncompiled, wrong_type
from ...training.arguments import require
from ...training.module_checks import describe_tensors
from ...training.nonfinite import NonFinitePolicy, find_policy_error
from ..compressor import AttachPoint, Compressor, find_error_at
from ..corrupt_messages import CorruptMessageError
from ..layout import BufferLayout
from ..state_store import StateStore, steps_of
from . import end_of_backward
from .bucket_reducer import BucketReducer

_RAISED_ON_ALL_RANKS = (CorruptMessageError, NonFiniteError)


class GradientCompression:
    """State of a DDP's compressed gradients; `compress_ddp` creates it."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        compressor: Compressor,
        nonfinite: NonFinitePolicy,
        run: Run,
    ) -> None:
        self._names = {id(each): name for name, each in named_parameters(ddp)}
        named = [(name, _in_memory_order(each)) for name, each in named_parameters(ddp)]
        layout = BufferLayout.of(named)
        self._store = StateStore(compressor, run.group_rank, run.size, layout)
        self._reducer = BucketReducer(run, self._store, nonfinite)
        # DDP then has all-reduces of its own.
        self._may_find_unused = ddp.find_unused_parameters
        self._layouts: dict[tuple[int, ...], BufferLayout] = {}
        self._started: list[Future[Tensor]] = []  # of the current step
        self._last = CommStats()
        self._sent_before = 0.0  # bytes, in the steps before
        self._counts = run.counts

    @property
    def last_step(self) -> CommStats:
        """Bytes and seconds of this rank in the last finished step."""
        return self._last

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all residuals; 0 without error feedback or before the first bucket."""
        return self._store.norm("residual")

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged. On a GPU the host waits for the residual's norm.

        * ``rank/bytes_sent`` so far, assuming ring or pairwise collectives;
        * ``rank/waiting_seconds``: for which the host has waited at the end of the last backward
          pass, when all gradients had been computed, for buckets not averaged yet. On NCCL
          streams wait instead;
        * ``rank/encode_seconds`` and ``rank/decode_seconds`` of the last step, as in ``last_step``;
        * ``rank/residual_norm``: the Euclidean norm of what error feedback has not sent yet;
        * ``rank/steps`` that have averaged gradients.
        """
        return metrics_of(self._last, self._sent_before, self.residual_norm, self._counts.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as `StateStore.state_dict`; call it between steps."""
        return self._store.state_dict()

    @concise
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state as `StateStore.load_state_dict`; all ranks call it between steps.

        States that are damaged, of another compressor or of different steps are a DisagreementError
        on all ranks, which have changed nothing.
        """

        def check() -> list[tuple[str, str]]:
            self._store.check_state(state)
            return [("number of messages of state", steps_of(state))]

        check_on_all_ranks(check, self._reducer.collectives.run.agree)
        self._store.load_state_dict(state)

    def reduce(self, gradients: Tensor, parameters: list[Tensor], *, last: bool) -> Future[Tensor]:
        """Average the gradients (numel,) of a bucket over ranks in the background, in place."""
        try:
            self._reducer.collectives.run.check_usable()
        except RuntimeError as error:  # on all ranks: each keeps its gradients
            end_of_backward.raise_at_end_of_backward(error)
            unchanged: Future[Tensor] = Future(devices=[gradients.device] * gradients.is_cuda)
            unchanged.set_result(gradients)
            return unchanged
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key) or self._new_layout(key, parameters)
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
        self._count(self._reducer.take_stats())
        self._counts.count_step()

    def _count(self, stats: CommStats) -> None:
        self._sent_before += self._last.wire_bytes
        self._last = stats

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None to pickle: a DDP that is saved whole is compressed again after loading."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientCompression":
        """Return itself: a copied DDP averages gradients without the hook, as in PyTorch."""
        return self

    def _new_layout(self, key: tuple[int, ...], parameters: list[Tensor]) -> BufferLayout:
        for parameter in parameters:
            got = f"those of {self._name(parameter)} of {parameter.dtype}"
            fix = "use torch.view_as_real in the module"
            rule = "gradients must be of real numbers to be compressed"
            require(not parameter.is_complex(), rule, got, fix)
        named = ((self._name(each), _in_memory_order(each)) for each in parameters)
        self._layouts[key] = layout = BufferLayout.of(named)
        return layout

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            raise RuntimeError(
                "parameters must stay those that compress_ddp(ddp, ...) has found, got gradients "
                f"of one of shape {list(parameter.shape)} that is not in the module: wrap it again"
            )
        return self._names[id(parameter)]


@concise
def compress_ddp(
    ddp: DistributedDataParallel,
    compressor: Compressor,
    *,
    nonfinite: NonFinitePolicy = "raise",
) -> GradientCompression:
    """Compress the gradients of a DistributedDataParallel, by its communication hook.

    ``compress_ddp(ddp, ErrorFeedback(TopK(0.01)))``: gradients are means over ranks, as without it.
    All ranks of DDP's process group must call it, once, before the first backward pass: a DDP keeps
    its first hook for good. To change the compressor during a run, use `Switch`.

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
        ddp: compiled or not. The names of its module's parameters are the keys of the saved state
            and are matched by ``PerParameter``.
        compressor: of all gradients, the same on all ranks.
        nonfinite: see above.

    Returns:
        The state, with ``metrics()``, and ``state_dict()`` to save on each rank.

    A compressor that does not support DDP, an argument that is invalid or differs between ranks,
    and buffers that DDP broadcasts and that differ in name or shape, are a DisagreementError.
    """
    inner = uncompiled(ddp) if isinstance(ddp, nn.Module) else None
    problem = find_error_at(AttachPoint.DDP, compressor) or find_policy_error(nonfinite)
    fields = [("compressor", repr(compressor)), ("nonfinite", str(nonfinite))]
    group = None
    if isinstance(inner, DistributedDataParallel):
        group = inner.process_group
        fields += _describe_sent_buffers(inner)
    else:
        rule = "a model in torch.nn.parallel.DistributedDataParallel"
        problem = problem or wrong_type("ddp", rule, ddp)
    run = Run(group, counts=StepCounts())
    run.agree(fields, problem)
    assert isinstance(inner, DistributedDataParallel)
    state = GradientCompression(inner, compressor, nonfinite, run.within(range(run.size)))
    inner.register_comm_hook(state, _reduce_bucket)
    return state


def _reduce_bucket(state: GradientCompression, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket."""
    rule, got = "a compressed hook must get DDP's buckets", "a gradient, as of a compiled backward"
    fix = 'create DDP without torch._dynamo.config.optimize_ddp = "python_reducer"'
    require(not isinstance(bucket, tuple), rule, got, fix)
    return state.reduce(bucket.buffer(), bucket.parameters(), last=bucket.is_last())


def named_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with their names in the module inside DDP, compiled or not."""
    return [(plain_name(name), each) for name, each in ddp.module.named_parameters()]


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


def _describe_sent_buffers(ddp: DistributedDataParallel) -> list[tuple[str, str]]:
    """Return config fields of the buffers that DDP broadcasts in a forward, and never compares."""
    if not getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers):
        return []
    named = [each for each in ddp.module.named_buffers() if each[0] not in ddp.parameters_to_ignore]
    return [("number of buffers", str(len(named))), *describe_tensors("buffer", named)]


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Permute dimensions to the order of the gradient's memory in a bucket (channels_last too)."""
    return parameter.permute(_memory_order(parameter))


def _memory_order(parameter: Tensor) -> list[int]:
    """Return dimensions by descending stride, or as they are if the tensor is not dense."""
    dimensions = list(range(parameter.dim()))
    order = sorted(dimensions, key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else dimensions
