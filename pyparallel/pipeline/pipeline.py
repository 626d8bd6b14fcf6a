"""What the calls of a trainer do with the stages of a rank once they are built."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from ..comm import Collectives, Run
from ..training.consensus import assigned
from .arguments import TrainerArguments
from .build import BuiltStages
from .errors import CallErrors
from .messages import Value
from .messages.format import Refusal
from .messages.refusals import refusal_of
from .messages.stage_p2p import Told
from .replicas import GradientAverage
from .runtime.clipping import clip_grad_norm_, device_for
from .runtime.microbatches import MicrobatchSplitter, concatenate
from .runtime.preserve_state import evaluating
from .runtime.stage import Stage
from .runtime.telemetry import Telemetry
from .schedules.action import Action, Kind


class Pipeline:
    """The built stages of a rank, with the microbatches that are in flight between its calls.

    All ranks make the same calls. A call that fails leaves it unusable, but one that is refused
    does not: its error is raised at the end, with the pipeline in order.
    """

    def __init__(self, arguments: TrainerArguments, built: BuiltStages, run: Run) -> None:
        self.built = built
        self.num_steps = 0  # since the last flush
        self.has_equal_replicas = built.gradients is not None  # else inside consensus()
        self.errors = CallErrors(arguments.nonfinite)
        self._max_norm = arguments.max_norm
        self._steps_per_update = arguments.gradient_accumulation_steps
        self._num_accumulated = 0  # steps since the last update
        self._schedule = self._of_run = arguments.schedule
        self._shape = arguments.shape
        self._is_last = arguments.num_stages - 1 in built.executor.stages
        self._run = run
        self._non_finite: Refusal | None = None  # found here late, for the other ranks' flush

    @property
    def stages(self) -> list[Stage]:
        """Return this rank's stages, ascending."""
        return list(self.built.executor.stages.values())

    @property
    def measured(self) -> Telemetry:
        """Return what this rank has measured of its stages."""
        return self.built.executor.telemetry

    def train(self, splitter: MicrobatchSplitter) -> float:
        """Run the actions of a step; return its mean loss, or the newest one known here."""
        executor, flushes = self.built.executor, self._schedule.flushes
        if self.built.options.loss_scale is not None:
            self.built.options.loss_scale.read()
        # Without an update the step's gradients are only accumulated, for one of a later step.
        updates = self._num_accumulated + 1 >= self._steps_per_update
        index = self.num_steps

        def actions_of(rank: int) -> Iterable[Action]:
            actions = self._schedule.step(self._shape, rank, index)
            return (action for action in actions if updates or action.kind is not Kind.UPDATE)

        with self._in_call(trains=True):
            num_steps = self._num_accumulated + 1
            before_updates = partial(self._prepare_update, splitter, num_steps) if flushes else None
            executor.train(actions_of, splitter, before_updates, empty=flushes)
        self.num_steps += 1
        self._run.counts.count_step()
        if flushes:
            refusal = None if updates else self.built.criterion.find_non_finite(splitter)
            if self._is_last and self.built.options.weighs_update and not updates:
                self.built.criterion.end_step(splitter)
            self._num_accumulated = 0 if updates else self._num_accumulated + 1
            # The program may end now, or another rank may have failed.
            refusal, loss = self._barrier(refusal, self.built.criterion.report())
            if refusal is not None:
                executor.skip_update(refusal)
            if updates:
                self._copy_ties()
        else:
            refusal = self.built.criterion.find_non_finite(splitter)
            if refusal is not None:
                executor.refusals.append(refusal)
                self._non_finite = self._non_finite or refusal
            loss = self.built.p2p.newest_loss(self.built.criterion.report())
        self.raise_refusals()
        return loss

    def update_rest(self) -> None:
        """Update with what the steps since the last update have accumulated, if there are any."""
        if not self._num_accumulated:
            return

        def updates_of(rank: int) -> Iterable[Action]:
            actions = self._schedule.step(self._shape, rank, self.num_steps)
            return (action for action in actions if action.kind is Kind.UPDATE)

        no_batch = MicrobatchSplitter(None, None, 0, self._shape.num_microbatches)
        with torch.inference_mode(mode=False), self._in_call():
            before_updates = partial(self._prepare_update, no_batch, self._num_accumulated)
            self.built.executor.train(updates_of, no_batch, before_updates)
        self._num_accumulated = 0
        self._barrier(None)
        self._copy_ties()

    def drain(self) -> None:
        """Run all pending backwards and updates."""
        if not self.num_steps:
            return
        steps, self.num_steps = self.num_steps, 0
        no_batch = MicrobatchSplitter(None, None, 0, self._shape.num_microbatches)
        # Optimizer states created in inference mode could not be updated outside it.
        with torch.inference_mode(mode=False), self._in_call():
            self.built.executor.train(
                lambda rank: self._schedule.drain(self._shape, rank, steps), no_batch
            )
        refusal, self._non_finite = self._non_finite, None
        self._barrier(refusal)
        self._restart()
        self._copy_ties()

    def flush_replicas(self) -> None:
        """Merge the messages of other replicas that are in flight."""
        with self.errors.recording(), self.built.executor.together("the other replicas"):
            for stage in self.stages:
                if stage.replicated is not None:
                    stage.replicated.averager.flush()
        self._copy_ties()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Train no further inside: the weights are the average over replicas."""
        with ExitStack() as inside:
            with self.errors.recording(), self.built.executor.together("the other replicas"):
                found = [stage.replicated for stage in self.stages if stage.replicated is not None]
                contexts = [replica.consensus() for replica in found]
            for context in contexts:
                inside.enter_context(context)
            copies = self.built.tied.copies
            inside.enter_context(assigned(copies, copies))
            self._copy_ties()
            of_gossip, self.has_equal_replicas = self.has_equal_replicas, True
            try:
                yield
            finally:
                self.has_equal_replicas = of_gossip

    def evaluate(self, splitter: MicrobatchSplitter) -> float:
        """Return the mean loss of a batch in evaluation mode."""
        refusal = self._forward(splitter)
        _, loss = self._barrier(refusal, self.built.criterion.report())
        self.raise_refusals()
        return loss

    def predict(self, splitter: MicrobatchSplitter, *, concatenates: bool) -> object:
        """Return the outputs for a batch in evaluation mode, on the rank of the last stage."""
        outputs: list[Value] = []
        self._forward(splitter, outputs)
        predicted: object = None
        refusal = None
        if self._is_last:
            try:
                predicted = concatenate(outputs) if concatenates else outputs
            except Exception as error:  # the other ranks are in the barrier
                refusal = refusal_of(splitter.place, str(error))
        self._barrier(refusal)
        self.raise_refusals()
        return predicted

    def raise_refusals(self) -> None:
        """Raise what stages have been refused in this call."""
        is_empty = not self.num_steps or self._schedule.flushes
        self.errors.raise_refusals(self.built.executor.take_refusals(), is_empty=is_empty)

    def load(self, step: int, seed: int) -> None:
        """Go on after a step whose state was loaded into the stages; all ranks call it together."""
        self._run.counts.reset(step)
        self.built.executor.generators.resume(seed)
        if not self.num_steps:
            self._restart()
        self.built.tied.copy_from_owners()

    def check_empty(self, what: str) -> None:
        """Raise a RuntimeError if a call has failed or the stages have pending gradients."""
        self.errors.check_health()
        if self.num_steps and not self._schedule.flushes:
            raise RuntimeError(
                f"{what} must be called after flush(), got it with microbatches in flight"
            )
        if self._num_accumulated:
            raise RuntimeError(
                f"{what} must be called after an update, as a state has no gradients, got it after "
                f"{self._num_accumulated} of {self._steps_per_update} accumulated steps: call step "
                "until the update, or flush(), which updates with those"
            )

    def _prepare_update(self, splitter: MicrobatchSplitter, num_steps: int) -> None:
        """Check the losses of the step for all ranks, sum tied gradients, unscale and clip all.

        ``num_steps`` have accumulated them.
        """
        executor, tied, options = self.built.executor, self.built.tied, self.built.options
        replicas = self.built.gradients
        exchanges = self._max_norm is not None or options.loss_scale is not None
        exchanges = exchanges or replicas is not None or options.weighs_update
        if exchanges or tied.are_on_several_ranks or options.defers_check:
            # It raises if a rank has failed; the all-reduces below would hang.
            refusal, _ = self.built.p2p.barrier(self.built.criterion.find_non_finite(splitter))
            if refusal is not None:
                executor.skip_update(refusal)
        skips = any(stage.skips_update for stage in self.stages)  # so on all ranks
        weight, factor = self._weigh_update(splitter, num_steps)
        if not weight and not skips and replicas is None:
            executor.skip_update()
            skips = True
        if not skips:
            tied.sum_gradients()
            for stage in self.stages if factor != 1 else ():
                for gradient in stage.gradients:
                    gradient.mul_(factor)
        if replicas is not None:
            with executor.together("the other replicas"):
                skips = self._average(replicas, weight, skips)
        if skips:
            tied.drop_gradients()
            return
        gradients = [each for stage in self.stages for each in stage.gradients]
        if options.loss_scale is not None and not options.loss_scale.unscale_(gradients):
            executor.skip_update()
            return
        for stage in self.stages:
            executor.telemetry.measure_gradient(stage)
        if self._max_norm is not None:
            clip_grad_norm_(gradients, self._max_norm, self._run)

    def _weigh_update(self, splitter: MicrobatchSplitter, num_steps: int) -> tuple[float, float]:
        """Return an update's weight among the replicas', and by what to multiply its gradients."""
        weighs_update = self.built.options.weighs_update
        own = 1.0, self._steps_per_update / num_steps
        if not weighs_update and self.built.gradients is None:
            return own
        if self._is_last and (weighs_update or self._steps_per_update == 1):
            self.built.criterion.end_step(splitter)
            own = self.built.criterion.end_update()
        own = own if self._is_last else (0.0, 0.0)  # weights are known where the target is
        of_all = torch.tensor(own, dtype=torch.float64, device=device_for([], self._run))
        Collectives(self._run).all_reduce_(of_all)
        weight, factor = of_all.tolist()
        return weight, factor

    def _average(self, replicas: GradientAverage, weight: float, skips: bool) -> bool:
        """Average the gradients of all replicas; return whether they skip the update."""
        own = [refusal for stage in self.stages for refusal in stage.refusals]
        refusals = replicas.average_(weight, own, skips=skips)
        if refusals is not None and not skips:
            self.built.executor.skip_update()
            self.built.executor.refusals.extend(refusals)
        return refusals is not None

    def _restart(self) -> None:
        of_step = self._shape.num_microbatches // self._of_run.microbatches_per_update(self._shape)
        self._schedule = self._of_run.after(self._run.counts.steps * of_step)
        self.built.executor.restart(self._schedule.versions(self._shape))

    def _forward(
        self, splitter: MicrobatchSplitter, outputs: list[Value] | None = None
    ) -> Refusal | None:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            evaluating(stage.module for stage in self.stages),
            self._in_call(),
        ):
            return self.built.executor.evaluate(splitter, outputs)

    @contextmanager
    def _in_call(self, *, trains: bool = False) -> Iterator[None]:
        """Record errors, and let stages draw random numbers of their own."""
        generators = self.built.executor.generators
        self.built.p2p.begin_call()
        with self.errors.recording(), generators.of_call(self._run.counts.steps, trains=trains):
            yield

    def _barrier(self, refusal: Refusal | None, loss: float = math.nan) -> Told:
        """Wait for all ranks; return the refusal of one of them, and the last one's loss."""
        step = max(0, self._run.counts.steps - 1)
        with self.errors.recording():
            return self.built.executor.barrier(step, refusal, loss)

    def _copy_ties(self) -> None:
        with self.errors.recording(), self.built.executor.together("tied parameters"):
            self.built.tied.copy_from_owners()
