"""The work of stages that learn from a window of losses: gradients that stream, one by one."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...comm import Value, tensors_of
from ..runtime.executor import Log
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.p2p import Endpoint, StageP2P, StreamKind, sent_after
from ..runtime.stage import Stage
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .stage import Gradients, InterlockingStage
from .window import Window


@dataclass
class _Learning:
    """What a stage has of the gradients of one microbatch.

    Args:
        missing: the losses whose gradients are still to come.
        total: of what the stage learns from; None: nothing yet.
        sole: the loss that all of it is of, as it came; None: it is made of several.
    """

    missing: set[int]
    total: Gradients | None = None
    sole: int | None = None

    def add(self, origin: int, gradients: Gradients, weight: float) -> None:
        """One more, that counts so much."""
        scaled = gradients if weight == 1.0 else tuple(each * weight for each in gradients)
        self.sole = origin if self.total is None and weight == 1.0 else None
        if self.total is not None:
            scaled = tuple(a + b for a, b in zip(self.total, scaled, strict=True))
        self.total = scaled


@dataclass(frozen=True)
class Shared:
    """A weight that heads on other stages read too: once a call it travels up.

    Args:
        weight: the parameter; on ranks that do not hold its stage a stale copy, which is not read.
        home: the stage that it belongs to.
        last: the last stage whose head reads it.
    """

    weight: Tensor
    home: int
    last: int


class InterlockingRuntime:
    """Performs the actions of a schedule whose gradients travel a limited way.

    Gradients go on as soon as they are here, each tagged with the loss that it is of: a stage
    looks for them after its actions, and waits for them only in ``LEARN``. Those that are here
    together go through the stage's graph together.

    Args:
        stages: of this rank, by index.
        mail: between stages.
        layout: of all.
        window: which gradients travel.
        max_ahead: how many microbatches a stage may be ahead of the next where no gradient holds it
            back.
        shared: the weight that heads share; None: they share none.
    """

    def __init__(
        self,
        stages: Mapping[int, InterlockingStage],
        mail: StageP2P,
        layout: PipelineShape,
        window: Window,
        max_ahead: int,
        shared: Shared | None,
    ) -> None:
        self._stages = stages
        self._mail = mail
        self._layout = layout
        self._window = window
        self._max_ahead = max_ahead
        self._shared = shared
        self._weights: dict[int, Tensor] = {}  # the shared one, as each stage has it
        self._learning: dict[tuple[int, int], _Learning] = {}
        self._ahead: dict[int, int] = defaultdict(int)  # forwards that the next stage has not done

    def sent(self, action: Action) -> Iterable[Endpoint]:
        """Where what follows from an action goes; gradients in one piece with those that follow."""
        stage = action.stage
        if action.kind is Kind.FORWARD:
            if self._sends_shared(action):
                yield Endpoint(stage + 1, StreamKind.SHARED)
            yield from sent_after(action)
            if self._is_unbound(stage - 1):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)
        elif action.kind is Kind.LEARN and stage > 0:
            for _ in self._window.arriving(stage - 1):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)

    def __call__(
        self, stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter, log: Log
    ) -> Value | None:
        """What an action does, and what it makes for the next stage."""
        mine = self._stages[stage.index]
        if action.kind is Kind.FORWARD:
            assert needed is not None
            return self._forward(mine, action, needed, feed, log)
        if action.kind is Kind.HEAD:
            with log.noting(action):
                gradients = mine.head_backward(
                    action.microbatch, self._weights.get(mine.index), feed
                )
            self._take_in(mine, action.microbatch, {mine.index: gradients}, log)
        elif action.kind is Kind.LEARN:
            self._learn(mine, action.microbatch, log)
        else:
            with log.noting(action):
                mine.update()
        self._look_for_gradients(log)
        return None

    def restart(self) -> None:
        """The pipe is empty, and all that the next stages have said of their forwards is here."""
        for stage in self._stages.values():
            while self._ahead[stage.index]:
                self._hear(stage)

    def _forward(
        self,
        stage: InterlockingStage,
        action: Action,
        needed: Value,
        feed: MicrobatchSplitter,
        log: Log,
    ) -> Value:
        index, microbatch = stage.index, action.microbatch
        self._receive_shared(action)
        while self._ahead[index] >= self._max_ahead:
            self._hear(stage)
        with log.noting(action):
            made = stage.forward(microbatch, needed, feed)
        if self._sends_shared(action):
            self._mail.post(
                Endpoint(index + 1, StreamKind.SHARED), microbatch, self._weights[index]
            )
        if self._is_unbound(index - 1):
            self._mail.post(Endpoint(index - 1, StreamKind.GRADIENTS), microbatch, ())
        self._ahead[index] += self._is_unbound(index)
        return made

    def _learn(self, stage: InterlockingStage, microbatch: int, log: Log) -> None:
        """Wait until the stage has learned from a microbatch."""
        if stage.head is None:
            one = stage.output_grads(microbatch)
            self._take_in(stage, microbatch, {stage.index: one}, log)
        while (stage.index, microbatch) in self._learning:
            self._hear_gradients(stage, log)

    def _look_for_gradients(self, log: Log) -> None:
        """Do what can be done with those that are here."""
        listening = [s for s in self._stages.values() if self._window.arriving(s.index)]
        while (stage := next(filter(self._is_waiting, listening), None)) is not None:
            self._hear_gradients(stage, log)

    def _is_waiting(self, stage: InterlockingStage) -> bool:
        return self._mail.waiting(Endpoint(stage.index, StreamKind.GRADIENTS))

    def _hear_gradients(self, stage: InterlockingStage, log: Log) -> None:
        """Wait for the next gradients; take in with them what else is here."""
        arrived: dict[int, dict[int, Gradients]] = defaultdict(dict)
        while not arrived or self._is_waiting(stage):
            number, value = self._mail.next(Endpoint(stage.index, StreamKind.GRADIENTS))
            microbatch, origin = divmod(number, self._layout.num_stages)
            arrived[microbatch][origin] = tensors_of(value)
        for microbatch, gradients in arrived.items():
            self._take_in(stage, microbatch, gradients, log)

    def _hear(self, stage: InterlockingStage) -> None:
        """Wait until the next stage has done one more forward."""
        self._mail.next(Endpoint(stage.index, StreamKind.GRADIENTS))
        self._ahead[stage.index] -= 1

    def _take_in(
        self, stage: InterlockingStage, microbatch: int, arrived: Mapping[int, Gradients], log: Log
    ) -> None:
        """Gradients of what a stage handed on, by their origin: pass them on, learn from them."""
        place = stage.index, microbatch
        if place not in self._learning:
            expected = {stage.index, *self._window.arriving(stage.index)}
            self._learning[place] = _Learning(expected)
        learning = self._learning[place]
        for origin, gradients in arrived.items():
            learning.missing.discard(origin)
            if weight := self._window.weight(origin, stage.index):
                learning.add(origin, gradients, weight)
        travels = {o: each for o, each in arrived.items() if self._travels(o, stage.index)}
        if learning.missing:
            self._pass_on(stage, microbatch, travels, log)
            return
        del self._learning[place]
        joint = learning.sole if learning.sole in travels else None
        others = {origin: each for origin, each in travels.items() if origin != joint}
        self._pass_on(stage, microbatch, others, log)
        with log.noting(Action(stage.index, Kind.LEARN, microbatch)):
            if joint is None:
                stage.learn(microbatch, learning.total or ())
                return
            found = stage.backward_and_input_vjp(microbatch, learning.total or ())
        self._post(stage, microbatch, joint, found)

    def _pass_on(
        self,
        stage: InterlockingStage,
        microbatch: int,
        gradients: Mapping[int, Gradients],
        log: Log,
    ) -> None:
        """To the stage before."""
        if not gradients:
            return
        with log.noting(Action(stage.index, Kind.BACKWARD_INPUT, microbatch)):
            found = stage.input_vjp(microbatch, list(gradients.values()))
        for origin, each in zip(gradients, found, strict=True):
            self._post(stage, microbatch, origin, each)

    def _post(
        self, stage: InterlockingStage, microbatch: int, origin: int, gradients: Gradients
    ) -> None:
        number = microbatch * self._layout.num_stages + origin
        self._mail.post(Endpoint(stage.index - 1, StreamKind.GRADIENTS), number, gradients)

    def _travels(self, origin: int, stage: int) -> bool:
        """Whether a gradient goes on from a stage to the one before."""
        return stage > 0 and self._window.wanted(origin, stage - 1)

    def _is_unbound(self, stage: int) -> bool:
        """Whether a stage that has a next one gets no gradients from it."""
        inside = 0 <= stage < self._layout.num_stages - 1
        return inside and not self._window.arriving(stage)

    def _sends_shared(self, action: Action) -> bool:
        """Whether the shared weight leaves with this forward: it changes from call to call."""
        shared = self._shared
        first = action.microbatch % self._layout.num_microbatches == 0
        return shared is not None and first and shared.home <= action.stage < shared.last

    def _receive_shared(self, action: Action) -> None:
        shared, stage = self._shared, action.stage
        if shared is None or action.microbatch % self._layout.num_microbatches:
            return
        if stage == shared.home:
            self._weights[stage] = shared.weight.detach().clone()
        elif shared.home < stage <= shared.last:
            here = Endpoint(stage, StreamKind.SHARED)
            (self._weights[stage],) = tensors_of(self._mail.fetch(here, action.microbatch))
