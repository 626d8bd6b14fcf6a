"""The trainer of a model that is split into stages, one or more for each rank."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..comm import (
    Collectives,
    P2PGroups,
    check_consistent_across_ranks,
    check_format,
    check_group_exists,
    check_like,
    check_on_all_ranks,
    device_of,
    find_ddp_error,
    has_methods,
    new_trainer_group,
    seal,
    summarize,
    warn_if_alone,
    wrong_type,
)
from ..compression import AttachPoint, Compressor
from .build import build_executor
from .partition.auto import check_split, split_automatically
from .partition.slice import slice_layers
from .partition.solver import check_num_stages
from .partition.torch_pipe import layers_and_split
from .runtime.clipping import clip_grad_norm_
from .runtime.codec import Codec, CompressingCodec, IdentityCodec
from .runtime.executor import Executor, Span
from .runtime.loss import Criterion, Loss
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import StageP2P
from .runtime.stage import OptimizerFactory, SchedulerFactory, Stage
from .schedules.schedule import Flushing, Schedule
from .schedules.shape import PipelineShape


class PipelineTrainer:
    """Trains layers in stages, in place: rank r holds stages r, r + num_ranks, ...

    Every rank makes the same calls in the same order. The schedule defines the order of a rank's
    forwards, backwards and updates, and the weight versions that they read. Each rank reads only
    the ``layers`` of its own stages, once the split is known. Each layer is called with the output
    of the previous one, a tensor or a tuple of tensors, as in ``nn.Sequential``.

    The gradient of an update is the mean over its samples: each microbatch's loss is weighted by
    its fraction of them.

    Args:
        layers: an ``nn.Sequential`` or a list of modules, as many on every rank; or a model that is
            split for ``torch.distributed.pipelining``: a ``Pipe``, or this rank's stages of it.
        loss_fn: ``loss_fn(output, target)``, 0-d: the mean over a microbatch.
        optimizer_fn: builds the optimizer of a stage from the list of its parameters.
        schedule: such as ``PipeOptim()`` or ``OneForwardOneBackward()``.
        num_microbatches: how many parts the batch of a ``step`` is split into.
        process_group: None means the default group; without one there is a single process.
        split: the indices into ``layers`` at which stages 1 and following begin. None: balanced by
            the times of the first microbatch.
        num_stages: a multiple of the ranks; None: that of ``split``, or else one for each rank.
        scheduler_fn: builds the learning-rate scheduler of a stage's optimizer, which steps after
            each update; None: no scheduler.
        max_norm: clip the gradient of the whole model to this 2-norm before an update; only with
            schedules that flush, as others never have the whole gradient at once.
        compress_activations: compressor for the activations sent to the next stage on another rank,
            in ``evaluate`` too: floating-point tensors, which must be float32, bfloat16 or float16.
            It must be stateless, as each message is of other samples. Other tensors, and those
            between stages of one rank, stay uncompressed. None: all do.
        compress_gradients: likewise for the gradients sent to the previous stage.

    Raises:
        ValueError: (DisagreementError between ranks) the arguments are invalid or differ.
        TypeError: (ArgumentTypeError between ranks) one is of a wrong type.
    """

    def __init__(
        self,
        layers: Any,
        loss_fn: Loss,
        optimizer_fn: OptimizerFactory,
        schedule: Schedule,
        *,
        num_microbatches: int,
        process_group: dist.ProcessGroup | None = None,
        split: Sequence[int] | None = None,
        num_stages: int | None = None,
        scheduler_fn: SchedulerFactory | None = None,
        max_norm: float | None = None,
        compress_activations: Compressor | None = None,
        compress_gradients: Compressor | None = None,
    ) -> None:
        self._layers, split = layers_and_split(layers, split)
        self._scheduler_fn = scheduler_fn
        self._max_norm = max_norm
        self._compressors = {
            "compress_activations": compress_activations,
            "compress_gradients": compress_gradients,
        }
        self._schedule = schedule
        self._group = process_group
        warn_if_alone()
        single = not dist.is_initialized()
        self._rank = 0 if single else dist.get_rank(process_group)
        num_ranks = 1 if single else dist.get_world_size(process_group)
        if num_stages is None:
            num_stages = num_ranks if split is None else len(split) + 1
        errors = (find_ddp_error(f"layers[{i}]", layer) for i, layer in enumerate(self._layers))
        problem = next(filter(None, errors), None)
        problem = problem or _find_type_error(schedule, loss_fn, optimizer_fn, scheduler_fn)
        self._check_consistent(
            [
                ("schedule", repr(schedule)),
                ("num_microbatches", repr(num_microbatches)),
                ("number of layers", repr(len(self._layers))),
                ("max_norm", repr(max_norm)),
                ("split", repr(None if split is None else list(split))),
                *((name, repr(each)) for name, each in self._compressors.items()),
            ],
            problem or self._validation_error(num_stages, num_microbatches, num_ranks, split),
        )
        if not single:
            self._group = new_trainer_group(process_group)
        self._shape = PipelineShape(num_stages, num_microbatches, num_ranks)
        # Not a method: a reference cycle would keep the groups' threads until garbage collection.
        self._criterion = Criterion(loss_fn, _shares_update_fn(schedule, self._shape))
        self._optimizer_fn = optimizer_fn
        self._executor: Executor | None = None
        self._num_steps = 0  # since the last flush
        self._total_steps = 0
        self._failure: str | None = None
        self._split = None if split is None else tuple(split)
        if self._split is not None and not schedule.needs_batch:
            self._build(self._split, None)

    @property
    def stages(self) -> list[Stage]:
        """Return this rank's stages, ascending.

        With an automatic split, and with ``Interlocking``, whose heads are built for the stages'
        outputs, there are none before ``prepare`` or the first step.
        """
        return [] if self._executor is None else list(self._executor.stages.values())

    @property
    def split(self) -> tuple[int, ...] | None:
        """Return where stages 1 and following begin; None before an automatic split.

        Pass it to a trainer that will load a state: an automatic split may come out differently.
        """
        return self._split

    @property
    def spans(self) -> list[Span]:
        """Return the actions of this rank in the last step, with their times."""
        return [] if self._executor is None else self._executor.spans

    @property
    def peak_weight_copies(self) -> list[int]:
        """Return for each of this rank's stages the most copies of its weights, live included."""
        return [stage.weights.peak_copies for stage in self.stages]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent to other ranks, headers included."""
        return 0 if self._executor is None else self._p2p.bytes_sent

    def step(self, inputs: Any = None, target: Any = None) -> float | None:
        """Train on one batch, with the actions that the schedule has for this step.

        Batches may differ in their numbers of samples, from ``num_microbatches`` up.

        Args:
            inputs: what the first layer is called with, read on the rank of the first stage: a
                tensor of shape (batch, ...) or a tuple of such tensors, which is one argument; or,
                as in torch's schedules, a list of arguments or a dict of keyword arguments, of
                which tensors are split along dimension 0 and other values given to each microbatch.
            target: a tensor of shape (batch, ...), or a tuple, list or dict of such tensors, passed
                to ``loss_fn`` in the same structure; read on the rank of the last stage, with
                ``Interlocking`` on every rank.

        Returns:
            The mean loss of the batch on the rank of the last stage; None elsewhere.

        Raises:
            StageError: a stage failed or a rank died; every rank raises the same message. A loss
                that is not finite is found before its backward, on GPUs at the end of the step:
                before all updates of a schedule that flushes, and after them with others.
        """
        self._check_health()
        self._check_group()
        first = self._num_steps * self._shape.num_microbatches
        splitter = MicrobatchSplitter(inputs, target, first, self._shape.num_microbatches)
        self._build_for(splitter)
        index = self._num_steps
        self._num_steps += 1
        self._total_steps += 1
        with self._recording_failure() as executor:
            flushes = isinstance(self._schedule, Flushing)
            executor.train(
                lambda rank: self._schedule.step(self._shape, rank, index),
                splitter,
                self._before_updates if flushes else None,
                empty=flushes,
            )
        if flushes:
            self._barrier()  # the program may end now, or another rank may have failed
        return self._criterion.report()

    def flush(self) -> None:
        """Run all pending backwards and updates; weight versions then start at 0 again.

        Raises:
            StageError: a stage failed or a rank died; every rank raises the same message.
        """
        self._check_health()
        self._check_group()
        if not self._num_steps:
            return
        steps, self._num_steps = self._num_steps, 0
        no_batch = MicrobatchSplitter(None, None, 0, self._shape.num_microbatches)
        # Optimizer states created in inference mode could not be updated outside it.
        with torch.inference_mode(mode=False), self._recording_failure() as executor:
            executor.train(lambda rank: self._schedule.drain(self._shape, rank, steps), no_batch)
        self._barrier()
        executor.restart()

    def evaluate(self, inputs: Any = None, target: Any = None) -> float | None:
        """Flush, and return the loss of a batch in evaluation mode; arguments as of ``step``."""
        self.flush()
        splitter = MicrobatchSplitter(inputs, target, 0, self._shape.num_microbatches)
        self._build_for(splitter)
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            _evaluating(self.stages),
            self._recording_failure() as executor,
        ):
            executor.evaluate(splitter)
        self._barrier()
        return self._criterion.report()

    def prepare(self, inputs: Any = None, target: Any = None) -> None:
        """Build the stages without training, if they are not built yet.

        Needed to load a state, or to use the stages' optimizers, before the first step.

        Args:
            inputs: a batch as for ``step``.
            target: likewise.
        """
        self._check_health()
        self._build_for(MicrobatchSplitter(inputs, target, 0, self._shape.num_microbatches))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages: modules, optimizers and schedulers.

        Tensors are not copied: write it before the next step, with which its checksums no longer
        agree.

        Raises:
            RuntimeError: microbatches are in flight; call ``flush`` before.
        """
        self._check_empty("state_dict()")
        step = {"step": self._total_steps}
        return {str(stage.index): seal({**stage.state_dict(), **step}) for stage in self.stages}

    def rescue_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages after a failure, for a new trainer to load.

        It is that of each stage's last completed update: the live weights, never predicted or
        stashed ones, without the gradients of microbatches in flight. Buffers, such as batch norm's
        statistics, are those of the last forward. No rank needs another one for it. ``updates`` of
        a stage is their number, which may differ between stages; ``half_updated`` says that the
        failure was inside of an update, which may have changed a part of the weights.

        Warns:
            RuntimeWarning: a stage may be half updated.

        Raises:
            RuntimeError: the stages are not built yet.
        """
        if self._executor is None:
            raise RuntimeError(
                "rescue_state_dict() must come after the first step or prepare(inputs, target), "
                "got no stages yet: nothing was trained"
            )
        for stage in self.stages:
            stage.weights.restore_live()
        step = {"step": self._total_steps, "rescued": True}
        state = {
            str(stage.index): seal(
                {**stage.state_dict(), **step, "half_updated": stage.is_updating}
            )
            for stage in self.stages
        }
        _warn_if_half_updated(state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank; all ranks call it together.

        Every rank checks all of its state, and the ranks compare their steps, before anything is
        written. The steps may differ if a rank's state is of ``rescue_state_dict``; other ranks,
        such as one that died, may then load an older checkpoint.

        Warns:
            RuntimeWarning: a stage of the state may be half updated.

        Raises:
            RuntimeError: microbatches are in flight, or the stages are not built yet.
            DisagreementError: (a ValueError) on all ranks, which have changed nothing: the state of
                a rank is damaged, malformed, of other stages or another optimizer, or was saved by
                a newer pyparallel, or the ranks' states are of different steps.
        """
        self._check_empty("load_state_dict()")
        if self._executor is None:
            raise RuntimeError(
                "load_state_dict() must come after prepare(inputs, target), which builds the "
                "stages, got none yet"
            )
        check_on_all_ranks(lambda: self._check_state(state), self._check_consistent)
        self._total_steps = self._agree_on_step(state)
        for stage in self.stages:
            stage.load_state_dict(state[str(stage.index)])
        _warn_if_half_updated(state)

    def _agree_on_step(self, state: Mapping[str, Any]) -> int:
        """Return the step of all ranks' states; the least one, if any is of ``rescue_state_dict``.

        Raises:
            DisagreementError: they are of different steps, and none was rescued.
        """
        steps = [saved.get("step", -1) for saved in state.values()]  # -1: of an older version
        device = device_of(self._group) if dist.is_initialized() else torch.device("cpu")
        own = torch.tensor([_is_rescued(state), min(steps)], device=device)
        gathered = Collectives(self._group).all_gather(own).tolist()
        if not any(is_rescued for is_rescued, _ in gathered):
            text = "one not recorded" if steps[0] < 0 else repr(steps[0])
            self._check_consistent([("step of state", text)], None)
        step: int = min(step for _, step in gathered)
        return max(0, step)

    def _check_state(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Check that this rank can load a state; there is nothing to compare between ranks yet.

        Raises:
            Exception: of any type, if anything of the state cannot be loaded.
        """
        own = [str(stage.index) for stage in self.stages]
        if not isinstance(state, Mapping) or sorted(state) != sorted(own):
            names = ", ".join(map(str, state)) if isinstance(state, Mapping) else summarize(state)
            raise ValueError(
                f"state must be of stages {', '.join(own)}, got {names}: "
                "load it on the rank that saved it, with the same split"
            )
        for stage in self.stages:
            saved = state[str(stage.index)]
            check_format(saved)
            check_like(saved.get("step", 0), self._total_steps, f"{stage.index}.step")
            stage.check_state(saved, str(stage.index))
        # Older versions did not save it.
        steps = [str(state[number].get("step", "one not recorded")) for number in own]
        if len(set(steps)) > 1 and not _is_rescued(state):
            raise ValueError(f"state must be of one step, got stages of {', '.join(steps)}")
        return []

    def _barrier(self) -> None:
        with self._recording_failure() as executor:
            executor.barrier()

    @contextmanager
    def _recording_failure(self) -> Iterator[Executor]:
        """Yield the executor, and keep the error that it raises."""
        assert self._executor is not None
        try:
            yield self._executor
        except BaseException as error:  # an interrupt also leaves microbatches in flight
            self._failure = str(error) or type(error).__name__
            raise

    def _before_updates(self) -> None:
        """Check the losses of the step on all ranks, and clip the gradients."""
        assert self._executor is not None
        self._executor.check_losses()
        if self._max_norm is not None or self._criterion.defers_check:
            self._p2p.barrier()  # raises if a rank has failed; the all-reduce below would hang
        if self._max_norm is None:
            return
        parameters = [p for stage in self.stages for p in stage.optimized]
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_grad_norm_(gradients, self._max_norm, self._group)

    def _build_for(self, splitter: MicrobatchSplitter) -> None:
        """Build the stages, after an automatic split by the first microbatch if none was given."""
        if self._executor is not None:
            return
        if self._split is not None:
            self._build(self._split, splitter)
            return
        example: Any = None
        problem: str | TypeError | None = None
        if self._rank == 0:
            problem = splitter.find_input_error()
            example = None if problem else splitter.inputs(0)
        self._check_consistent([], problem)
        num_stages = self._shape.num_stages
        self._build(split_automatically(self._layers, example, num_stages, self._group), splitter)

    def _build(self, split: tuple[int, ...], splitter: MicrobatchSplitter | None) -> None:
        with self._raising_on_all_ranks():
            modules = slice_layers(self._layers, split)
        codecs = (self._codec(compressor) for compressor in self._compressors.values())
        local = [modules[stage] for stage in self._shape.stages(self._rank)]
        parameters = (p for module in local for p in module.parameters())
        is_single = self._shape.num_ranks == 1
        device = next((p.device for p in parameters), None)
        if device is None:
            device = torch.device("cpu") if is_single else device_of(self._group)
        groups = None
        if not is_single:
            is_ring = self._shape.num_stages > self._shape.num_ranks
            groups = P2PGroups.connect(self._group, device, is_ring=is_ring)
        # The same on all ranks: they wait for each other before an update.
        self._criterion.defers_check = (
            groups.headers is not None if groups else device.type != "cpu"
        )
        self._p2p = StageP2P(self._shape, groups, *codecs)
        with self._raising_on_all_ranks():
            executor = build_executor(
                self._schedule, modules, self._shape, self._rank,
                self._optimizer_fn, self._criterion, self._p2p, splitter,
            )  # fmt: skip
            if self._scheduler_fn is not None:
                for stage in executor.stages.values():
                    stage.schedule_rates(self._scheduler_fn)
        self._split, self._executor = split, executor

    @contextmanager
    def _raising_on_all_ranks(self) -> Iterator[None]:
        problem, cause = None, None
        try:
            yield
        except Exception as error:  # perhaps on one rank only, while the others wait for it
            problem, cause = f"{type(error).__name__}: {error}", error
        try:
            self._check_consistent([], problem)
        except ValueError as error:
            raise error from cause

    def _codec(self, compressor: Compressor | None) -> Codec:
        return IdentityCodec() if compressor is None else CompressingCodec(compressor, self._rank)

    def _check_consistent(
        self, config_fields: list[tuple[str, str]], problem: str | TypeError | None
    ) -> None:
        if dist.is_initialized():
            check_consistent_across_ranks(config_fields, problem, self._group)
        elif problem is not None:
            raise problem if isinstance(problem, TypeError) else ValueError(problem)

    def _validation_error(
        self,
        num_stages: int,
        num_microbatches: int,
        num_ranks: int,
        split: Sequence[int] | None,
    ) -> str | TypeError | None:
        """Return what is wrong with the arguments; None: nothing."""
        try:
            shape = PipelineShape(num_stages, num_microbatches, num_ranks)
            check_num_stages(len(self._layers), num_stages)
            if split is not None:
                check_split(split, len(self._layers), num_stages)
        except ValueError as error:
            return str(error)
        if self._max_norm is not None and not isinstance(self._schedule, Flushing):
            return (
                f"max_norm must be None with a schedule that does not flush, got {self._max_norm}: "
                "no stage ever has the gradient of the whole model; clip a stage's own in a hook "
                "of its optimizer (register_step_pre_hook)"
            )
        return self._schedule.validation_error(shape) or self._compressor_error()

    def _compressor_error(self) -> str | TypeError | None:
        for name, compressor in self._compressors.items():
            if not isinstance(compressor, Compressor | None):
                rule = "an object such as Int8() or Cast(), or None"
                return wrong_type(name, rule, compressor)
            problem = compressor and compressor.validation_error(AttachPoint.PIPELINE)
            if problem:
                return f"{name}: {problem}"
        return None

    def _check_health(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "the pipeline has failed; create a new PipelineTrainer, and load into it what "
                f"rescue_state_dict() of this one returns: {self._failure}"
            )

    def _check_group(self) -> None:
        if self._shape.num_ranks > 1:
            check_group_exists()

    def _check_empty(self, what: str) -> None:
        self._check_health()
        if self._num_steps and not isinstance(self._schedule, Flushing):
            raise RuntimeError(
                f"{what} must be called after flush(), got it with microbatches in flight"
            )


def _find_type_error(
    schedule: object, loss_fn: object, optimizer_fn: object, scheduler_fn: object
) -> TypeError | None:
    """Return the first argument of a wrong type, as an error, or None."""
    if not has_methods(schedule, "step", "update_index", "versions", "validation_error"):
        rule = "an object such as OneForwardOneBackward() or PipeOptim()"
        return wrong_type("schedule", rule, schedule)
    if not callable(loss_fn):
        return wrong_type("loss_fn", "a function of output and target", loss_fn)
    if not callable(optimizer_fn):
        rule = "a function of a list of parameters such as lambda p: torch.optim.SGD(p, lr=0.1)"
        return wrong_type("optimizer_fn", rule, optimizer_fn)
    if scheduler_fn is not None and not callable(scheduler_fn):
        rule = "a function of an optimizer such as lambda o: StepLR(o, 10), or None"
        return wrong_type("scheduler_fn", rule, scheduler_fn)
    return None


def _shares_update_fn(schedule: Schedule, shape: PipelineShape) -> Callable[[int], bool]:
    """Return a function of a microbatch: whether its whole step goes into one update."""

    def shares_update(microbatch: int) -> bool:
        first = microbatch - microbatch % shape.num_microbatches
        last = first + shape.num_microbatches - 1
        return schedule.update_index(shape, first) == schedule.update_index(shape, last)

    return shares_update


def _is_rescued(state: Mapping[str, Any]) -> bool:
    """Return whether a rank's state is of ``rescue_state_dict``."""
    return any(saved.get("rescued", False) for saved in state.values())


def _warn_if_half_updated(state: Mapping[str, Any]) -> None:
    found = [number for number, saved in state.items() if saved.get("half_updated", False)]
    if found:
        warnings.warn(
            f"the failure was inside of an update of stage {', '.join(found)}, which may have "
            "changed a part of its weights and of its optimizer's state: load an earlier "
            "checkpoint if that matters",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def _evaluating(stages: list[Stage]) -> Iterator[None]:
    """Set all modules to evaluation mode, then restore each."""
    modules = [module for stage in stages for module in stage.module.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
