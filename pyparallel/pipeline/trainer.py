"""The trainer of a model that is split into stages, one or more for each rank."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from ..comm import Run, warn_if_alone
from ..comm.errors import concise, place_of
from ..compression import Compressor
from ..training import Algorithm
from ..training.arguments import find_error, require
from ..training.step_hook import refuse_capture
from ..training.trainer import Trainer, raising_on_all_ranks
from .arguments import TrainerArguments
from .build import build_stages
from .checkpoint import load_stages, rescue_stages, save_stages, split_of
from .errors import agree
from .full_state import full_state, load_into
from .named_state import (
    NamedStage,
    check_shardable,
    load_checkpoint,
    name_stages,
    read_split,
    sharded_state,
)
from .partition import check_split
from .partition.torch_pipe import layers_and_split
from .pipeline import Pipeline
from .prediction.corrections import Correction
from .replicas import REPLICATE, STAGE, Replicas, check_mesh
from .runtime.build_stage import OptimizerFactory, find_warm_up
from .runtime.chrome_trace import export_chrome_trace, gather_spans
from .runtime.inputs import batch_of_call, inputs_of_call
from .runtime.loss import Loss
from .runtime.loss_weights import LossWeightFn
from .runtime.microbatches import MicrobatchSplitter
from .runtime.stage import SchedulerFactory, Stage
from .runtime.telemetry import Span
from .schedules.one_forward_one_backward import OneForwardOneBackward
from .schedules.schedule import Schedule
from .validation import find_argument_error

# Steps in which ranks compare targets: of a small step it is 1 %, and the host waits for a device.
_FIRST_STEPS, _INTERVAL = 10, 20


class PipelineTrainer(Trainer):
    """Trains layers in stages, in place: rank r holds stages r, r + num_ranks, ...

    Every rank makes the same calls in the same order, and reads only the ``layers`` of its own
    stages, once the split is known. Each layer is called with the output of the previous one, a
    tensor or a tuple of tensors, as in ``nn.Sequential``. The gradient of an update is the mean
    over its samples. The explanation "What a step of a pipeline does" has more: tied weights,
    batches and losses that are refused, autocast, recomputation, clipping.

    Args:
        layers: an ``nn.Sequential`` or a list of modules, as many on every rank; or a model that is
            split for ``torch.distributed.pipelining``: a ``Pipe``, or this rank's stages of it.
        loss_fn: ``loss_fn(output, target)``, 0-d: the mean over a microbatch. One that trains
            parameters of its own is refused in the first step: they belong into the last layer.
        optimizer_fn: builds the optimizer of a stage from the list of its parameters that require
            gradients; or a list of optimizers that share them out, such as Muon for matrices and
            AdamW for the rest. A function with two required positional parameters is called with
            the list of their names, too: as ``nn.Sequential(*layers)`` has them, such as
            "3.weight", and "head.weight" of a head of ``Interlocking``.
        schedule: such as ``PipeOptim()``; None: ``OneForwardOneBackward()``, whose updates are
            those of one process.
        num_microbatches: how many parts the batch of a ``step`` is split into; None: twice the
            number of stages. With more of them stages wait less, for smaller parts.
        process_group: None means the default group; without one there is a single process.
        mesh: of two dimensions, ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate",
            "stage"))``: as many whole pipelines, each with its own batches, whose stages are
            averaged with the same stage of the others.
        replicas: with a mesh, how: ``AllReduce()`` of gradients, with schedules that flush, which
            equals one pipeline with the joined batches of equal size; or a gossip algorithm such as
            ``SGP(overlap=1)`` or ``DiLoCo(50)``, of which a stage takes a step with each of its
            updates: what is merged is a part of the update, before weights are predicted.
        split: the indices into ``layers`` at which stages 1 and following begin. None: balanced by
            the times of the first microbatch.
        num_stages: a multiple of the ranks; None: that of ``split``, or else one for each rank.
        scheduler_fn: builds the learning-rate scheduler of an optimizer; it steps after an update,
            of which most schedules that do not flush have one for each microbatch.
        max_norm: clip the gradient of the whole model to this 2-norm before an update; with a
            schedule that never flushes, by the last norms that a stage knows. Not with
            ``Interlocking``.
        gradient_accumulation_steps: how many steps go into an update, with the mean of their
            gradients, or with a ``loss_weight_fn`` the mean over the weights of all of them. Only
            with schedules that flush. A refused step does not count. ``flush`` updates with the
            steps since the last update.
        grad_scaler: for ``torch.autocast`` to float16, of float32 parameters. Do not call its
            ``step`` and ``update``; save its state yourself. Only with schedules that flush.
        correction: of delayed gradients, such as ``UpdateErrorFeedback()`` or ``StageMomentum()``;
            only with schedules that do not flush, after their synchronous updates.
        compress_activations: compressor for the activations sent to the next stage on another rank,
            in ``evaluate`` too: floating-point tensors, which must be float32, bfloat16 or float16.
            It must be stateless. None, or another tensor, or both stages on one rank: uncompressed.
        compress_gradients: likewise for the gradients sent to the previous stage.
        nonfinite: of a loss that is not finite, whose update all stages skip: "raise" a
            NonFiniteError besides, on each rank at the end of the call in which it skips; or "skip"
            the update alone.
        loss_weight_fn: the weight of a microbatch's loss in the mean over an update, of its target:
            a number or 0-d tensor, such as ``lambda target: (target != -100).sum()`` for a mean
            over tokens, in ``evaluate`` too. Of a microbatch with the weight 0 there is no loss;
            an update of nothing else is skipped. None: its number of samples.
        measure_gradient_norms: of each stage's gradient in every update, in a pass over it.

    Arguments that are invalid or differ are a ValueError (DisagreementError between ranks), one of
    a wrong type a TypeError (ArgumentTypeError).
    """

    _copy_instead = "save its state_dict(), or copy its layers"

    @concise
    def __init__(
        self,
        layers: Any,
        loss_fn: Loss,
        optimizer_fn: OptimizerFactory,
        schedule: Schedule | None = None,
        *,
        num_microbatches: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        replicas: Algorithm | None = None,
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
        all_layers, split = layers_and_split(layers, split)
        warn_if_alone()
        found = find_error(lambda: check_mesh(mesh, replicas, process_group))
        if found is not None or mesh is not None:
            agree(Run(), [], found)
        num_replicas = 1 if mesh is None else mesh[REPLICATE].size()
        replicas = None if replicas is None else replicas.bind(num_replicas)
        process_group = process_group if mesh is None else mesh.get_group(STAGE)
        of_ranks = Run(process_group)
        if num_stages is None:
            num_stages = len(split) + 1 if isinstance(split, Sequence) else of_ranks.size
        if num_microbatches is None:
            num_microbatches = 2 * num_stages
        schedule = OneForwardOneBackward() if schedule is None else schedule
        compressors = {
            "compress_activations": compress_activations,
            "compress_gradients": compress_gradients,
        }
        arguments = TrainerArguments(
            layers, all_layers, split, loss_fn, optimizer_fn, schedule, num_stages,
            num_microbatches, num_ranks=of_ranks.size, rank=of_ranks.group_rank,
            scheduler_fn=scheduler_fn, max_norm=max_norm, grad_scaler=grad_scaler,
            gradient_accumulation_steps=gradient_accumulation_steps, correction=correction,
            compressors=compressors, nonfinite=nonfinite, loss_weight_fn=loss_weight_fn,
            measure_gradient_norms=measure_gradient_norms, replicas=replicas,
            num_replicas=num_replicas,
            replica=None if mesh is None else mesh.get_local_rank(REPLICATE),
        )  # fmt: skip
        compared = of_ranks if mesh is None else Run()
        agree(compared, arguments.fields(), find_argument_error(arguments))
        started = schedule.with_warm_up(partial(find_warm_up, scheduler_fn))
        if started is not schedule:  # so on all ranks, whose schedules are equal
            agree(of_ranks, [("schedule with the warm-up of scheduler_fn", repr(started))], None)
        self._arguments = replace(arguments, schedule=started)
        self._replicas: Replicas | None = None
        self._of_replica: Run | None = None
        if mesh is None or replicas is None:  # neither is given
            self._open_run(process_group)
        else:
            whole = self._open_run(None)
            own = dist.get_process_group_ranks(mesh.get_group(STAGE))
            same_stages = dist.get_process_group_ranks(mesh.get_group(REPLICATE))
            self._replicas = Replicas(replicas, whole, same_stages)
            self._of_replica = whole.within(own)
        self._built: Pipeline | None = None
        self._loss: float | None = None  # of the last step
        self._split = None if split is None else tuple(split)
        if self._split is not None and not schedule.needs_batch:
            self._build(None)

    @property
    def stages(self) -> list[Stage]:
        """Return this rank's stages, ascending.

        With an automatic split or ``Interlocking`` a RuntimeError before ``prepare`` or the first
        step, which build them.
        """
        pipeline = self._built_pipeline("stages")
        return pipeline.stages

    @property
    def split(self) -> tuple[int, ...] | None:
        """Return where stages 1 and following begin; None before an automatic split.

        A trainer that is given none takes that of the state it loads first.
        """
        return self._split

    @property
    def spans(self) -> list[Span]:
        """Return the actions of this rank in the last step, with their times."""
        return [] if self._pipeline is None else self._pipeline.measured.spans

    @property
    def peak_weight_copies(self) -> list[int]:
        """Return for each of this rank's stages the most copies of its weights, live included."""
        return [stage.weights.peak_copies for stage in self.stages]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent to other ranks, headers included."""
        return 0 if self._pipeline is None else self._pipeline.built.p2p.bytes_sent

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged, and there is nothing before the stages are built. Seconds are of the
        host. "Measure a pipeline" in the how-to guides has all names.
        """
        if self._pipeline is None:
            return {}
        found = {} if self._loss is None else {"loss": self._loss}
        if self._replicas is not None:
            found |= self._replicas.metrics()
        return found | self._pipeline.measured.metrics()

    def export_chrome_trace(
        self, path: str | os.PathLike[str], spans: Sequence[Span] | None = None
    ) -> None:
        """Write the last step of all ranks as one file for Perfetto or ``chrome://tracing``.

        All ranks must call this together; rank 0 of the process group writes, and raises an OSError
        of the file. ``spans`` of this rank may be those of several steps; None: ``self.spans``.
        """
        if self._run.size > 1:
            self._run.check_usable()
        own = self.spans if spans is None else spans
        gathered = gather_spans(own, self._run)
        if self._run.group_rank == 0:
            export_chrome_trace(gathered, path)

    @concise
    def step(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> float:
        """Train on one batch, with the actions that the schedule has for this step.

        Batches may differ in their numbers of samples, from ``num_microbatches`` up. All ranks pass
        the same batch, or None for what they do not read. A target that differs from that of the
        first stage's rank, if it is given there too, is refused in the first 10 steps and in every
        20th: a look takes about 1 % of a step of 5 ms, and the host waits for a device's target.
        Microbatches in flight are copied, so the batch may be written to after the call.

        Random numbers, such as dropout's, are the stages' own: torch's generators are restored
        after the call. They follow from ``torch.initial_seed()`` when the trainer was created, the
        stage, the step and the microbatch, in every schedule.

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
            The mean loss of the batch, with schedules that flush on every rank, with others on the
            rank of the last stage alone. Elsewhere it is that of an earlier step, the newest that
            has come with gradients, and nan until one has. So it must not decide what all ranks do,
            such as an early stop, as that of ``evaluate`` may.

        Raises:
            DisagreementError: (a ValueError) the inputs or the target are invalid, or of different
                samples, or the first stage or ``loss_fn`` raises an error of them, the
                ``__cause__`` on its rank; training goes on with the next batch. Every rank raises
                the same message: in this step for inputs, and with schedules that flush; else as
                ``nonfinite`` says.
            ArgumentTypeError: (a DisagreementError) likewise, of a wrong type.
            NonFiniteError: a loss is not finite; training goes on likewise.
            StageError: a stage failed or a rank died; every rank raises the same message.
        """
        self._check_usable()
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        splitter = self._split_batch(*batch, trains=True)
        pipeline = self._build_for(splitter)
        self._loss = None
        self._loss = pipeline.train(splitter)
        return self._loss

    @concise
    def flush(self) -> None:
        """Run all pending backwards and updates; weight versions then start at 0 again.

        Steps that have accumulated gradients since the last update are one of their own, such as
        the rest of an epoch, with the mean over them. A stage that has skipped an update here
        raises what ``step`` does; the pipeline is empty. With ``replicas`` all of them call it
        together, and messages in flight are merged.
        """
        self._check_usable()
        if self._pipeline is not None:
            self._pipeline.update_rest()
            self._flush()

    def _flush(self) -> None:
        if self._pipeline is not None:
            self._pipeline.drain()
            self._pipeline.flush_replicas()
            self._pipeline.raise_refusals()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Load the average of all replicas into the layers inside the context; restore it after.

        Flush, but for accumulated gradients, and weights are averaged by their push-sum weights; of
        ``DiLoCo`` and the like they are those after the last outer step; buffers such as
        BatchNorm's without weights, and not of stages with nothing to train. All ranks enter it
        together, after the first step, to ``evaluate``, ``predict`` or save the model; do not
        ``step`` inside. Without ``replicas``, or with ``AllReduce()``, weights stay as they are.
        """
        self._check_usable()
        self._flush()
        with self._built_pipeline("consensus()").consensus():
            yield

    @concise
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> float:
        """Flush, and return the loss of a batch in evaluation mode, on every rank.

        Arguments and errors are as of ``step`` and ``flush``, but that a loss may be any number,
        and the samples fewer than ``num_microbatches``; every rank raises in this call, at its end.
        """
        self._check_usable()
        if self._pipeline is not None:
            self._pipeline.drain()
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        splitter = self._split_batch(*batch)
        return self._build_for(splitter).evaluate(splitter)

    @concise
    def predict(
        self,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Flush, and return the model's outputs for a batch in evaluation mode, without a target.

        Arguments and errors are as of ``step``, but the samples may be fewer than
        ``num_microbatches``, outputs that cannot be concatenated are a DisagreementError, and
        ``Interlocking`` needs a ``step`` or ``prepare`` before.

        Returns:
            On the rank of the last stage its outputs, a tensor or a tuple of tensors, those of the
            microbatches concatenated along dimension 0; a list of each microbatch's if ``arg_mbs``
            or ``kwarg_mbs`` are given on that rank. None elsewhere.
        """
        self._check_usable()
        if self._pipeline is not None or self._arguments.schedule.needs_batch:
            self._built_pipeline("predict()").drain()
        splitter = self._split_batch(inputs_of_call(args, kwargs, arg_mbs, kwarg_mbs), None)
        concatenates = arg_mbs is None and kwarg_mbs is None
        return self._build_for(splitter).predict(splitter, concatenates=concatenates)

    @concise
    def prepare(
        self,
        *args: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the stages without training, to load a state or use optimizers before a step.

        Arguments are as of ``step``.
        """
        self._check_usable(by_ranks=False)
        batch = batch_of_call(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._build_for(self._split_batch(*batch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages: modules, optimizers and schedulers.

        It is a copy in the memory of the CPU. Microbatches in flight, or accumulated gradients, are
        a RuntimeError.
        """
        if self._pipeline is not None:
            self._pipeline.check_empty("state_dict()")
        return save_stages(self.stages, self._run.counts.steps, self._seed, self._split)

    @concise
    def rescue_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages after a failure, for a new trainer to load.

        It is that of each stage's last completed update: the live weights, without the gradients of
        microbatches in flight. Buffers are those of the last forward. ``updates``, their number,
        may differ between stages; ``half_updated``: the failure was inside of an update, and there
        is a RuntimeWarning.
        """
        pipeline = self._built_pipeline("rescue_state_dict()")
        return rescue_stages(pipeline.stages, self._run.counts.steps, self._seed, self._split)

    @concise
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank; all ranks call it together.

        A state that is damaged, of other stages or another optimizer, or saved by a newer
        pyparallel, and states of different steps, are a DisagreementError on all ranks, which have
        changed nothing. Steps may differ if a rank's state is of ``rescue_state_dict``; other
        ranks, such as one that died, may then load an older checkpoint. A RuntimeWarning names a
        stage that may be half updated. Stages that are not built yet are built with the state's
        split. Microbatches in flight, accumulated gradients, or with ``Interlocking`` stages that
        are not built yet, are a RuntimeError.
        """
        self._build_as_saved(partial(split_of, state))
        pipeline = self._check_built("load_state_dict()")
        run = self._run if self._replicas is None else self._replicas.run
        pipeline.load(*load_stages(pipeline.stages, state, run))

    @concise
    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model, with its own keys; all ranks call it together.

        On rank 0 copies in the CPU's memory, which the plain model loads; {} elsewhere. Those of a
        list of layers have the names of ``nn.Sequential`` of it. Of replicas, each has its own on
        its first rank; inside ``consensus()`` it is their average. Microbatches in flight, or
        stages that are not built yet, are a RuntimeError; stages of torch's whose tensors have one
        name, as they are not of one model, a ValueError.
        """
        stages, keeps = self._named_stages("full_state_dict()"), self._run.group_rank == 0
        return full_state(stages, self._run, keeps=keeps)

    @concise
    def load_into(self, model: nn.Module | None) -> None:
        """Load what all stages have trained into a whole model; all ranks call it together.

        It is for ``model.save_pretrained`` and the like: the model that was split has only this
        rank's stages trained. Pass it on the ranks that need it, such as rank 0 alone, and None on
        the others. A model whose names or shapes are not those of ``full_state_dict`` is a
        ValueError on all ranks. What must come before is as of ``full_state_dict``.
        """
        load_into(model, self._named_stages("load_into()"), self._run)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, under the plain model's own keys.

        It is for ``torch.distributed.checkpoint``, whose ``save`` or ``async_save`` all ranks call
        with it, and holds the model, the optimizers, the schedulers and the number of steps. The
        plain model loads its part too: ``load({"model": model.state_dict()}, checkpoint_id=...)``.
        Tensors are not copied: ``async_save`` copies them before it returns.

        Of replicas it is the first one's, and {} on the ranks of the others. Where they gossip,
        call and save it inside ``consensus()``: it has their average, and the first's optimizers.

        Microbatches in flight, accumulated gradients, or stages that are not built yet, are a
        RuntimeError; so is ``Interlocking``, whose heads are no part of the model, and replicas
        that gossip, outside of ``consensus()``.
        """
        what = "sharded_state_dict()"
        stages, pipeline = self._named_stages(what), self._check_built(what)
        check_shardable(self._arguments.schedule)
        if self._replicas is not None and not pipeline.has_equal_replicas:
            raise RuntimeError(
                "sharded_state_dict() must be called inside consensus() with replicas that gossip, "
                "whose weights differ, got it outside"
            )
        if self._arguments.replica:
            return {}
        return sharded_state(stages, self._run.counts.steps, self._seed, self._split)

    @concise
    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Load a folder that ``torch.distributed.checkpoint`` has saved of ``sharded_state_dict``.

        The number of stages and of replicas, the split and the schedule may be others than those
        that saved it; replicas all begin with it. All ranks call it together; one of another model
        or other optimizers is a DisagreementError, before anything is written. Stages that are not
        built yet are built with the split that was saved, if it is of as many stages. Microbatches
        in flight are a RuntimeError.
        """
        self._build_as_saved(partial(read_split, checkpoint_id))
        stages = self._named_stages("load_checkpoint()")
        pipeline = self._check_built("load_checkpoint()")
        run = self._run if self._replicas is None else self._replicas.run
        pipeline.load(*load_checkpoint(stages, checkpoint_id, run))
        for stage in self.stages:
            if stage.replicated is not None:
                stage.replicated.restart()

    @override
    def close(self) -> None:
        """End the run: drop microbatches in flight, and leave the layers as the last update has.

        No rank waits for another one. Call ``flush`` before, for the pending updates. Only a second
        ``close`` is no error after it.
        """
        for stage in self.stages if self._built is not None else ():
            if stage.replicated is not None:
                stage.replicated.averager.close()
        self._built = self._replicas = self._of_replica = None
        super().close()

    def _split_batch(
        self, inputs: Any, target: Any, has_short_form: bool = False, *, trains: bool = False
    ) -> MicrobatchSplitter:
        pipeline, rank, steps = self._pipeline, self._arguments.rank, self._run.counts.steps
        place = place_of(rank, steps if trains else None)
        place = f"{self._arguments.place}{place}"
        first_step = pipeline.num_steps if trains and pipeline is not None else 0
        num_microbatches = self._arguments.num_microbatches
        return MicrobatchSplitter(
            inputs, target, first_step * num_microbatches, num_microbatches,
            self._arguments.loss_weight_fn, self._arguments.layers[0] if rank == 0 else None,
            has_short_form=has_short_form, may_be_short=not trains, place=place,
            compares_targets=not trains or steps < _FIRST_STEPS or steps % _INTERVAL == 0,
        )  # fmt: skip

    def _build_for(self, splitter: MicrobatchSplitter) -> Pipeline:
        return self._pipeline or self._build(splitter)

    def _build(self, splitter: MicrobatchSplitter | None) -> Pipeline:
        built = build_stages(self._arguments, splitter, self._run, self._replicas)
        self._split, self._built = built.split, Pipeline(self._arguments, built, self._run)
        self._own(optimizer for stage in self._built.stages for optimizer in stage.optimizers)
        return self._built

    def _build_as_saved(self, read: Callable[[], Any]) -> None:
        """Build stages that are not built yet with the split that a state has, if it has one."""
        if self._pipeline is not None or self._arguments.schedule.needs_batch:
            return
        run = self._run if self._replicas is None else self._replicas.run
        number = self._arguments.num_stages
        with raising_on_all_ranks(partial(agree, run)) as fields:
            split = read()
            if split is not None:
                rule = f"the state's split must be of {number} stages, as many as the trainer has"
                fix = "give the trainer a split, or call prepare(...) before"
                require(len(split) + 1 == number, rule, repr(split), fix)
                check_split(split, len(self._arguments.layers), number)
            fields.append(("split of the state", repr(split)))
        if split is not None:
            self._arguments = replace(self._arguments, split=split)
            self._build(None)

    @property
    def _seed(self) -> int:
        """Return the seed of the stages' random numbers."""
        built = self._built
        return self._arguments.seed if built is None else built.built.executor.generators.seed

    @property
    @override
    def _run(self) -> Run:
        """Return the run of this replica's ranks; raise a RuntimeError after ``close``."""
        run = super()._run
        return run if self._of_replica is None else self._of_replica

    @property
    def _pipeline(self) -> Pipeline | None:
        """Return the pipeline, once its stages are built; raise a RuntimeError after ``close``."""
        self._check_open()
        return self._built

    def _check_usable(self, *, by_ranks: bool = True) -> None:
        """Check that no call has failed and, ``by_ranks``, that their process group exists."""
        if by_ranks:
            refuse_capture()
        if self._pipeline is not None:
            self._pipeline.errors.check_health()
        if by_ranks and self._run.size > 1:
            self._run.check_usable()

    def _built_pipeline(self, what: str) -> Pipeline:
        if self._pipeline is None:
            rule = f"{what} must come after the first step or prepare(...), which builds the stages"
            raise RuntimeError(f"{rule}, got none yet")
        return self._pipeline

    def _check_built(self, what: str) -> Pipeline:
        """Return the built stages; an error if there are none, or their gradients are pending."""
        pipeline = self._built_pipeline(what)
        pipeline.check_empty(what)
        return pipeline

    def _named_stages(self, what: str) -> list[NamedStage]:
        stages = self._check_built(what).stages
        return name_stages(stages, self._arguments.model, self._arguments.layers, self._run)
