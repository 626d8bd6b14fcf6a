"""The trainer of a model that is split into stages, one or more for each rank."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..comm import (
    Value,
    new_trainer_group,
    warn_if_alone,
)
from ..comm.errors import place_of
from ..compression import Compressor
from .checkpoint import load_stages, rescue_stages, save_stages
from .named_state import NamedStage, check_names, full_state, load_checkpoint, sharded_state
from .partition.names import names_of_modules, plain_names
from .partition.torch_pipe import UnpackInputs, layers_and_split
from .prediction.corrections import Correction
from .runtime.build_stage import OptimizerFactory
from .runtime.clipping import LossScale
from .runtime.inputs import batch_of_call, inputs_of_call
from .runtime.loss import Criterion, Loss, find_target_refusal, shares_update_fn
from .runtime.loss_weights import LossWeightFn
from .runtime.microbatches import concatenate
from .runtime.refusals import refusal_of
from .runtime.stage import SchedulerFactory, Stage
from .runtime.telemetry import Span
from .schedules.schedule import Flushing, Schedule
from .schedules.shape import PipelineShape
from .schedules.streaming import Streaming
from .simulation.chrome_trace import export_chrome_trace, gather_spans
from .trainer_base import TrainerBase
from .validation import (
    find_option_error,
    find_size_error,
    find_type_error,
)


class PipelineTrainer(TrainerBase):
    """Trains layers in stages, in place: rank r holds stages r, r + num_ranks, ...

    Every rank makes the same calls in the same order. The schedule defines the order of a rank's
    forwards, backwards and updates, and the weight versions that they read. Each rank reads only
    the ``layers`` of its own stages, once the split is known. Each layer is called with the output
    of the previous one, a tensor or a tuple of tensors, as in ``nn.Sequential``.

    The gradient of an update is the mean over its samples: each microbatch's loss is weighted by
    its fraction of them, or of what ``loss_weight_fn`` counts.

    Layers of several stages may share parameters, such as an embedding that is tied to the head.
    The first stage that holds one owns it: its optimizer updates it with the sum of all gradients.
    With schedules that flush, the gradients are summed and the weights copied once a step. With
    others, which update at each microbatch, the weight travels with the activations, in the version
    that the first stage's forward reads, and its gradient with theirs, through all stages between:
    that costs its size for each microbatch. (Do not recompute a layer that reads it.)

    A batch that is invalid, or a loss that is not finite, harms nothing: training goes on with the
    next batch. Inputs are checked before anything is sent, and a step without valid ones is not
    taken. A microbatch with an invalid target, or a loss that is not finite, has no gradient; the
    update that it would go into is skipped on all stages, with the scheduler's step, as soon as
    each gets there, and counts only for the versions of the weights. (What forwards have written,
    such as the statistics of BatchNorm, stays.) Whether a loss is finite the host reads: once a
    step with schedules that flush, else before each backward of the last stage.

    Inside ``torch.autocast`` forwards and losses run in it, backwards outside of it, and
    activations and their gradients are sent in the dtypes that they have. Autograd keeps the cast
    of a weight, so the backward of a layer that casts reads the version of its forward, with
    schedules that otherwise read the live weights, too.

    A layer that ``torch.utils.checkpoint`` recomputes does so with the weights that its backward
    reads: the forward's version, or with ``weights="live"`` the live ones.

    Args:
        layers: an ``nn.Sequential`` or a list of modules, as many on every rank; or a model that is
            split for ``torch.distributed.pipelining``: a ``Pipe``, or this rank's stages of it.
        loss_fn: ``loss_fn(output, target)``, 0-d: the mean over a microbatch.
        optimizer_fn: builds the optimizer of a stage from the list of its parameters that require
            gradients; or a list of optimizers that share them out, such as Muon for matrices and
            AdamW for the rest. A function with two required positional parameters is called with
            the list of their names, too: as ``nn.Sequential(*layers)`` has them, such as
            "3.weight", and "head.weight" of a head of ``Interlocking``.
        schedule: such as ``PipeOptim()`` or ``OneForwardOneBackward()``.
        num_microbatches: how many parts the batch of a ``step`` is split into.
        process_group: None means the default group; without one there is a single process.
        split: the indices into ``layers`` at which stages 1 and following begin. None: balanced by
            the times of the first microbatch.
        num_stages: a multiple of the ranks; None: that of ``split``, or else one for each rank.
        scheduler_fn: builds the learning-rate scheduler of each optimizer, which steps after each
            update; None: no scheduler.
        max_norm: clip the gradient of the whole model to this 2-norm before an update. With a
            schedule that never flushes, stage s clips update u by the gradients g_i(u) of itself
            and the later stages, and by the last ones that it knows of each earlier stage::

                sqrt(sum_{i >= s} |g_i(u)|^2 + sum_{j < s} |g_j(u - ceil((1 + s - j) / m))|^2)

            once the pipeline is full, with m microbatches for each update. So the first stage clips
            by the exact norm. Before its first update, a stage counts 0. Updates that are skipped
            do not count. Not with ``Interlocking``.
        gradient_accumulation_steps: how many steps go into an update, with the mean of their
            gradients, as with ``no_sync()`` and ``loss / steps`` in DistributedDataParallel;
            clipping and learning-rate schedulers come with the update. Only with schedules that
            flush. ``flush`` and ``evaluate`` do not update; a refused step does not count.
        grad_scaler: for ``torch.autocast`` to float16: its scale multiplies the losses, and divides
            the gradients before they are clipped. If a gradient of any stage is not finite, all
            stages skip the update, and the scale backs off, by torch's rule, on all ranks alike.
            Do not call its ``step`` and ``update``; save its state yourself. Only with schedules
            that flush, for float32 parameters. None: no scale.
        correction: of delayed gradients, such as ``UpdateErrorFeedback()`` or ``StageMomentum()``;
            only with schedules that do not flush. None: none.
        compress_activations: compressor for the activations sent to the next stage on another rank,
            in ``evaluate`` too: floating-point tensors, which must be float32, bfloat16 or float16.
            It must be stateless, as each message is of other samples. Other tensors, and those
            between stages of one rank, stay uncompressed. None: all do.
        compress_gradients: likewise for the gradients sent to the previous stage.
        nonfinite: of a loss that is not finite: "raise" a NonFiniteError besides, on each rank at
            the end of the call in which it skips the update, in the last one in ``flush``; or
            "skip" the update alone. On GPUs a schedule that does not flush decides it on the
            device if all stages have optimizers of ``pyparallel.optim``, SGD without dampening or
            others with ``capturable=True``, and without a correction: the rank of the last stage
            then raises at the end of the step, the others in ``flush``, and learning-rate
            schedulers, also PipeMare's, go on. Otherwise the host waits for each loss.
        loss_weight_fn: the weight of a microbatch's loss in the mean over a step, of its target: a
            positive number or 0-d tensor, such as ``lambda target: (target != -100).sum()`` for a
            mean over tokens, in ``evaluate`` too; the host waits for those of a step at once. In
            an update for each microbatch its mean has the weight 1. None: its number of samples.
        measure_gradient_norms: compute the norm of each stage's gradient in every update, in a pass
            over it, for ``metrics``.

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
        gradient_accumulation_steps: int = 1,
        grad_scaler: torch.amp.GradScaler | None = None,
        correction: Correction | None = None,
        compress_activations: Compressor | None = None,
        compress_gradients: Compressor | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        loss_weight_fn: LossWeightFn | None = None,
        measure_gradient_norms: bool = False,
    ) -> None:
        super().__init__()
        self._model = layers
        self._layers, split = layers_and_split(layers, split)
        self._scheduler_fn = scheduler_fn
        self._max_norm = max_norm
        self._correction = correction
        self._compressors = {
            "compress_activations": compress_activations,
            "compress_gradients": compress_gradients,
        }
        self._schedule = schedule
        self._nonfinite = nonfinite
        self._loss_weight_fn = loss_weight_fn
        self._measure_gradient_norms = measure_gradient_norms
        self._loss: float | None = None  # of the last step
        self._group = process_group
        warn_if_alone()
        single = not dist.is_initialized()
        self._rank = 0 if single else dist.get_rank(process_group)
        num_ranks = 1 if single else dist.get_world_size(process_group)
        if num_stages is None:
            num_stages = num_ranks if split is None else len(split) + 1
        problem: str | TypeError | None = find_type_error(
            self._layers, schedule, loss_fn, optimizer_fn, scheduler_fn, loss_weight_fn
        )
        sizes = num_stages, num_microbatches, num_ranks
        problem = problem or find_size_error(schedule, sizes, len(self._layers), split)
        problem = problem or find_option_error(
            schedule, max_norm, gradient_accumulation_steps, grad_scaler, correction, nonfinite,
            self._compressors,
        )  # fmt: skip
        self._check_consistent(
            [
                ("schedule", repr(schedule)),
                ("num_microbatches", repr(num_microbatches)),
                ("number of layers", repr(len(self._layers))),
                ("max_norm", repr(max_norm)),
                ("gradient_accumulation_steps", repr(gradient_accumulation_steps)),
                ("grad_scaler", _describe_scaler(grad_scaler)),
                ("correction", repr(correction)),
                ("nonfinite", repr(nonfinite)),
                ("loss_weight_fn", "None" if loss_weight_fn is None else "a function"),
                ("split", repr(None if split is None else list(split))),
                *((name, repr(each)) for name, each in self._compressors.items()),
            ],
            problem,
        )
        if not single:
            self._group = new_trainer_group(process_group)
        self._shape = PipelineShape(*sizes)
        # Not a method: a reference cycle would keep the groups' threads until garbage collection.
        self._criterion = Criterion(loss_fn, shares_update_fn(schedule, self._shape))
        self._criterion.steps_per_update = gradient_accumulation_steps
        self._loss_scale = None
        if grad_scaler is not None and grad_scaler.is_enabled():
            self._loss_scale = LossScale(grad_scaler, self._group)
        self._optimizer_fn = optimizer_fn
        self._split = None if split is None else tuple(split)
        if self._split is not None and not schedule.needs_batch:
            self._build(self._split, None)

    @property
    def stages(self) -> list[Stage]:
        """Return this rank's stages, ascending.

        With an automatic split, and with ``Interlocking``, whose heads are built for the stages'
        outputs, there are none before ``prepare`` or the first step.
        """
        return self._stages

    @property
    def split(self) -> tuple[int, ...] | None:
        """Return where stages 1 and following begin; None before an automatic split.

        Pass it to a trainer that will load a state: an automatic split may come out differently.
        """
        return self._split

    @property
    def spans(self) -> list[Span]:
        """Return the actions of this rank in the last step, with their times."""
        return [] if self._executor is None else self._executor.telemetry.spans

    @property
    def peak_weight_copies(self) -> list[int]:
        """Return for each of this rank's stages the most copies of its weights, live included."""
        return [stage.weights.peak_copies for stage in self.stages]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent to other ranks, headers included."""
        return 0 if self._executor is None else self._p2p.bytes_sent

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged. Seconds are the host's, of the last step, ``flush`` or ``evaluate``;
        of the last step's loss the host knows already. Of ``stageN``, a stage of this rank:

        * ``busy_seconds``;
        * ``staleness``: over the gradients that were applied, the mean number of updates between
          the weights that the forward read, or predicted from, and those that the update changed;
          counted as they happen. ``prediction_horizon``: by how many updates the weights were
          predicted ahead. Their difference is left. Missing if there was no update;
        * ``updates`` since the stage was built, and in what it has loaded; ``skipped_updates``, but
          those that are decided on a GPU;
        * ``peak_microbatches``: the most in flight; ``peak_weight_copies`` since the stage was
          built, the live weights included, and their ``peak_weight_bytes``;
        * ``gradient_norm`` of the last update, before clipping, if ``measure_gradient_norms``; the
          host waits for it here.

        Of ``rank``: ``busy_seconds``; ``waiting_seconds``, of which ``waiting_for_activations_``,
        ``waiting_for_gradients_`` and, in barriers, ``waiting_for_ranks_seconds``; ``bytes_sent``
        and ``bytes_received`` since the stages were built, headers included; on a GPU
        ``peak_memory_bytes`` of torch's allocator. And ``loss``, where ``step`` has returned one.
        Nothing before the stages are built.
        """
        if self._executor is None:
            return {}
        loss = {} if self._loss is None else {"loss": self._loss}
        return loss | self._executor.telemetry.metrics()

    def export_chrome_trace(
        self, path: str | os.PathLike[str], spans: Sequence[Span] | None = None
    ) -> None:
        """Write the last step of all ranks as one file for Perfetto or ``chrome://tracing``.

        All ranks must call this together; rank 0 of the process group writes. See
        ``pyparallel.pipeline.export_chrome_trace`` for what the file has.

        Args:
            path: such as "trace.json".
            spans: of this rank, such as those of several steps; None: ``self.spans``.

        Raises:
            OSError: the file cannot be written; on rank 0.
            PeerError: a rank died.
        """
        self._check_group()
        own = self.spans if spans is None else spans
        gathered = gather_spans(own, None if self._shape.num_ranks == 1 else self._group)
        if self._rank == 0:
            export_chrome_trace(gathered, path)

    def step(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Train on one batch, with the actions that the schedule has for this step.

        Batches may differ in their numbers of samples, from ``num_microbatches`` up.

        Args:
            args: positional arguments of the first layer, read on the rank of the first stage: of
                tensors, also in lists and dicts, each microbatch gets a part along dimension 0, of
                other values all. Two alone are inputs and target: ``step(x, y)``. One alone may be
                a loader's batch: a list of the arguments, or a dict of keyword arguments.
            target: a tensor of shape (batch, ...), or a tuple, list or dict of such tensors, passed
                to ``loss_fn`` in the same structure; read on the rank of the last stage, with
                ``Interlocking`` on every rank.
            arg_mbs: ``args`` that are split already, a tuple for each microbatch, of any shapes; as
                in torch 2.14, without ``args``, ``kwargs`` and ``target``.
            kwarg_mbs: likewise ``kwargs``, a dict for each microbatch.
            target_mbs: likewise ``target``. Its first dimension is the number of samples, as that
                of its inputs, but for ``loss_weight_fn``.
            kwargs: keyword arguments of the first layer, read and split as ``args``.

        Returns:
            The mean loss of the batch on the rank of the last stage; None elsewhere.

        Raises:
            DisagreementError: (a ValueError) the inputs or the target are invalid, or of different
                samples; training goes on with the next batch. Every rank raises the same message:
                in this step for inputs, and with schedules that flush; else as ``nonfinite`` says.
            ArgumentTypeError: (a DisagreementError) likewise, of a wrong type.
            NonFiniteError: a loss is not finite; training goes on likewise.
            StageError: a stage failed or a rank died; every rank raises the same message.
        """
        self._check_health()
        self._check_group()
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        splitter = self._split_batch(*batch, self._num_steps)
        splitter.place = place_of(self._rank, self._total_steps)
        self._build_for(splitter)
        if self._loss_scale is not None:
            self._criterion.scale = self._loss_scale.read()
        flushes = isinstance(self._schedule, Flushing)
        accumulates = self._num_accumulated + 1 < self._criterion.steps_per_update
        with self._recording_failure() as executor:
            executor.train(
                self._actions_of_step(self._num_steps, accumulates),
                splitter,
                (lambda: self._before_updates(splitter)) if flushes else None,
                empty=flushes,
            )
        self._num_steps += 1
        self._total_steps += 1
        if flushes:
            refusal = self._criterion.find_non_finite(splitter) if accumulates else None
            self._num_accumulated = self._num_accumulated + 1 if accumulates else 0
            # The program may end now, or another rank may have failed.
            refusal = self._barrier(refusal)
            if refusal is not None:
                executor.skip_update(refusal)
            if not accumulates:
                self._copy_ties()
        elif self._criterion.defers_check:
            self._find_non_finite(splitter)
        self._loss = None
        self._loss = self._report()
        return self._loss

    def flush(self) -> None:
        """Run all pending backwards and updates; weight versions then start at 0 again.

        Raises:
            DisagreementError: likewise, and NonFiniteError, as of ``step``, if a stage has skipped
                an update here; the pipeline is empty.
            StageError: a stage failed or a rank died; every rank raises the same message.
        """
        self._check_health()
        self._check_group()
        self._flush()
        self._raise_refusals()

    def _flush(self) -> None:
        if not self._num_steps:
            return
        steps, self._num_steps = self._num_steps, 0
        no_batch = self._split_batch(None, None)
        # Optimizer states created in inference mode could not be updated outside it.
        with torch.inference_mode(mode=False), self._recording_failure() as executor:
            executor.train(lambda rank: self._schedule.drain(self._shape, rank, steps), no_batch)
        refusal, self._non_finite = self._non_finite, None
        self._barrier(refusal)
        executor.restart()
        self._copy_ties()

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Flush, and return the loss of a batch in evaluation mode.

        Arguments and errors are as of ``step`` and ``flush``, but that a loss may be any number;
        every rank raises in this call, at its end.
        """
        self._check_health()
        self._check_group()
        self._flush()
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        splitter = self._split_batch(*batch)
        self._build_for(splitter)
        with self._evaluating() as executor:
            executor.evaluate(splitter)
        self._barrier(find_target_refusal(splitter) if self._is_last else None)
        return self._report()

    def predict(
        self,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Flush, and return the model's outputs for a batch in evaluation mode, without a target.

        Args:
            args: positional arguments of the first layer, as of ``step``, however many.
            arg_mbs: as of ``step``.
            kwarg_mbs: likewise.
            kwargs: keyword arguments of the first layer.

        Returns:
            On the rank of the last stage its outputs, a tensor or a tuple of tensors, those of the
            microbatches concatenated along dimension 0; a list of each microbatch's if ``arg_mbs``
            or ``kwarg_mbs`` are given on that rank. None elsewhere.

        Raises:
            DisagreementError: the inputs are invalid, or the outputs cannot be concatenated.
            RuntimeError: with ``Interlocking``, before the first step or ``prepare``.
            StageError: a stage failed or a rank died; every rank raises the same message.
        """
        self._check_health()
        self._check_group()
        if self._executor is None and self._schedule.needs_batch:
            raise RuntimeError(
                "predict() must come after the first step or prepare(...) with this schedule, "
                "whose heads are built for a target, got no stages yet"
            )
        self._flush()
        splitter = self._split_batch(inputs_of_call(args, kwargs, arg_mbs, kwarg_mbs), None)
        self._build_for(splitter)
        outputs: list[Value] = []
        with self._evaluating() as executor:
            executor.evaluate(splitter, outputs)
        predicted: Any = None
        refusal = None
        if self._is_last:
            try:
                is_whole = arg_mbs is None and kwarg_mbs is None
                predicted = concatenate(outputs) if is_whole else outputs
            except Exception as error:  # the other ranks are in the barrier
                refusal = refusal_of(splitter.place, str(error))
        self._barrier(refusal)
        self._raise_refusals()
        return predicted

    def prepare(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the stages without training, if they are not built yet.

        Needed to load a state, or to use the stages' optimizers, before the first step. Arguments
        are as of ``step``.
        """
        self._check_health()
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._build_for(self._split_batch(*batch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages: modules, optimizers and schedulers.

        Tensors are not copied: write it before the next step, with which its checksums no longer
        agree.

        Raises:
            RuntimeError: microbatches are in flight, or gradients accumulated; call ``flush``, or
                ``step`` until the update, before.
        """
        self._check_empty("state_dict()")
        return save_stages(self.stages, self._total_steps)

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
        return rescue_stages(self.stages, self._total_steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank; all ranks call it together.

        Every rank checks all of its state, and the ranks compare their steps, before anything is
        written. The steps may differ if a rank's state is of ``rescue_state_dict``; other ranks,
        such as one that died, may then load an older checkpoint.

        Warns:
            RuntimeWarning: a stage of the state may be half updated.

        Raises:
            RuntimeError: microbatches are in flight, or gradients accumulated, or the stages are
                not built yet.
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
        self._total_steps = load_stages(self.stages, state, self._group, self._check_consistent)
        self._tied.copy_from_owners()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model, with its own keys; all ranks call it together.

        Returns:
            On rank 0 copies in the CPU's memory, which the plain model loads; {} elsewhere. The
            names are those of the model that was split: of an ``nn.Sequential``, of the model of
            ``split_model`` or of torch's ``Pipe``; of a list of layers, of ``nn.Sequential`` of it.

        Raises:
            RuntimeError: microbatches are in flight, or the stages are not built yet.
            ValueError: stages of torch's have tensors of one name, as they are not of one model.
        """
        return full_state(
            self._named_stages("full_state_dict()"), self._group, self._shape.num_ranks
        )

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, under the plain model's own keys.

        It is for ``torch.distributed.checkpoint``, whose ``save`` or ``async_save`` all ranks call
        with it, and holds the model, the optimizers, the schedulers and the number of steps. The
        plain model loads its part too: ``load({"model": model.state_dict()}, checkpoint_id=...)``.
        Tensors are not copied: ``async_save`` copies them before it returns.

        Raises:
            RuntimeError: microbatches are in flight, or the stages are not built yet; or with
                ``Interlocking``, whose heads are no part of the model: use ``state_dict()``.
        """
        stages = self._named_stages("sharded_state_dict()")
        if isinstance(self._schedule, Flushing | Streaming):
            return sharded_state(stages, self._total_steps)
        raise RuntimeError(
            f"sharded_state_dict() must be of a schedule without heads, got {self._schedule!r}, "
            "whose heads are no part of the model: save state_dict()"
        )

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Load a folder that ``torch.distributed.checkpoint`` has saved of ``sharded_state_dict``.

        The number of stages, the split and the schedule may be others than those that saved it. All
        ranks call it together, and check all that they read before anything is written.

        Raises:
            DisagreementError: (a ValueError) on all ranks, which have changed nothing: the
                checkpoint is of another model or other optimizers.
            RuntimeError: microbatches are in flight, or the stages are not built yet.
        """
        stages = self._named_stages("load_checkpoint()")
        step = load_checkpoint(stages, checkpoint_id, self._group, self._check_consistent)
        self._total_steps = step
        self._tied.copy_from_owners()

    def _named_stages(self, what: str) -> list[NamedStage]:
        """Return this rank's stages with the names of the whole model."""
        self._check_empty(what)
        if self._executor is None:
            raise RuntimeError(
                f"{what} must come after prepare(inputs, target), which builds the stages, got "
                "none yet"
            )
        names = names_of_modules(self._model, self._layers)
        stages = [NamedStage(each, plain_names(each.module, names)) for each in self.stages]
        if any(isinstance(layer, UnpackInputs) for layer in self._layers):
            check_names(stages, self._group, self._shape.num_ranks)
        return stages


def _describe_scaler(grad_scaler: torch.amp.GradScaler | None) -> str:
    """Return what ranks compare of a scaler; of another object, which is refused, its class."""
    if isinstance(grad_scaler, torch.amp.GradScaler):
        return repr(grad_scaler.state_dict())
    return type(grad_scaler).__name__
