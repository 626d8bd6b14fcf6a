"""Runs the actions of one rank, as they stand."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ...comm import PeerError, PeerFailedError, Value
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .microbatches import MicrobatchSplitter
from .p2p import StageP2P
from .stage import Stage

_WORDS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.BACKWARD_INPUT: "the backward for the inputs",
    Kind.BACKWARD_WEIGHT: "the backward for the weights",
    Kind.UPDATE: "the update",
    Kind.HEAD: "the head's loss",
    Kind.LEARN: "the backward",
}


class StageError(RuntimeError):
    """A stage failed, or a rank died; every rank ends with the sentence of the one that failed."""


@dataclass(frozen=True)
class Span:
    """An action that has run, in seconds of a clock that all ranks of a machine share.

    ``begin`` comes after the wait for what the action needs.
    """

    action: Action
    begin: float
    end: float


class Log:
    """The spans of one call, and what is being done."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.under_way: Action | None = None  # stays where it fails

    @contextmanager
    def noting(self, action: Action) -> Iterator[None]:
        """What runs inside is this action."""
        self.under_way = action
        begin = time.perf_counter()
        yield
        self.under_way = None
        self.spans.append(Span(action, begin, time.perf_counter()))


Work = Callable[[Stage, Action, Value | None, MicrobatchSplitter, Log], Value | None]


class Executor:
    """One rank at work.

    Args:
        stages: of this rank, by index.
        layout: which stage is where.
        mail: between stages.
        rank: this one.
    """

    def __init__(
        self, stages: Mapping[int, Stage], layout: PipelineShape, mail: StageP2P, rank: int
    ) -> None:
        self._stages = stages
        self._layout = layout
        self._mail = mail
        self._rank = rank
        self._log = Log()

    @property
    def spans(self) -> list[Span]:
        """What was done in the last call, and when."""
        return self._log.spans

    def run(self, actions: Iterable[Action], feed: MicrobatchSplitter, work: Work) -> None:
        """Perform the actions in their order: ``train`` or ``evaluate``.

        Raises:
            StageError: one of them failed, here or on another rank; the others are told.
        """
        self._log = Log()
        for action in actions:
            try:
                self._perform(action, feed, work)
            except Exception as error:
                raise self._told(self._sentence(self._failed(action), error)) from error
            except BaseException as interrupt:  # the others would wait for this rank
                self._mail.fail(self._sentence(self._failed(action), interrupt))
                raise

    def settle(self) -> None:
        """Wait until every rank is done.

        Raises:
            StageError: one has failed, or died; the others are told.
        """
        try:
            self._mail.settle()
        except PeerFailedError as error:
            raise self._told(str(error)) from error
        except PeerError as error:
            raise self._told(f"rank {self._rank} waited for all to be done: {error}") from error

    def _told(self, sentence: str) -> StageError:
        """The error to raise here, once the neighbors know."""
        self._mail.fail(sentence)
        return StageError(sentence)

    def _perform(self, action: Action, feed: MicrobatchSplitter, work: Work) -> None:
        stage = self._stages[action.stage]
        needed = self._needed(action, feed)
        made = work(stage, action, needed, feed, self._log)
        if made is not None:
            self._mail.send(action, made)

    def _needed(self, action: Action, feed: MicrobatchSplitter) -> Value | None:
        """The inputs of a forward, the gradients of a backward; None: it needs none."""
        if action.kind is Kind.FORWARD:
            return feed.inputs(action.microbatch) if action.stage == 0 else self._mail.take(action)
        last = action.stage == self._layout.num_stages - 1
        if last or action.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return None
        return self._mail.take(action)

    def _failed(self, action: Action) -> Action:
        """What has failed where an action did: perhaps something that was done with it."""
        return self._log.under_way or action

    def _sentence(self, action: Action, error: BaseException) -> str:
        if isinstance(error, PeerFailedError):
            return str(error)
        where = f"{_WORDS[action.kind]} of microbatch {action.microbatch} ({action})"
        if isinstance(error, PeerError):
            return f"rank {self._rank} waited for {where} on stage {action.stage}: {error}"
        return (
            f"stage {action.stage} on rank {self._rank} failed in {where}: "
            f"{type(error).__name__}: {error}"
        )


def train(
    stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter, log: Log
) -> Value | None:
    """What an action does, and what it makes for another stage."""
    with log.noting(action):
        return _train(stage, action, needed, feed)


def _train(
    stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter
) -> Value | None:
    microbatch = action.microbatch
    match action.kind:
        case Kind.FORWARD:
            assert needed is not None
            return stage.forward(microbatch, needed, feed)
        case Kind.BACKWARD:
            return stage.backward(microbatch, needed)
        case Kind.BACKWARD_INPUT:
            return stage.backward_input(microbatch, needed)
        case Kind.BACKWARD_WEIGHT:
            stage.backward_weight(microbatch)
        case Kind.UPDATE:
            stage.update()
    return None


def evaluate(
    stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter, log: Log
) -> Value | None:
    """A forward that leaves nothing behind."""
    assert needed is not None
    with log.noting(action):
        return stage.evaluate(action.microbatch, needed, feed)
