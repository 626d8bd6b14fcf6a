"""What the ranks do together before the updates of a step, with schedules that flush."""

from collections.abc import Iterable

from ..comm import Run
from .arguments import TrainerArguments
from .build import BuiltStages
from .runtime.clipping import clip_grad_norm_
from .runtime.executor import Actions
from .runtime.microbatches import MicrobatchSplitter
from .schedules.action import Action, Kind
from .schedules.schedule import Schedule


class Updates:
    """Which steps update, and the checks and changes of gradients before it."""

    def __init__(self, arguments: TrainerArguments, built: BuiltStages, run: Run) -> None:
        self._shape = arguments.shape
        self._max_norm = arguments.max_norm
        self._steps_per_update = arguments.gradient_accumulation_steps
        self._built = built
        self._run = run
        self._num_accumulated = 0  # steps since the last update

    @property
    def waits(self) -> bool:
        """Return whether this step only accumulates gradients, for an update in a later one."""
        return self._num_accumulated + 1 < self._steps_per_update

    def actions_of_step(self, schedule: Schedule, index: int) -> Actions:
        """Return the actions of a step by rank, without updates if its gradients accumulate."""
        waits = self.waits

        def actions_of(rank: int) -> Iterable[Action]:
            for action in schedule.step(self._shape, rank, index):
                if not (waits and action.kind is Kind.UPDATE):
                    yield action

        return actions_of

    def prepare(self, splitter: MicrobatchSplitter) -> None:
        """Check the losses of the step for all ranks, sum tied gradients, unscale and clip all."""
        executor, tied, options = self._built.executor, self._built.tied, self._built.options
        stages = executor.stages.values()
        exchanges = self._max_norm is not None or options.loss_scale is not None
        if exchanges or tied.are_on_several_ranks or options.defers_check:
            # It raises if a rank has failed; the all-reduces below would hang.
            refusal = self._built.p2p.barrier(self._built.criterion.find_non_finite(splitter))
            if refusal is not None:
                executor.skip_update(refusal)
        if any(stage.skips_update for stage in stages):  # all ranks skip it
            tied.drop_gradients()
            return
        tied.sum_gradients()
        gradients = [each for stage in stages for each in stage.gradients]
        if options.loss_scale is not None and not options.loss_scale.unscale_(gradients):
            executor.skip_update()
            return
        for stage in stages:
            executor.telemetry.measure_gradient(stage)
        if self._max_norm is not None:
            clip_grad_norm_(gradients, self._max_norm, self._run)

    def end_step(self) -> bool:
        """Count a step; return whether it has updated."""
        self._num_accumulated = self._num_accumulated + 1 if self.waits else 0
        return not self._num_accumulated

    def check_none_accumulated(self, what: str) -> None:
        """Raise a RuntimeError if gradients wait for an update in a later step."""
        if self._num_accumulated:
            raise RuntimeError(
                f"{what} must be called after an update, as a state has no gradients, got it after "
                f"{self._num_accumulated} of {self._steps_per_update} accumulated steps: call step "
                "until the update"
            )
