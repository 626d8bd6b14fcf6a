"""``GossipDataParallel``: the trainer that runs a gossip algorithm in the user's training loop."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from typing_extensions import override

from .._deprecated import adopt_old_methods
from ..comm import (
    FORMAT,
    FORMAT_KEY,
    Collectives,
    FlatBuckets,
    ModelAverager,
    StepHook,
    check_consistent_across_ranks,
    check_group_exists,
    find_format_error,
    is_creating_state,
    join_buckets,
)
from ..optim import FusedOptimizer
from . import consensus
from .algorithms.base import Algorithm, find_algorithm_error
from .amp import ScaledSteps
from .module_wrapper import ModuleWrapper
from .validation import (
    describe,
    describe_groups,
    find_type_error,
    find_validation_error,
    resolve_bucket_cap_mb,
)

_FORWARDS_WITHOUT_A_STEP = 10  # before the warning


class GossipDataParallel(ModuleWrapper):
    """A module trained on all ranks of a process group with a gossip algorithm.

    The training loop stays the user's: ``zero_grad``, forward, backward, ``optimizer.step()``.
    Communication happens in ``optimizer.step()`` and is complete when it returns, unless the
    algorithm overlaps it with the next steps. At construction the ranks check that their arguments
    are consistent, and rank 0 broadcasts its parameters and buffers.

    The module is trained in place: its parameters become views of flat buffers, so it must be on
    its device and of its dtype before it is wrapped. Keys, names and attributes are the module's
    own, without those of ``torch.compile``; call the trainer, not the module, to train. Buffers
    such as BatchNorm statistics stay local.

    Args:
        module: trainable parameters in float32, bfloat16 or float16, on one device.
        optimizer: any torch optimizer over the module's trainable parameters; frozen ones may be
            among them, as in DistributedDataParallel: they are neither sent nor changed. One of
            ``pyparallel.optim`` steps, averages and writes messages in one pass over its buckets.
        algorithm: for example ``SGP(OnePeerExponential(num_ranks))`` or ``AllReduce()``.
        process_group: the ranks that train together; None means the default group.
        bucket_cap_mb: approximate size of a bucket, and so of a message, in MiB. None: 25 on the
            CPU, 256 on GPUs; a model of one dtype below it is one message to each neighbor.

    Raises:
        DisagreementError: (a ValueError) an argument of one rank is invalid, or arguments differ
            between ranks; all ranks raise the same message.
        ArgumentTypeError: (a DisagreementError and a TypeError) one is of a wrong type.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        if process_group is None and not dist.is_initialized():
            raise ValueError(
                "process_group must be initialized, got none; call "
                "torch.distributed.init_process_group first"
            )
        super().__init__()
        adopt_old_methods("pyparallel.gossip", algorithm)
        self.config_fields, error_text = _collect_config(
            module, optimizer, algorithm, process_group, bucket_cap_mb
        )
        check_consistent_across_ranks(self.config_fields, error_text, process_group)
        self._wrap(module)
        self.algorithm = algorithm
        self.process_group = process_group
        cap_bytes = int(resolve_bucket_cap_mb(module, bucket_cap_mb) * 2**20)
        if isinstance(optimizer, FusedOptimizer):
            self._fused: weakref.ref[FusedOptimizer] | None = weakref.ref(optimizer)
            self._buckets = join_buckets(optimizer.lay_out(cap_bytes))
            optimizer.adopt(self._step_buckets)
        else:
            self._fused = None
            parameters = [p for p in module.parameters() if p.requires_grad]
            self._buckets = FlatBuckets(parameters, cap_bytes)
        self._uses_hooks = True  # in the step being taken
        self._broadcast_from_first_rank()
        averager = algorithm.start(module, optimizer, self._buckets, process_group)
        self._running: ModelAverager | None = averager
        self._scaled_steps = ScaledSteps(optimizer)
        self._expects_first_step = True
        self._num_forwards, self._first_versions = 0, 0  # until the first step
        # The optimizer holds the hook, which holds the trainer. A cycle would keep process groups
        # beyond destroy_process_group(), until Python collects garbage.
        self._step_hook = weakref.ref(StepHook(optimizer, self._after_step, self._before_step))
        # Also called when the trainer is garbage collected, and at exit.
        self._close_averager = weakref.finalize(self, averager.close)

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if step_hook := self._step_hook():
            step_hook.see_forward()
        # First the compiler, which would compile again for every count.
        if not torch.compiler.is_compiling() and self._expects_first_step:
            self._warn_of_another_optimizer()
        self._averager.restore_debiased()
        return self._averager.wrap(self._called)(*inputs, **kwargs)

    @property
    def push_sum_weight(self) -> Tensor:
        """Push-sum weight of this rank, 0-d float64; 1 for algorithms without PushSum."""
        return self._averager.weight

    @property
    def loads_other_buckets(self) -> bool:
        """Whether a state loads that was saved with the optimizer's parameters in other groups."""
        return self._averager.loads_other_buckets

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for training, excluding ``consensus`` and checks."""
        return self._averager.bytes_sent

    def record_loss(self, loss: Tensor | float) -> None:
        """Record the loss of a batch before ``optimizer.step()``; no host synchronization.

        ``LeaderSGD`` needs it in every step; all other algorithms accept and ignore it.

        Args:
            loss: a number, or a tensor of one element.
        """
        self._averager.record_loss(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps do not communicate.

        As in DistributedDataParallel, for accumulating gradients over several backward passes, or
        for several local steps. All ranks must do the same.
        """
        return self._averager.no_sync()

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context for unequal numbers of batches: ranks without batches still communicate.

        Args:
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks once one has no batches left.
        """
        return _join(self._averager.joinable, enable, throw_on_early_termination)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Load the exact average of all ranks into the module inside the context; restore it after.

        Parameters are averaged with the push-sum weights, including messages in flight;
        floating-point buffers (such as BatchNorm statistics) without weights. Frozen parameters
        are equal on all ranks and stay as they are. All ranks must enter it together.
        """
        (merged, weight), buffers = self._merged_buckets(), self._float_buffers()
        averages = consensus.average(merged, weight, self.process_group)
        averages += consensus.average(buffers, torch.ones_like(weight), self.process_group)
        del merged
        tensors = [*self._buckets.buffers, *buffers]
        own = [tensor.clone() for tensor in tensors]
        try:
            _assign(tensors, averages)
            yield self.module
        finally:
            _assign(tensors, own)

    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of ``||z_i - average||_2``.

        The same number on all ranks, which must call it together.
        """
        return consensus.distance(*self._merged_buckets(), self.process_group)

    def flush(self) -> None:
        """Complete all communication in flight; call it after the last step, on all ranks together.

        With an algorithm that overlaps its rounds, messages otherwise stay in flight until the next
        step.
        """
        self._averager.restore_debiased()
        self._averager.flush()

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        if self._running is not None:
            self._running.restore_debiased()
        return super().state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the module, on all ranks together, and reset the algorithm.

        Messages in flight are merged before, and anchors, slow momentum and leaders are reset.
        ``assign=True`` is an error, as it would replace the parameters.
        """
        if not assign:
            self.flush()
        result = super().load_state_dict(state_dict, strict, assign)
        self._averager.reset()
        return result

    def algorithm_state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state beyond the module; all ranks must call it together.

        ``GossipState`` saves it together with everything else that a run needs to resume.
        """
        self._averager.restore_debiased()
        return {FORMAT_KEY: FORMAT, **self._averager.state_dict()}

    def load_algorithm_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what ``algorithm_state_dict`` returned; all ranks must call it together.

        Raises:
            DisagreementError: (a ValueError) on all ranks alike: a newer pyparallel has saved it.
        """
        averager = self._averager
        check_consistent_across_ranks([], find_format_error(state_dict), self.process_group)
        averager.restore_debiased()
        averager.load_state_dict({k: v for k, v in state_dict.items() if k != FORMAT_KEY})

    def close(self) -> None:
        """Stop all communication: the optimizer then trains the module on this rank alone.

        Called automatically when the trainer is garbage collected and at exit, so that the process
        group and its threads end while Python still runs.
        """
        if step_hook := self._step_hook():
            step_hook.close()
        if self._running is not None:
            self._scaled_steps.close()
            if self._fused and (optimizer := self._fused()):
                optimizer.release()
        self._close_averager()
        self._running = None
        self.process_group = None

    @override
    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}"

    @property
    def _averager(self) -> ModelAverager:
        if self._running is None:
            raise RuntimeError("GossipDataParallel must not be used after close()")
        return self._running

    def _float_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    @torch.no_grad()
    def _broadcast_from_first_rank(self) -> None:
        trainable = {id(parameter) for parameter in self._buckets.parameters}
        frozen = [p for p in self.module.parameters() if id(p) not in trainable]
        collectives = Collectives(self.process_group)
        for tensor in [*self._buckets.buffers, *frozen, *self.module.buffers()]:
            collectives.broadcast_(tensor, 0)

    def _warn_of_another_optimizer(self) -> None:
        """Warn if parameters have changed in many training forwards without the optimizer."""
        if not (self.training and torch.is_grad_enabled()):
            return
        versions = sum(parameter._version for parameter in self._buckets.parameters)
        if not self._num_forwards:
            self._first_versions = versions
        self._num_forwards += 1
        if self._num_forwards >= _FORWARDS_WITHOUT_A_STEP and versions != self._first_versions:
            self._expects_first_step = False
            warnings.warn(
                "the optimizer given to GossipDataParallel has not stepped in "
                f"{self._num_forwards} forwards, so ranks train apart; step that optimizer, or "
                "close() and wrap again with the new one",
                stacklevel=5,  # the user's call of the module
            )

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self._expects_first_step:
            self._expects_first_step = False
        check_group_exists()
        self._buckets.check(p for group in optimizer.param_groups for p in group["params"])
        self._check_module()
        averager = self._averager
        error_text = averager.closure_error() if has_closure else None
        if error_text:
            raise ValueError(error_text)
        averager.restore_debiased()
        # A closure evaluates the module after merging, and before the update.
        self._uses_hooks = self._fused is None or has_closure
        if self._uses_hooks:
            averager.before_step()
            averager.before_update()
            self._scaled_steps.begin()

    def _step_buckets(self, optimizer: FusedOptimizer) -> None:
        if is_creating_state() or self._uses_hooks:
            for index in range(optimizer.num_buckets):
                optimizer.step_bucket(index)
            return
        averager = self._averager
        if averager.synchronizes:
            averager.notify_joined_ranks()
        averager.step_buckets(optimizer.step_bucket, optimizer.num_buckets)

    def _after_step(self) -> None:
        if not self._uses_hooks:
            return
        self._scaled_steps.end()
        averager = self._averager
        averager.after_update()
        if averager.synchronizes:
            averager.notify_joined_ranks()
            averager.after_step()

    def _merged_buckets(self) -> tuple[list[Tensor], Tensor]:
        self._averager.restore_debiased()
        self._buckets.check(())
        return self._averager.as_merged()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("GossipDataParallel must not be copied or pickled: copy its .module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)


def _collect_config(
    module: nn.Module,
    optimizer: Optimizer,
    algorithm: Algorithm,
    process_group: dist.ProcessGroup | None,
    bucket_cap_mb: float | None,
) -> tuple[list[tuple[str, str]], str | TypeError | None]:
    """Return the config fields that ranks must share and this rank's error; never raises.

    An exception becomes the error text, which `check_consistent_across_ranks` raises on all ranks.
    """
    try:
        type_error = find_type_error(module, optimizer, bucket_cap_mb)
        if type_error := type_error or find_algorithm_error(algorithm):
            return [], type_error
        cap = resolve_bucket_cap_mb(module, bucket_cap_mb)
        config_fields = [
            *algorithm.config_fields(),
            ("bucket_cap_mb", str(cap)),
            *describe(module),
            *describe_groups(module, optimizer),
        ]
        error_text = find_validation_error(module, optimizer, process_group)
        error_text = error_text or algorithm.validation_error(dist.get_world_size(process_group))
        if not 0 < cap < float("inf"):
            error_text = f"bucket_cap_mb must be positive and finite, got {cap}"
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    return config_fields, error_text


@contextmanager
def _join(joinable: Joinable, enable: bool, throw_on_early_termination: bool) -> Iterator[None]:
    before = joinable._join_config
    try:
        with Join([joinable], enable, throw_on_early_termination):
            yield
    finally:
        joinable._join_config = before  # Join leaves its own, which every later step would notify


@torch.no_grad()
def _assign(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
