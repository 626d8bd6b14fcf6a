"""What the calls of a pipeline's trainer share: building stages, losses, errors of all ranks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm import (
    Collectives,
    P2PGroups,
    check_consistent_across_ranks,
    check_group_exists,
    device_of,
)
from ..comm.errors import place_of
from ..comm.wire_format import Refusal, RefusalKind
from ..compression import Compressor
from ..optim import FusedOptimizer
from .build import build_executor
from .partition.auto import split_automatically
from .partition.names import names_of_modules, plain_names
from .partition.slice import find_ties, slice_layers
from .partition.tied_parameters import TiedParameters
from .prediction.corrections import Correction
from .prediction.last_update import LastUpdate
from .runtime.build_stage import OptimizerFactory
from .runtime.clipping import LastNormClipper, LossScale, clip_grad_norm_
from .runtime.codec import Codec, CompressingCodec, IdentityCodec
from .runtime.executor import Actions, Executor
from .runtime.loss import Criterion
from .runtime.loss_weights import LossWeightFn
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import StageP2P
from .runtime.preserve_state import evaluating
from .runtime.refusals import StepRefusedError, error_of_refusals
from .runtime.stage import SchedulerFactory, Stage
from .schedules.action import Action, Kind
from .schedules.schedule import Flushing, Schedule
from .schedules.shape import PipelineShape
from .schedules.streaming import Streaming
from .validation import (
    check_memory,
    check_scalable,
    check_skips,
)


class TrainerBase:
    """The stages of a rank from the arguments of its trainer, and the state between its calls."""

    _model: Any  # what the layers are of
    _layers: list[nn.Module]
    _split: tuple[int, ...] | None
    _schedule: Schedule
    _shape: PipelineShape
    _rank: int
    _group: dist.ProcessGroup | None
    _criterion: Criterion
    _optimizer_fn: OptimizerFactory
    _scheduler_fn: SchedulerFactory | None
    _loss_weight_fn: LossWeightFn | None
    _loss_scale: LossScale | None
    _max_norm: float | None
    _correction: Correction | None
    _compressors: Mapping[str, Compressor | None]
    _nonfinite: str
    _measure_gradient_norms: bool
    _p2p: StageP2P
    _tied: TiedParameters

    def __init__(self) -> None:
        self._executor: Executor | None = None
        self._num_steps = 0  # since the last flush
        self._total_steps = 0
        self._num_accumulated = 0  # steps since the last update, of a schedule that flushes
        self._raised: set[str] = set()  # refusals, since the last flush
        self._non_finite: Refusal | None = None  # found here late, for the other ranks' flush
        self._failure: str | None = None

    @property
    def _stages(self) -> list[Stage]:
        """Return this rank's stages, ascending; none before they are built."""
        return [] if self._executor is None else list(self._executor.stages.values())

    def _actions_of_step(self, index: int, accumulates: bool) -> Actions:
        """Return the actions of a step by rank, without updates if its gradients accumulate."""

        def actions_of(rank: int) -> Iterable[Action]:
            for action in self._schedule.step(self._shape, rank, index):
                if not (accumulates and action.kind is Kind.UPDATE):
                    yield action

        return actions_of

    def _split_batch(
        self, inputs: Any, target: Any, has_short_form: bool = False, step: int = 0
    ) -> MicrobatchSplitter:
        num_microbatches = self._shape.num_microbatches
        splitter = MicrobatchSplitter(
            inputs, target, step * num_microbatches, num_microbatches, self._loss_weight_fn,
            self._layers[0] if self._rank == 0 else None,
        )  # fmt: skip
        splitter.has_short_form = has_short_form
        splitter.place = place_of(self._rank, None)
        return splitter

    @contextmanager
    def _evaluating(self) -> Iterator[Executor]:
        """Yield the executor, with this rank's stages in evaluation mode and no gradients."""
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            evaluating(stage.module for stage in self._stages),
            self._recording_failure() as executor,
        ):
            yield executor

    @property
    def _is_last(self) -> bool:
        """Return whether this is the rank of the last stage."""
        return self._shape.num_stages - 1 in self._shape.stages(self._rank)

    def _report(self) -> float | None:
        """Return the mean loss since the last report, unless a rank has refused a part of it."""
        loss = self._criterion.report()
        self._raise_refusals()
        return loss

    def _raise_refusals(self) -> None:
        """Raise what stages have been refused in this call, with the pipeline in order."""
        refusals = [] if self._executor is None else self._executor.take_refusals()
        if self._nonfinite == "skip":
            refusals = [each for each in refusals if each.kind is not RefusalKind.NOT_FINITE]
        # Other stages of this rank may meet one of them in a later call.
        refusals = [each for each in refusals if each.text not in self._raised]
        self._raised.update(each.text for each in refusals)
        if not self._num_steps or isinstance(self._schedule, Flushing):
            self._raised.clear()
        if refusals:
            raise error_of_refusals(refusals)

    def _barrier(self, refusal: Refusal | None = None) -> Refusal | None:
        """Wait for all ranks; return the refusal of one of them, for all to raise."""
        with self._recording_failure() as executor:
            refusal = executor.barrier(max(0, self._total_steps - 1), refusal)
            if refusal is not None:
                executor.refusals.append(refusal)
        return refusal

    @contextmanager
    def _recording_failure(self) -> Iterator[Executor]:
        """Yield the executor, and keep the error that it raises, but no refusal of a step."""
        assert self._executor is not None
        try:
            yield self._executor
        except StepRefusedError as refused:
            raise error_of_refusals([refused.refusal]) from None
        except BaseException as error:  # an interrupt also leaves microbatches in flight
            self._failure = str(error) or type(error).__name__
            raise

    def _copy_ties(self) -> None:
        """Give the ranks that hold copies of tied parameters the owners' values."""
        with self._recording_failure() as executor, executor.together("tied parameters"):
            self._tied.copy_from_owners()

    def _find_non_finite(self, splitter: MicrobatchSplitter) -> None:
        """Keep the first loss of the step that is not finite, for this rank and the others."""
        assert self._executor is not None
        if (refusal := self._criterion.find_non_finite(splitter)) is not None:
            self._executor.refusals.append(refusal)
            self._non_finite = self._non_finite or refusal

    def _before_updates(self, splitter: MicrobatchSplitter) -> None:
        """Check the losses of the step for all ranks, sum tied gradients, and clip all."""
        assert self._executor is not None
        exchanges = self._max_norm is not None or self._loss_scale is not None
        exchanges = exchanges or self._tied.are_on_several_ranks
        if exchanges or self._criterion.defers_check:
            # It raises if a rank has failed; the all-reduces below would hang.
            refusal = self._p2p.barrier(self._criterion.find_non_finite(splitter))
            if refusal is not None:
                self._executor.skip_update(refusal)
        if any(stage.skips_update for stage in self._stages):  # all ranks skip it
            self._tied.drop_gradients()
            return
        self._tied.sum_gradients()
        gradients = [each for stage in self._stages for each in stage.gradients]
        if self._loss_scale is not None and not self._loss_scale.unscale_(gradients):
            for stage in self._stages:
                stage.skips_update = True
            return
        for stage in self._stages:
            self._executor.telemetry.measure_gradient(stage)
        if self._max_norm is None:
            return
        clip_grad_norm_(gradients, self._max_norm, self._group)

    def _build_for(self, splitter: MicrobatchSplitter) -> None:
        """Build the stages, after an automatic split by the first microbatch if none was given."""
        if self._executor is not None:
            return
        problem = splitter.find_input_error() if self._rank == 0 else None
        if self._schedule.needs_batch:
            problem = problem or splitter.find_target_error()
        self._check_consistent([], problem)
        if self._split is not None:
            self._build(self._split, splitter)
            return
        example = splitter.inputs(0) if self._rank == 0 else None
        num_stages = self._shape.num_stages
        self._build(split_automatically(self._layers, example, num_stages, self._group), splitter)

    def _build(self, split: tuple[int, ...], splitter: MicrobatchSplitter | None) -> None:
        with self._raising_on_all_ranks() as fields:
            streams = isinstance(self._schedule, Streaming)
            modules = slice_layers(self._layers, split, ties_travel=streams)
            ties = find_ties(modules)
            fields.append(("tied weights", repr([str(tie) for tie in ties])))
            check_skips(self._schedule, modules, ties, self._compressors)
            check_memory(ties, self._shape.stages(self._rank))
        names = names_of_modules(self._model, self._layers)
        for index in self._shape.stages(self._rank):
            modules[index].names = plain_names(modules[index], names)
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
        waits_for_gpu = groups.headers is not None if groups else device.type != "cpu"
        self._criterion.defers_check = waits_for_gpu and isinstance(self._schedule, Flushing)
        self._p2p = StageP2P(self._shape, groups, *codecs)
        self._tied = TiedParameters(ties, self._shape, self._rank, self._group)
        self._tied.copy_from_owners()  # the ranks may have initialized the model differently
        with self._raising_on_all_ranks():
            executor = build_executor(
                self._schedule, modules, self._shape, self._rank,
                self._optimizer_fn, self._criterion, self._p2p, splitter, self._correction,
            )  # fmt: skip
            if self._loss_scale is not None:
                check_scalable(executor.stages.values())
            if self._scheduler_fn is not None:
                for stage in executor.stages.values():
                    stage.schedule_rates(self._scheduler_fn)
        for stage in executor.stages.values():
            stage.scales_loss = self._loss_scale is not None
        if self._max_norm is not None and isinstance(self._schedule, Streaming):
            every = self._schedule.microbatches_per_update(self._shape)
            for stage in executor.stages.values():
                stage.clipper = LastNormClipper(self._max_norm, every)
        executor.telemetry.measures_gradients = self._measure_gradient_norms
        self._split, self._executor = split, executor
        if waits_for_gpu and isinstance(self._schedule, Streaming):
            self._decide_on_device()

    def _decide_on_device(self) -> None:
        """Have stages skip updates on the device, if all ranks' optimizers can."""
        optimizers = [optimizer for stage in self._stages for optimizer in stage.optimizers]
        can = all(isinstance(each, FusedOptimizer) and each.skips_on_device for each in optimizers)
        # Both would take a skipped update for one of 0.
        repeats_updates = isinstance(self._schedule.prediction, LastUpdate)
        can = can and self._correction is None and not repeats_updates
        device = device_of(self._group) if dist.is_initialized() else torch.device("cpu")
        if Collectives(self._group).all_gather(torch.tensor([int(can)], device=device)).all():
            self._criterion.defers_check = True
            for stage in self._stages:
                stage.sends_found_inf = True

    @contextmanager
    def _raising_on_all_ranks(self) -> Iterator[list[tuple[str, str]]]:
        """Yield config fields to fill, which the ranks compare at the end."""
        problem, cause = None, None
        config_fields: list[tuple[str, str]] = []
        try:
            yield config_fields
        except Exception as error:  # perhaps on one rank only, while the others wait for it
            # It is raised as a ValueError.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problem, cause = f"{kind}{error}", error
        try:
            self._check_consistent([] if problem else config_fields, problem)
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
        if self._num_accumulated:
            raise RuntimeError(
                f"{what} must be called after an update, as a state has no gradients, got it after "
                f"{self._num_accumulated} of {self._criterion.steps_per_update} accumulated steps: "
                "call step until the update"
            )
