"""The baseline: all-reduce of gradients by torch's DistributedDataParallel."""

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, PeerError, Run, without_traceback
from ...compression.hooks.end_of_backward import before_end_of_backward, is_in_backward
from ...training import Algorithm, FlatBuckets, ModelAverager, Traits

# Statistics stay local until consensus(), as in gossip. Torch 2.13 renamed the argument.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}

DDP = "DistributedDataParallel"


def all_reduce_sgd(x: Tensor, update: Callable[[Tensor], Tensor], gradients: Tensor) -> Tensor:
    """Take a step of synchronous data parallelism; return x, equal on all n ranks, after it.

    Args:
        x: (d,) parameters, equal on all ranks.
        update: of the optimizer, (d,), of a gradient: with SGD, lr * gradient.
        gradients: (n, d) at x, a row for each rank.
    """
    g = gradients.mean(0)  # g = (1/n) sum_i grad F_i(x)
    return x - update(g)  # x <- x - lr * g


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Exact data parallelism: gradients are averaged over all ranks during backward.

    It runs ``torch.nn.parallel.DistributedDataParallel``, as the baseline for gossip. That averages
    once a forward: every backward outside of ``no_sync()`` must follow one of its own.
    """

    averages_gradients = True
    averages_over_all = True
    can_be_inner = False
    refuses_shards = (
        "be a gossip algorithm for",
        ", which is DistributedDataParallel: fully_shard over both dimensions of the mesh, without "
        "this trainer, averages exactly",
    )

    find_unused_parameters: bool = False

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "AllReduceAverager":
        """Wrap the module in DistributedDataParallel."""
        with run.raising(f"{DDP} could not be created", step=None):
            replica = DistributedDataParallel(
                module,
                process_group=run.group,
                find_unused_parameters=self.find_unused_parameters,
                gradient_as_bucket_view=buckets.buffers[0].is_cpu,  # one copy less: see below
                init_sync=False,  # GossipDataParallel has broadcast parameters and buffers
                **_LOCAL_BUFFERS,
            )
        return AllReduceAverager(replica, buckets, run)


class AllReduceAverager(ModelAverager):
    """DistributedDataParallel on one rank: backward averages the gradients."""

    traits = Traits(has_equal_parameters=True)

    def __init__(self, replica: DistributedDataParallel, buckets: FlatBuckets, run: Run) -> None:
        super().__init__(buckets.buffers, run)
        self._replica = replica
        self.joinable = replica
        self._reducer: _BucketReducer | None = None  # on GPUs torch's: NCCL raises nothing here
        if self.buffers[0].is_cpu and run.size > 1:
            self._reducer = _BucketReducer(run)
            replica.register_comm_hook(self._reducer, _BucketReducer.start)
        self._num_backwards = 0  # since the last forward: DDP averages in the first alone
        self._has_forward = True  # of this trainer, since the last step
        self._warns = run.size > 1
        see = partial(_see_backward, weakref.ref(self))  # a cycle would keep the process group
        self._hook = buckets.parameters[0].register_post_accumulate_grad_hook(see)
        # Computed for a ring all-reduce: each rank sends 2 (n - 1) / n of the gradients.
        self._bytes_per_step = 2 * buckets.num_bytes * (run.size - 1) // run.size

    @override
    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        if not torch.is_grad_enabled():
            return module  # no backward follows, for which in join() other ranks would wait
        self._num_backwards, self._has_forward = 0, True
        if self._reducer is None or torch.compiler.is_compiling():
            return self._replica if self.run.counts.synchronizes else self._accumulate
        if self._reducer.failure is not None:
            raise without_traceback(self._reducer.failure)
        return self._forward

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.run.raising(f"a collective of {DDP} before forward failed"):
            forward = self._replica if self.run.counts.synchronizes else self._accumulate
            return forward(*inputs, **kwargs)

    def _accumulate(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._replica.no_sync():  # which DDP reads in forward
            return self._replica(*inputs, **kwargs)

    @override
    def before_step(self) -> None:
        """Raise if gradients were added that DistributedDataParallel has not averaged."""
        found, self._num_backwards = self._num_backwards, 0
        has_forward, self._has_forward = self._has_forward, False
        if found and not has_forward and self._warns:
            self._warns = False
            warnings.warn(
                "gradients must come from a forward of the trainer for AllReduce() to average "
                "them, got those of the bare module, which stay this rank's own: call the "
                "GossipDataParallel in place of the module",
                stacklevel=9,  # the user's optimizer.step()
            )
        if found > 1:
            raise RuntimeError(
                "with AllReduce() each backward must follow a forward of its own, got "
                f"{found} since the last forward, of which {DDP} has averaged the first alone; "
                "nothing has been stepped: call backward once, on the sum of the losses, or "
                "forward and backward for each loss in turn"
            )

    @override
    def after_step(self) -> None:
        """Count the bytes that the last backward has sent."""
        self.run.stats.count_bytes(self._bytes_per_step)
        if self._reducer is not None:
            self.run.stats.count_wait(self._reducer.take_waiting_seconds())

    @override
    def close(self) -> None:
        """Free DistributedDataParallel, whose C++ reducer also references the process group.

        The group is destroyed with its last reference. That must be a Python one: only then does
        the destructor wait for the group's threads without holding the GIL, which they may need
        (see ``comm.process_groups``).
        """
        group = self._replica.process_group
        self._hook.remove()
        del self._replica, self._reducer
        self.joinable = None
        gc.collect()
        del group


class _BucketReducer:
    """DDP's all-reduces of gradients, with errors that name the failed rank and the step.

    Those of DDP itself are raised by backward as gloo's. The means are the same to the last bit.
    DDP divides gradients as it copies them into a bucket; a hook does so in a pass of its own,
    which ``gradient_as_bucket_view`` saves at the other end.
    """

    def __init__(self, run: Run) -> None:
        self.collectives = Collectives(run)
        self.failure: PeerError | None = None
        self._started: list[Future[Any]] = []  # of the current backward pass

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average a bucket."""
        gradients = bucket.buffer()
        if gradients.is_sparse:  # as DDP does it, to the last bit
            gradients.div_(self.collectives.size)
        else:
            gradients.mul_(1.0 / self.collectives.size)
        with self._noting_failure():
            future = self.collectives.start_all_reduce_(gradients)
        self._started.append(future)
        if not is_in_backward():  # in join(), of a rank without batches
            self._finish()
        elif bucket.is_last():
            before_end_of_backward(self._finish)
        return future.then(lambda _: gradients)

    def take_waiting_seconds(self) -> float:
        """Return the seconds waited since the last call."""
        waited = self.collectives.stats.waiting_seconds
        self.collectives.stats.count_wait(-waited)
        return waited

    def _finish(self) -> None:
        started, self._started = self._started, []
        with self._noting_failure():
            for future in started:
                self.collectives.finish_all_reduce(future)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            self.failure = without_traceback(error)
            raise


def _see_backward(reference: "weakref.ref[AllReduceAverager]", parameter: Tensor) -> None:
    averager = reference()
    if (
        averager is not None
        and averager.run.counts.synchronizes
        and not torch.compiler.is_compiling()
    ):
        averager._num_backwards += 1
