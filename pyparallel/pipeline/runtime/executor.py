"""The executor, which runs the actions of one rank in their order."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ...comm import PeerError, RemoteError, Value
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .microbatches import MicrobatchSplitter
from .p2p import StageP2P
from .stage import Stage

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
    """A failure of a stage or the death of a rank, raised with the same message on every rank."""


@dataclass(frozen=True)
class Span:
    """An action that has run, in seconds of a clock that all ranks of a machine share.

    ``begin`` is after the wait for the action's inputs.
    """

    action: Action
    begin: float
    end: float


class Trace:
    """The spans of one run, and the action that is running."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.running: Action | None = None  # stays set after a failure

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Record what runs inside as this action."""
        self.running = action
        begin = time.perf_counter()
        yield
        self.running = None
        self.spans.append(Span(action, begin, time.perf_counter()))


# Runs an action of a stage on its inputs, and returns its output for another stage.
ActionRunner = Callable[[Stage, Action, Value | None, MicrobatchSplitter, Trace], Value | None]


class Executor:
    """Runs actions on the stages of one rank.

    Args:
        stages: of this rank, by index.
        shape: of the pipeline.
        p2p: messages between stages.
        rank: this one.
    """

    def __init__(
        self, stages: Mapping[int, Stage], shape: PipelineShape, p2p: StageP2P, rank: int
    ) -> None:
        self._stages = stages
        self._shape = shape
        self._p2p = p2p
        self._rank = rank
        self._trace = Trace()

    @property
    def spans(self) -> list[Span]:
        """Return the actions of the last run with their times."""
        return self._trace.spans

    def run(
        self, actions: Iterable[Action], splitter: MicrobatchSplitter, run_action: ActionRunner
    ) -> None:
        """Run the actions in their order, with a runner such as ``train`` or ``evaluate``.

        Raises:
            StageError: an action failed, here or on another rank; neighbors have been aborted.
        """
        self._trace = Trace()
        for action in actions:
            try:
                self._run_one(action, splitter, run_action)
            except Exception as error:
                raise self._abort(self._message(self._failed_action(action), error)) from error
            except BaseException as interrupt:  # else the neighbors wait for this rank
                self._p2p.abort(self._message(self._failed_action(action), interrupt))
                raise

    def barrier(self) -> None:
        """Wait until every rank has finished its actions.

        Raises:
            StageError: a rank failed or died; neighbors have been aborted.
        """
        try:
            self._p2p.barrier()
        except RemoteError as error:
            raise self._abort(str(error)) from error
        except PeerError as error:
            raise self._abort(
                f"rank {self._rank} waited for all ranks to finish: {error}"
            ) from error

    def _abort(self, message: str) -> StageError:
        """Send the error to the neighbors, and return it to be raised here."""
        self._p2p.abort(message)
        return StageError(message)

    def _run_one(
        self, action: Action, splitter: MicrobatchSplitter, run_action: ActionRunner
    ) -> None:
        stage = self._stages[action.stage]
        inputs = self._inputs(action, splitter)
        output = run_action(stage, action, inputs, splitter, self._trace)
        if output is not None:
            self._p2p.send_output(action, output)

    def _inputs(self, action: Action, splitter: MicrobatchSplitter) -> Value | None:
        """Return the inputs of a forward or the output gradients of a backward, or None."""
        if action.kind is Kind.FORWARD:
            first = action.stage == 0
            return splitter.inputs(action.microbatch) if first else self._p2p.recv_input(action)
        last = action.stage == self._shape.num_stages - 1
        if last or action.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return None
        return self._p2p.recv_input(action)

    def _failed_action(self, action: Action) -> Action:
        """Return the action that was running: a runner may run others within one."""
        return self._trace.running or action

    def _message(self, action: Action, error: BaseException) -> str:
        if isinstance(error, RemoteError):
            return str(error)
        where = f"{_DESCRIPTIONS[action.kind]} of microbatch {action.microbatch} ({action})"
        if isinstance(error, PeerError):
            return f"rank {self._rank} waited for {where} on stage {action.stage}: {error}"
        return (
            f"stage {action.stage} on rank {self._rank} failed in {where}: "
            f"{type(error).__name__}: {error}"
        )


def train(
    stage: Stage,
    action: Action,
    inputs: Value | None,
    splitter: MicrobatchSplitter,
    trace: Trace,
) -> Value | None:
    """Run an action of training and return its output for another stage."""
    with trace.record(action):
        return _train(stage, action, inputs, splitter)


def _train(
    stage: Stage, action: Action, inputs: Value | None, splitter: MicrobatchSplitter
) -> Value | None:
    microbatch = action.microbatch
    match action.kind:
        case Kind.FORWARD:
            assert inputs is not None
            return stage.forward(microbatch, inputs, splitter)
        case Kind.BACKWARD:
            return stage.backward(microbatch, inputs)
        case Kind.BACKWARD_INPUT:
            return stage.backward_input(microbatch, inputs)
        case Kind.BACKWARD_WEIGHT:
            stage.backward_weight(microbatch)
        case Kind.UPDATE:
            stage.update()
    return None


def evaluate(
    stage: Stage,
    action: Action,
    inputs: Value | None,
    splitter: MicrobatchSplitter,
    trace: Trace,
) -> Value | None:
    """Run a forward without a backward."""
    assert inputs is not None
    with trace.record(action):
        return stage.evaluate(action.microbatch, inputs, splitter)
