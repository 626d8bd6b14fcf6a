"""Running the actions of interlocking stages, whose gradients are sent one loss at a time."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...comm import Value, tensors_of
from ..runtime.executor import Trace
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.p2p import Endpoint, StageP2P, StreamKind, destinations_of
from ..runtime.stage import Stage
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .stage import Gradients, InterlockingStage
from .window import Window


@dataclass
class _GradientSum:
    """The weighted output gradients of one microbatch on a stage.

    Args:
        missing: the losses whose gradients have not arrived.
        total: the sum over the losses that the stage learns from; None: none has arrived.
        only_origin: the loss, if the sum is of one loss with weight 1; else None.
    """

    missing: set[int]
    total: Gradients | None = None
    only_origin: int | None = None

    def add(self, origin: int, gradients: Gradients, weight: float) -> None:
        """Add the gradients of a loss, times a weight."""
        scaled = gradients if weight == 1.0 else tuple(each * weight for each in gradients)
        self.only_origin = origin if self.total is None and weight == 1.0 else None
        if self.total is not None:
            scaled = tuple(a + b for a, b in zip(self.total, scaled, strict=True))
        self.total = scaled


@dataclass(frozen=True)
class SharedWeight:
    """A weight that heads on later stages read; each step sends it from stage to stage.

    Args:
        weight: the parameter; on ranks that do not hold its stage a stale copy, which is not read.
        home: the stage that it belongs to.
        last: the last stage whose head reads it.
    """

    weight: Tensor
    home: int
    last: int


class InterlockingRuntime:
    """An action runner for a schedule whose gradients are sent within a window of stages.

    Each gradient is tagged with its loss and sent on as soon as it has arrived: a stage polls for
    gradients after its actions, and waits for them only in ``LEARN``. Gradients that have arrived
    together go through the stage's graph together.

    Args:
        stages: of this rank, by index.
        p2p: messages between stages.
        shape: of the pipeline.
        window: which gradients are sent.
        max_ahead: how many microbatches a stage may be ahead of the next where no gradient makes it
            wait.
        shared: the weight that heads share; None: they share none.
    """

    def __init__(
        self,
        stages: Mapping[int, InterlockingStage],
        p2p: StageP2P,
        shape: PipelineShape,
        window: Window,
        max_ahead: int,
        shared: SharedWeight | None,
    ) -> None:
        self._stages = stages
        self._p2p = p2p
        self._shape = shape
        self._window = window
        self._max_ahead = max_ahead
        self._shared = shared
        self._weights: dict[int, Tensor] = {}  # each stage's copy of the shared one
        self._sums: dict[tuple[int, int], _GradientSum] = {}  # by stage and microbatch
        self._ahead: dict[int, int] = defaultdict(int)  # forwards that the next stage has not done

    def destinations(self, action: Action) -> Iterable[Endpoint]:
        """Yield where the messages of an action are sent, the gradients it leads to included."""
        stage = action.stage
        if action.kind is Kind.FORWARD:
            if self._sends_shared(action):
                yield Endpoint(stage + 1, StreamKind.SHARED)
            yield from destinations_of(action)
            if self._gets_no_gradients(stage - 1):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)
        elif action.kind is Kind.LEARN and stage > 0:
            for _ in self._window.arriving(stage - 1):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)

    def __call__(
        self,
        stage: Stage,
        action: Action,
        inputs: Value | None,
        splitter: MicrobatchSplitter,
        trace: Trace,
    ) -> Value | None:
        """Run an action and return its output for the next stage."""
        own = self._stages[stage.index]
        if action.kind is Kind.FORWARD:
            assert inputs is not None
            return self._forward(own, action, inputs, splitter, trace)
        if action.kind is Kind.HEAD:
            with trace.record(action):
                gradients = own.head_backward(
                    action.microbatch, self._weights.get(own.index), splitter
                )
            self._handle_gradients(own, action.microbatch, {own.index: gradients}, trace)
        elif action.kind is Kind.LEARN:
            self._finish_backward(own, action.microbatch, trace)
        else:
            with trace.record(action):
                own.update()
        self._handle_ready_gradients(trace)
        return None

    def restart(self) -> None:
        """Receive the next stages' outstanding acknowledgements, with the pipeline empty."""
        for stage in self._stages.values():
            while self._ahead[stage.index]:
                self._recv_acknowledgement(stage)

    def _forward(
        self,
        stage: InterlockingStage,
        action: Action,
        inputs: Value,
        splitter: MicrobatchSplitter,
        trace: Trace,
    ) -> Value:
        index, microbatch = stage.index, action.microbatch
        self._recv_shared(action)
        while self._ahead[index] >= self._max_ahead:
            self._recv_acknowledgement(stage)
        with trace.record(action):
            output = stage.forward(microbatch, inputs, splitter)
        if self._sends_shared(action):
            self._p2p.send(Endpoint(index + 1, StreamKind.SHARED), microbatch, self._weights[index])
        if self._gets_no_gradients(index - 1):  # an empty value acknowledges the forward
            self._p2p.send(Endpoint(index - 1, StreamKind.GRADIENTS), microbatch, ())
        self._ahead[index] += self._gets_no_gradients(index)
        return output

    def _finish_backward(self, stage: InterlockingStage, microbatch: int, trace: Trace) -> None:
        """Wait until the weight gradients of a microbatch are accumulated."""
        if stage.head is None:
            own = stage.output_grads(microbatch)
            self._handle_gradients(stage, microbatch, {stage.index: own}, trace)
        while (stage.index, microbatch) in self._sums:
            self._recv_gradients(stage, trace)

    def _handle_ready_gradients(self, trace: Trace) -> None:
        """Receive and handle gradients as long as some have arrived."""
        receivers = [s for s in self._stages.values() if self._window.arriving(s.index)]
        while (stage := next(filter(self._has_gradients, receivers), None)) is not None:
            self._recv_gradients(stage, trace)

    def _has_gradients(self, stage: InterlockingStage) -> bool:
        return self._p2p.is_ready(Endpoint(stage.index, StreamKind.GRADIENTS))

    def _recv_gradients(self, stage: InterlockingStage, trace: Trace) -> None:
        """Wait for the next gradients, and handle all that have arrived."""
        arrived: dict[int, dict[int, Gradients]] = defaultdict(dict)
        while not arrived or self._has_gradients(stage):
            number, value = self._p2p.recv_next(Endpoint(stage.index, StreamKind.GRADIENTS))
            microbatch, origin = divmod(number, self._shape.num_stages)
            arrived[microbatch][origin] = tensors_of(value)
        for microbatch, gradients in arrived.items():
            self._handle_gradients(stage, microbatch, gradients, trace)

    def _recv_acknowledgement(self, stage: InterlockingStage) -> None:
        """Wait until the next stage has done one more forward."""
        self._p2p.recv_next(Endpoint(stage.index, StreamKind.GRADIENTS))
        self._ahead[stage.index] -= 1

    def _handle_gradients(
        self,
        stage: InterlockingStage,
        microbatch: int,
        arrived: Mapping[int, Gradients],
        trace: Trace,
    ) -> None:
        """Send output gradients, by origin, to the previous stage; accumulate once complete."""
        key = stage.index, microbatch
        if key not in self._sums:
            expected = {stage.index, *self._window.arriving(stage.index)}
            self._sums[key] = _GradientSum(expected)
        gradient_sum = self._sums[key]
        for origin, gradients in arrived.items():
            gradient_sum.missing.discard(origin)
            if weight := self._window.weight(origin, stage.index):
                gradient_sum.add(origin, gradients, weight)
        to_send = {o: each for o, each in arrived.items() if self._is_sent(o, stage.index)}
        if gradient_sum.missing:
            self._send_input_grads(stage, microbatch, to_send, trace)
            return
        del self._sums[key]
        joint = gradient_sum.only_origin if gradient_sum.only_origin in to_send else None
        others = {origin: each for origin, each in to_send.items() if origin != joint}
        self._send_input_grads(stage, microbatch, others, trace)
        with trace.record(Action(stage.index, Kind.LEARN, microbatch)):
            if joint is None:
                stage.accumulate_grads(microbatch, gradient_sum.total or ())
                return
            input_grads = stage.backward_and_input_vjp(microbatch, gradient_sum.total or ())
        self._send(stage, microbatch, joint, input_grads)

    def _send_input_grads(
        self,
        stage: InterlockingStage,
        microbatch: int,
        gradients: Mapping[int, Gradients],
        trace: Trace,
    ) -> None:
        """Compute the input gradients of output gradients, and send them to the previous stage."""
        if not gradients:
            return
        with trace.record(Action(stage.index, Kind.BACKWARD_INPUT, microbatch)):
            input_grads = stage.input_vjp(microbatch, list(gradients.values()))
        for origin, each in zip(gradients, input_grads, strict=True):
            self._send(stage, microbatch, origin, each)

    def _send(
        self, stage: InterlockingStage, microbatch: int, origin: int, gradients: Gradients
    ) -> None:
        number = microbatch * self._shape.num_stages + origin
        self._p2p.send(Endpoint(stage.index - 1, StreamKind.GRADIENTS), number, gradients)

    def _is_sent(self, origin: int, stage: int) -> bool:
        """Return whether a stage sends the gradient of a loss to the previous stage."""
        return stage > 0 and self._window.wanted(origin, stage - 1)

    def _gets_no_gradients(self, stage: int) -> bool:
        """Return whether a stage has a next one, but gets no gradients from it."""
        has_next = 0 <= stage < self._shape.num_stages - 1
        return has_next and not self._window.arriving(stage)

    def _sends_shared(self, action: Action) -> bool:
        """Return whether a forward sends the shared weight, which changes with each step."""
        shared = self._shared
        first = action.microbatch % self._shape.num_microbatches == 0
        return shared is not None and first and shared.home <= action.stage < shared.last

    def _recv_shared(self, action: Action) -> None:
        shared, stage = self._shared, action.stage
        if shared is None or action.microbatch % self._shape.num_microbatches:
            return
        if stage == shared.home:
            self._weights[stage] = shared.weight.detach().clone()
        elif shared.home < stage <= shared.last:
            endpoint = Endpoint(stage, StreamKind.SHARED)
            (self._weights[stage],) = tensors_of(self._p2p.recv(endpoint, action.microbatch))
