"""The executor, which runs the actions of one rank in their order."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from torch import Tensor

from ...comm import PeerError, RemoteError
from ...comm.profiling import profiled
from ..messages import Value
from ..messages.endpoints import Destinations, destinations_of, source_of
from ..messages.format import NO_BATCH, Refusal
from ..messages.refusals import StepRefusedError, refusal_of
from ..messages.stage_p2p import StageP2P, Told
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from ..schedules.versions import Versions
from .generators import StageGenerators
from .inputs import input_tensors
from .microbatches import MicrobatchSplitter
from .stage import Stage
from .telemetry import Telemetry

_DESCRIPTIONS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.BACKWARD_INPUT: "the backward for the inputs",
    Kind.BACKWARD_WEIGHT: "the backward for the weights",
    Kind.UPDATE: "the update",
    Kind.HEAD: "the head's loss",
    Kind.LEARN: "the backward",
}


class StageError(RuntimeError):
    """A failure of a stage or the death of a rank, with the same message on every rank.

    The message is that of the rank which found it out first; ``__cause__`` is what this rank met.
    """


Actions = Callable[[int], Iterable[Action]]  # by rank

_RANGES = {kind: f"pyparallel::pipeline_{kind.name.lower()}" for kind in Kind}


def microbatches_left(actions: Iterable[Action]) -> set[int]:
    """Return the microbatches that a stage begins in these actions, and does not end."""
    left = set[tuple[int, int]]()
    for action in actions:
        if action.kind is Kind.FORWARD:
            left.add((action.stage, action.microbatch))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.LEARN):
            left.discard((action.stage, action.microbatch))
    return {microbatch for _, microbatch in left}


class Executor:
    """Runs actions on the stages of one rank."""

    destinations: Destinations = staticmethod(destinations_of)
    """Where the messages of an action of training are sent."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        shape: PipelineShape,
        p2p: StageP2P,
        rank: int,
        generators: StageGenerators,
        place: str = "",
    ) -> None:
        self.stages = stages
        self.generators = generators
        self.telemetry = Telemetry(stages, p2p)
        self._running: Action | None = None  # also after it has failed
        self.refusals: list[Refusal] = []  # besides those of stages
        self._shape = shape
        self._p2p = p2p
        self._rank = rank
        self._place = place  # before errors: the replica

    def train(
        self,
        actions_of: Actions,
        splitter: MicrobatchSplitter,
        before_updates: Callable[[], None] | None = None,
        *,
        empty: bool = False,
    ) -> None:
        """Run this rank's actions of training in their order.

        ``empty``: the pipeline is, so that the first stage receives nothing before it has sent. A
        StepRefusedError: the batch is invalid on the first stage's rank, and no rank has begun.
        """
        pending = [] if before_updates is None else [before_updates]

        def before_update(stage: Stage) -> None:
            if pending:
                pending.pop()()
            elif before_updates is None:
                self.telemetry.measure_gradient(stage)

        def expect() -> None:
            self._p2p.expect(actions_of, self.destinations)

        self._begin(actions_of, splitter, self.destinations)
        if not empty:
            splitter.copy(microbatches_left(actions_of(self._rank)))
        self.telemetry.begin(is_training=True)
        run_action = partial(self.train_action, splitter=splitter, before_update=before_update)
        if not empty or 0 not in self.stages:
            expect()
            self._run(actions_of(self._rank), splitter, self.destinations, run_action)
        else:  # the other ranks wait for the first output
            self._run(actions_of(self._rank), splitter, self.destinations, run_action, expect)

    def evaluate(
        self, splitter: MicrobatchSplitter, outputs: list[Value] | None = None
    ) -> Refusal | None:
        """Run the forwards of all microbatches without backwards; raises as ``train``.

        Return why the last stage has no loss, or None. With ``outputs`` its outputs are appended to
        them, and no loss is computed.
        """
        last = self._shape.num_stages - 1
        refusals: list[Refusal] = []

        def forwards(rank: int) -> Iterator[Action]:
            for stage in self._shape.stages(rank):
                for microbatch in range(self._shape.num_microbatches):
                    yield Action(stage, Kind.FORWARD, microbatch)

        def run_action(action: Action, inputs: Value | Refusal | None) -> Value | Refusal:
            assert inputs is not None
            assert not isinstance(inputs, Refusal), "p2p raises StepRefusedError"
            if isinstance(inputs, tuple) and not inputs:
                return ()  # of a batch with fewer samples than microbatches
            stage, microbatch = self.stages[action.stage], action.microbatch
            with self._recording(action):
                run = stage.evaluate if outputs is None else stage.predict
                output = run(microbatch, inputs, splitter)
            if isinstance(output, Refusal):
                refusals.append(output)
            elif outputs is not None and action.stage == last:
                outputs.append(output)
            return output

        self._begin(forwards, splitter, destinations_of, needs_target=outputs is None)
        self.telemetry.begin(is_training=False)
        self._p2p.expect(forwards)
        self._run(forwards(self._rank), splitter, destinations_of, run_action)
        return next(iter(refusals), None)

    def train_action(
        self,
        action: Action,
        inputs: Value | Refusal | None,
        splitter: MicrobatchSplitter,
        before_update: Callable[[Stage], None],
    ) -> Value | Refusal | None:
        """Run an action of training on its inputs, and return its output for another stage."""
        stage, microbatch = self.stages[action.stage], action.microbatch
        if action.kind is Kind.UPDATE:
            before_update(stage)
        with self._recording(action):
            match action.kind:
                case Kind.FORWARD:
                    assert inputs is not None
                    assert not isinstance(inputs, Refusal), "p2p raises StepRefusedError"
                    return stage.forward(microbatch, inputs, splitter)
                case Kind.BACKWARD:
                    return stage.backward(microbatch, inputs)
                case Kind.BACKWARD_INPUT:
                    return stage.backward_input(microbatch, inputs)
                case Kind.BACKWARD_WEIGHT:
                    stage.backward_weight(microbatch)
                case Kind.UPDATE:
                    stage.update()
                    self._p2p.count_update()
        return None

    def restart(self, versions: Versions) -> None:
        """Count microbatches from 0 again, with the pipeline empty."""
        for stage in self.stages.values():
            stage.weights.restart(versions)

    def skip_update(self, refusal: Refusal | None = None) -> None:
        """Have all stages of this rank skip their next update."""
        for stage in self.stages.values():
            stage.skip_update(refusal)

    def take_refusals(self) -> list[Refusal]:
        """Return what this rank has been refused since the last call."""
        taken, self.refusals = self.refusals, []
        for stage in self.stages.values():
            taken += stage.refusals
            stage.refusals.clear()
        return taken

    def barrier(self, step: int, refusal: Refusal | None = None, loss: float = math.nan) -> Told:
        """Wait until every rank has finished ``step``; keep the refusal of any, and return both."""
        try:
            refusal, loss = self._p2p.barrier(refusal, loss)
        except (PeerError, RemoteError) as error:
            self._abort(error, f"rank {self._rank} waited for all ranks to finish step {step}")
        if refusal is not None:
            self.refusals.append(refusal)
        return refusal, loss

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise errors of communication inside as a StageError, the same on all ranks."""
        try:
            yield
        except (PeerError, RemoteError) as error:
            self._abort(error, f"rank {self._rank} waited for {what}")

    def _abort(self, error: Exception, where: str) -> NoReturn:
        message, own = self._agree_on_error(error, where)
        self._p2p.abort(message)
        cause: Exception = error
        if message != own:
            cause = StageError(own)
            cause.__cause__ = error
        raise StageError(message) from cause

    def _agree_on_error(self, error: BaseException, where: str) -> tuple[str, str]:
        """Return the message that all ranks raise, and the one that this rank would."""
        if isinstance(error, RemoteError):  # whose rank has agreed
            return str(error), str(error)
        message = without_store = f"{self._place}{where}: {error}"
        if isinstance(error, PeerError) and error.failed:
            own = self._p2p.ranks_of(error.failed)
            names = f"{self._place}{self._names(own)}"
            if not own:
                names = f"rank {' and '.join(map(str, error.failed))} of another replica"
            without_store = f"{names} {error.how}"
            message = f"{without_store}: {self._place}{where}"
        return self._p2p.agree_on_error(message, without_store), message

    def _names(self, ranks: Sequence[int]) -> str:
        """Return "rank 1 (stage 1) and rank 2 (stage 2)"."""
        stages = "stage" if self._shape.stages_per_rank == 1 else "stages"
        return " and ".join(
            f"rank {rank} ({stages} {', '.join(map(str, self._shape.stages(rank)))})"
            for rank in ranks
        )

    def _begin(
        self,
        actions_of: Actions,
        splitter: MicrobatchSplitter,
        destinations: Destinations,
        *,
        needs_target: bool = True,
    ) -> None:
        """Begin a step; a StepRefusedError, before values are sent, if the batch is invalid."""
        problem = splitter.find_input_error() if 0 in self.stages else None

        def first_inputs() -> Iterator[Sequence[Tensor]]:
            for each in actions_of(self._rank):
                if problem is None and each.stage == 0 and each.kind is Kind.FORWARD:
                    yield input_tensors(splitter.inputs(each.microbatch))

        with self.together("all ranks to begin a step"):
            self._p2p.begin_step(first_inputs)
        if 0 not in self.stages:
            return
        if problem is None and needs_target and self._shape.num_ranks == 1:
            problem = splitter.find_target_error()
        action = None if problem is None else next(iter(actions_of(self._rank)), None)
        if problem is not None and action is not None and action.kind is Kind.FORWARD:
            # A drain, which has no batch, begins with a backward.
            raise self._refuse(action, destinations, refusal_of(splitter.place, problem))

    def _refuse(
        self, action: Action, destinations: Destinations, refusal: Refusal
    ) -> StepRefusedError:
        """Refuse the step of which an action would be the first; return what to raise."""
        try:
            self._p2p.refuse_step(action, destinations(action), refusal)
        except (PeerError, RemoteError) as error:
            self._abort(error, self._where(action, error))
        return StepRefusedError(refusal, self._rank)

    def _run(
        self,
        actions: Iterable[Action],
        splitter: MicrobatchSplitter,
        destinations: Destinations,
        run_action: Callable[[Action, Value | Refusal | None], Value | Refusal | None],
        after_first: Callable[[], None] | None = None,
    ) -> None:
        self._running = None
        # A loss, whose graph is released after the gradient is sent.
        before: Value | Refusal | None = None
        may_be_refused = True
        for action in actions:
            try:
                output = run_action(action, self._inputs(action, splitter))
                if output is not None:
                    is_forward = action.kind is Kind.FORWARD
                    batch = splitter.batch_meta(action.microbatch) if is_forward else NO_BATCH
                    for endpoint in destinations_of(action):
                        self._p2p.send(endpoint, action.microbatch, output, batch)
                before = output  # noqa: F841
                if after_first is not None:
                    after_first()
                    after_first = None
                may_be_refused = False
            except Exception as error:
                may_be_refused = may_be_refused and action.kind is Kind.FORWARD
                if may_be_refused and isinstance(error, StepRefusedError):
                    self._p2p.forget()
                    raise self._refuse(action, destinations, error.refusal) from None
                # An action of the schedule may run others.
                self._abort(error, self._where(self._running or action, error))
            except BaseException as interrupt:  # else the neighbors wait for this rank
                where = self._where(self._running or action, interrupt)
                self._p2p.abort(self._agree_on_error(interrupt, where)[0], waits=False)
                raise

    @contextmanager
    def _recording(self, action: Action) -> Iterator[None]:
        self._running = action
        self.generators.seed_for(action, self._shape.num_microbatches)
        with profiled(_RANGES[action.kind]):
            begin = time.perf_counter()
            yield
        self._running = None
        self.telemetry.record(action, begin)

    def _inputs(self, action: Action, splitter: MicrobatchSplitter) -> Value | Refusal | None:
        is_forward = action.kind is Kind.FORWARD
        if is_forward and action.stage == 0:
            first: Value = splitter.inputs(action.microbatch)
            return first
        last = action.stage == self._shape.num_stages - 1
        if not is_forward and (last or action.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT)):
            return None
        with profiled("pyparallel::pipeline_wait"):
            inputs = self._p2p.recv(source_of(action), action.microbatch)
        if is_forward:
            splitter.note_batch_meta(action.microbatch, self._p2p.batch)
        return inputs

    def _where(self, action: Action, error: BaseException) -> str:
        """Return what this rank waited for, or of an error of its own where it failed."""
        where = f"{_DESCRIPTIONS[action.kind]} of microbatch {action.microbatch} ({action})"
        if isinstance(error, (PeerError, RemoteError)):
            return f"rank {self._rank} waited for {where} on stage {action.stage}"
        place = f"stage {action.stage} on rank {self._rank}"
        return f"{place} failed in {where}: {type(error).__name__}"
