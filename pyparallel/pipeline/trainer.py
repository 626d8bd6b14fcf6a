"""Training a model that is cut into stages, one process for each or for several."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm import P2PGroups, Value, check_consistent_across_ranks, new_group
from ..compression import AttachPoint, Compressor
from .build import Plan, assembly_of
from .partition.auto import check_split, split_automatically
from .partition.slice import slice_layers
from .partition.solver import check_num_stages
from .partition.torch_pipe import layers_and_split
from .runtime.clipping import ClippedTraining, clip_grad_norm_
from .runtime.codec import Codec, Compressing, Verbatim
from .runtime.executor import Executor, Span, Work, evaluate
from .runtime.loss import Criterion, Loss
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import Sent, StageP2P, sent_after
from .runtime.stage import OptimizerFactory, SchedulerFactory, Stage
from .schedules.action import Action, Kind
from .schedules.schedule import Flushing, Schedule
from .schedules.shape import PipelineShape

Actions = Callable[[int], Iterable[Action]]  # of any rank


class PipelineTrainer:
    """Trains layers in stages: rank r holds stages r, r + ranks, ... of them, in place.

    Every rank makes the same calls in the same order. The schedule says in which order a rank
    works, and on which weights; the trainer does nothing else. Of ``layers`` only those of the
    rank's own stages are read, after the split is known; each gets the output of the one before it
    as its only argument, a tensor or a tuple of tensors, as in ``nn.Sequential``.

    The gradient of an update is the mean over its samples: each microbatch's loss weighs as much as
    its part of them.

    Args:
        layers: an ``nn.Sequential`` or a list of modules, as many on every rank; or a model that is
            split for ``torch.distributed.pipelining``: a ``Pipe``, or this rank's stages of it.
        loss_fn: ``loss_fn(output, target)``, 0-d: the mean over a microbatch.
        optimizer_fn: makes the optimizer of a stage from the list of its parameters.
        schedule: such as ``PipeOptim()`` or ``OneForwardOneBackward()``.
        num_microbatches: how many parts the batch of a ``step`` is cut into.
        process_group: None means the default group; without one there is a single process.
        split: where stages 1 and on begin, as indices into ``layers``. None: balanced by the times
            of the first microbatch.
        num_stages: a multiple of the ranks; None: as ``split`` has it, or else one for each rank.
        scheduler_fn: makes the learning-rate scheduler of a stage's optimizer, which steps after
            each of its updates; None: there is none.
        max_norm: clip the gradient of the whole model to this 2-norm before an update; only with
            schedules that flush, as others never have it in one piece.
        compress_activations: how floating-point tensors are said that a forward hands to a stage on
            another rank, in ``evaluate`` too; they must be float32, bfloat16 or float16. Without
            memory, as each is of other samples. Other tensors, and stages on one rank, get the
            tensors themselves. None: so do all.
        compress_gradients: likewise of what a backward hands on.

    Raises:
        ValueError: (DisagreementError between ranks) the arguments do not fit, or differ.
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
        alone = not dist.is_initialized()
        self._rank = 0 if alone else dist.get_rank(process_group)
        num_ranks = 1 if alone else dist.get_world_size(process_group)
        if num_stages is None:
            num_stages = num_ranks if split is None else len(split) + 1
        self._agree(
            [
                ("schedule", repr(schedule)),
                ("num_microbatches", repr(num_microbatches)),
                ("number of layers", repr(len(self._layers))),
                ("max_norm", repr(max_norm)),
                ("split", repr(None if split is None else list(split))),
                *((name, repr(each)) for name, each in self._compressors.items()),
            ],
            self._problem(num_stages, num_microbatches, num_ranks, split),
        )
        self._layout = PipelineShape(num_stages, num_microbatches, num_ranks)
        # Not a method: a circle would keep the groups, and their threads, until it is collected.
        self._criterion = Criterion(loss_fn, _sharing_updates(schedule, self._layout))
        self._assembly = assembly_of(
            schedule, Plan(self._layout, loss_fn, optimizer_fn, self._criterion)
        )
        self._stages: dict[int, Stage] = {}
        self._executor: Executor | None = None
        self._calls = 0
        self._failure: str | None = None
        self._split = None if split is None else tuple(split)
        if self._split is not None and not self._assembly.needs_batch:
            self._build(self._split, None)

    @property
    def stages(self) -> list[Stage]:
        """This rank's, ascending; none before `prepare` or the first step where these build them.

        They do where the split is automatic, and with ``Interlocking``, whose heads are built for
        what the stages hand on.
        """
        return list(self._stages.values())

    @property
    def split(self) -> tuple[int, ...] | None:
        """Where stages 1 and on begin; None before the first step where the split is automatic.

        Give it to the trainer that is to load a state: measured again it may come out differently.
        """
        return self._split

    @property
    def spans(self) -> list[Span]:
        """What this rank did in the last call, and when."""
        return [] if self._executor is None else self._executor.spans

    @property
    def peak_weight_copies(self) -> list[int]:
        """For each of this rank's stages the most copies of its weights so far, live included."""
        return [stage.weights.peak_copies for stage in self.stages]

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent to other ranks so far: values between stages, and labels."""
        return 0 if self._executor is None else self._mail.bytes_sent

    def step(self, inputs: Value | None = None, target: Value | None = None) -> float | None:
        """Feed one batch in; what else this makes ranks do is the schedule's business.

        Args:
            inputs: of the whole batch, the first dimension its samples; read on the rank of the
                first stage.
            target: likewise on the rank of the last; with ``Interlocking`` on every rank.

        Returns:
            On the rank of the last stage the mean loss of the batch; None elsewhere.

        Raises:
            StageError: a stage failed, or a rank died; every rank raises the same sentence.
        """
        self._check_health()
        first = self._calls * self._layout.num_microbatches
        feed = MicrobatchSplitter(inputs, target, first, self._layout.num_microbatches)
        self._build_for(feed)
        index = self._calls
        self._calls += 1
        work = self._training if self._max_norm is None else ClippedTraining(self._clip)
        self._train(lambda rank: self._schedule.step(self._layout, rank, index), feed, work)
        if isinstance(self._schedule, Flushing):
            self._settle()  # the program may end now, or another rank have failed
        return self._criterion.report()

    def flush(self) -> None:
        """Finish all that is in the pipe. After it versions are counted from 0 again.

        Raises:
            StageError: as ``step``.
        """
        self._check_health()
        if not self._calls:
            return
        calls, self._calls = self._calls, 0
        nothing = MicrobatchSplitter(None, None, 0, self._layout.num_microbatches)
        with torch.inference_mode(mode=False):  # states made in it could not be updated outside
            drain = self._schedule.drain
            self._train(lambda rank: drain(self._layout, rank, calls), nothing, self._training)
        self._settle()
        self._training.restart()
        for stage in self.stages:
            stage.weights.restart()

    def evaluate(self, inputs: Value | None = None, target: Value | None = None) -> float | None:
        """The loss of a batch in evaluation mode, on the weights after a flush; as ``step``."""
        self.flush()
        feed = MicrobatchSplitter(inputs, target, 0, self._layout.num_microbatches)
        self._build_for(feed)
        with torch.inference_mode(mode=False), torch.no_grad(), _evaluating(self.stages):
            self._run(self._forwards, feed, evaluate)
        self._settle()
        return self._criterion.report()

    def prepare(self, inputs: Value | None = None, target: Value | None = None) -> None:
        """Build the stages, if the first step would do it, and train nothing.

        For whoever wants to load a state, or make a learning-rate scheduler for each stage's
        optimizer, before that.

        Args:
            inputs: a batch as for ``step``.
            target: likewise.
        """
        self._check_health()
        self._build_for(MicrobatchSplitter(inputs, target, 0, self._layout.num_microbatches))

    def state_dict(self) -> dict[str, Any]:
        """Modules and optimizers of this rank's stages; the pipe must have been flushed.

        Raises:
            RuntimeError: microbatches are still in it.
        """
        self._check_empty("state_dict()")
        return {str(stage.index): stage.state_dict() for stage in self.stages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave on this rank.

        Raises:
            RuntimeError: microbatches are in the pipe, or there are no stages yet.
            ValueError: it is of other stages.
        """
        self._check_empty("load_state_dict()")
        if self._executor is None:
            raise RuntimeError(
                "load_state_dict() must come after prepare(inputs, target), which builds the "
                "stages, got none yet"
            )
        mine = [str(stage.index) for stage in self.stages]
        if sorted(state) != sorted(mine):
            raise ValueError(
                f"state must be of stages {', '.join(mine)}, got {', '.join(state)}: "
                "load it on the rank that saved it, with the same split"
            )
        for stage in self.stages:
            stage.load_state_dict(state[str(stage.index)])

    def _forwards(self, rank: int) -> Iterator[Action]:
        for stage in self._layout.stages(rank):
            for microbatch in range(self._layout.num_microbatches):
                yield Action(stage, Kind.FORWARD, microbatch)

    def _train(self, actions_of: Actions, feed: MicrobatchSplitter, work: Work) -> None:
        self._run(actions_of, feed, work, self._training.sent)

    def _run(
        self, actions_of: Actions, feed: MicrobatchSplitter, work: Work, sent: Sent = sent_after
    ) -> None:
        assert self._executor is not None
        with self._noting_failure():
            self._mail.expect(actions_of, sent)
            self._executor.run(actions_of(self._rank), feed, work)

    def _settle(self) -> None:
        assert self._executor is not None
        with self._noting_failure():
            self._executor.settle()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupt too leaves microbatches halfway
            self._failure = str(error) or type(error).__name__
            raise

    def _clip(self) -> None:
        assert self._max_norm is not None
        self._mail.settle()  # in a collective nobody would hear that another rank has failed
        parameters = [p for stage in self.stages for p in stage.optimized]
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_grad_norm_(gradients, self._max_norm, self._group)

    def _build_for(self, feed: MicrobatchSplitter) -> None:
        """Decide the split by the first microbatch, where none was given, and build the stages."""
        if self._executor is not None:
            return
        if self._split is not None:
            self._build(self._split, feed)
            return
        example, problem = None, None
        if self._rank == 0:
            try:
                example = feed.inputs(0)
            except ValueError as error:
                problem = str(error)
        self._agree([], problem)
        num_stages = self._layout.num_stages
        self._build(split_automatically(self._layers, example, num_stages, self._group), feed)

    def _build(self, split: tuple[int, ...], feed: MicrobatchSplitter | None) -> None:
        with self._failing_together():
            modules = slice_layers(self._layers, split)
        codecs = (self._codec(compressor) for compressor in self._compressors.values())
        mine = self._layout.stages(self._rank)
        self._mail = StageP2P(self._layout, self._wires([modules[s] for s in mine]), *codecs)
        with self._failing_together():
            self._stages = self._assembly.build(modules, mine, self._mail, feed)
            if self._scheduler_fn is not None:
                for stage in self.stages:
                    stage.schedule_rates(self._scheduler_fn)
        self._split = split
        self._training = self._assembly.training(self._stages, self._mail)
        self._executor = Executor(self._stages, self._layout, self._mail, self._rank)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        problem, cause = None, None
        try:
            yield
        except Exception as error:  # on one rank perhaps: the others must hear of it
            problem, cause = f"{type(error).__name__}: {error}", error
        try:
            self._agree([], problem)
        except ValueError as error:
            raise error from cause

    def _wires(self, modules: Iterable[nn.Module]) -> P2PGroups | None:
        if self._layout.num_ranks == 1:
            return None
        ranks = range(self._layout.num_ranks)
        of_gloo = dist.get_backend(self._group) == "gloo"
        device = next((p.device for module in modules for p in module.parameters()), None)
        return P2PGroups(
            labels=None if of_gloo else new_group(ranks, self._group, backend="gloo"),
            up=new_group(ranks, self._group),
            down=new_group(ranks, self._group),
            device=device or torch.device("cpu"),
        )

    def _codec(self, compressor: Compressor | None) -> Codec:
        return Verbatim() if compressor is None else Compressing(compressor, self._rank)

    def _agree(self, config_fields: list[tuple[str, str]], problem: str | None) -> None:
        if dist.is_initialized():
            check_consistent_across_ranks(config_fields, problem, self._group)
        elif problem is not None:
            raise ValueError(problem)

    def _problem(
        self,
        num_stages: int,
        num_microbatches: int,
        num_ranks: int,
        split: Sequence[int] | None,
    ) -> str | None:
        """What is wrong with the arguments; None: nothing."""
        try:
            layout = PipelineShape(num_stages, num_microbatches, num_ranks)
            check_num_stages(len(self._layers), num_stages)
            if split is not None:
                check_split(split, len(self._layers), num_stages)
        except ValueError as error:
            return str(error)
        if self._max_norm is not None and not isinstance(self._schedule, Flushing):
            return (
                f"max_norm must be None with a schedule that does not flush, got {self._max_norm}: "
                "no stage ever sees the gradient of the whole model; clip a stage's own in a hook "
                "of its optimizer (register_step_pre_hook)"
            )
        return self._schedule.validation_error(layout) or self._problem_of_compressors()

    def _problem_of_compressors(self) -> str | None:
        for name, compressor in self._compressors.items():
            if not isinstance(compressor, Compressor | None):
                return f"{name} must be a Compressor or None, got {compressor!r}"
            problem = compressor and compressor.validation_error(AttachPoint.PIPELINE)
            if problem:
                return f"{name}: {problem}"
        return None

    def _check_health(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the pipe is broken, make a new trainer: {self._failure}")

    def _check_empty(self, what: str) -> None:
        self._check_health()
        if self._calls and not isinstance(self._schedule, Flushing):
            raise RuntimeError(
                f"{what} must come after flush(), got it with microbatches under way"
            )


def _sharing_updates(schedule: Schedule, layout: PipelineShape) -> Callable[[int], bool]:
    """Tells of a microbatch whether others of its call go into the same update."""

    def shares_update(microbatch: int) -> bool:
        first = microbatch - microbatch % layout.num_microbatches
        last = first + layout.num_microbatches - 1
        return schedule.update_index(layout, first) == schedule.update_index(layout, last)

    return shares_update


@contextmanager
def _evaluating(stages: list[Stage]) -> Iterator[None]:
    """All modules in evaluation mode, then each as it was."""
    modules = [module for stage in stages for module in stage.module.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
