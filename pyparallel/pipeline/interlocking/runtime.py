"""Running the actions of interlocking stages, whose gradients are sent one loss at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from ..messages import Value, tensors_of
from ..messages.endpoints import Endpoint, StreamKind, destinations_of
from ..messages.format import Refusal
from ..messages.stage_p2p import StageP2P
from ..runtime.executor import Executor
from ..runtime.generators import StageGenerators
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.stage import Stage
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from ..schedules.versions import Versions
from .heads import Head
from .inbox import GradientInbox, GradientTask
from .stage import Gradients, InterlockingStage
from .window import Window


@dataclass(frozen=True)
class SharedWeight:
    """A weight that later stages' heads read: sent in each step, stale on ranks that hold none."""

    weight: Tensor
    home: int
    last: int


def find_shared_weight(heads: Sequence[Head], modules: Sequence[nn.Module]) -> SharedWeight | None:
    """Return the weight that heads share, or None; a ValueError of one that they cannot share."""
    readers = [(stage, head.shared) for stage, head in enumerate(heads) if head.shared is not None]
    if not readers:
        return None
    (first, weight), (last, _) = readers[0], readers[-1]
    if any(each is not weight for _, each in readers):
        raise ValueError("heads must share one embedding, got several")
    homes = [s for s, module in enumerate(modules) if any(p is weight for p in module.parameters())]
    if not homes or homes[0] > first:
        where = f"stage {homes[0]}" if homes else "no stage"
        raise ValueError(
            f"heads must share an embedding of their own or an earlier stage, got one of {where} "
            f"in the head of stage {first}"
        )
    return SharedWeight(weight, homes[0], last)


class InterlockingExecutor(Executor):
    """The executor of a schedule whose gradients are sent within a window of stages.

    Each gradient is sent on as soon as it has arrived: a stage polls for gradients after its
    actions, and waits for them only in ``LEARN``. Those that have arrived together go through its
    graph together. ``max_ahead`` is as of ``GradientInbox``.
    """

    def __init__(
        self,
        stages: Mapping[int, InterlockingStage],
        shape: PipelineShape,
        p2p: StageP2P,
        rank: int,
        generators: StageGenerators,
        window: Window,
        max_ahead: int,
        shared: SharedWeight | None,
    ) -> None:
        super().__init__(stages, shape, p2p, rank, generators)
        self._own = stages
        self._window = window
        self._inboxes = {index: GradientInbox(index, window, max_ahead) for index in stages}
        self._shared = shared
        self._weights: dict[int, Tensor] = {}  # each stage's copy of the shared one
        # By stage and microbatch: the weighted output gradients that it learns from.
        self._sums: dict[tuple[int, int], Gradients] = {}

    @override
    def destinations(self, action: Action) -> Iterable[Endpoint]:
        # The gradients that the action leads to are included.
        stage = action.stage
        if action.kind is Kind.FORWARD:
            if self._sends_shared(action):
                yield Endpoint(stage + 1, StreamKind.SHARED)
            yield from destinations_of(action)
            if self._window.acknowledges(stage):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)
        elif action.kind is Kind.LEARN and stage > 0:
            for _ in self._window.arriving(stage - 1):
                yield Endpoint(stage - 1, StreamKind.GRADIENTS)

    @override
    def train_action(
        self,
        action: Action,
        inputs: Value | Refusal | None,
        splitter: MicrobatchSplitter,
        before_update: Callable[[Stage], None],
    ) -> Value | Refusal | None:
        own, microbatch = self._own[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            assert inputs is not None
            assert not isinstance(inputs, Refusal), "p2p raises StepRefusedError"
            return self._forward(own, action, inputs, splitter)
        if action.kind is Kind.HEAD:
            with self._recording(action):
                gradients = own.head_backward(microbatch, self._weights.get(own.index), splitter)
            self._handle_own(own, microbatch, gradients)
        elif action.kind is Kind.LEARN:
            if own.head is None:
                self._handle_own(own, microbatch, own.output_grads(microbatch))
            while self._inboxes[own.index].is_incomplete(microbatch):
                self._recv_gradients(own)
        else:
            super().train_action(action, inputs, splitter, before_update)
        self._handle_ready_gradients()
        return None

    @override
    def restart(self, versions: Versions) -> None:
        for index, inbox in self._inboxes.items():
            while inbox.is_ahead:
                self._recv_acknowledgement(index)
        super().restart(versions)

    def _forward(
        self, stage: InterlockingStage, action: Action, inputs: Value, splitter: MicrobatchSplitter
    ) -> Value:
        index, microbatch = stage.index, action.microbatch
        self._recv_shared(action)
        while self._inboxes[index].must_wait:
            self._recv_acknowledgement(index)
        with self._recording(action):
            output = stage.forward(microbatch, inputs, splitter)
        if self._sends_shared(action):
            self._p2p.send(Endpoint(index + 1, StreamKind.SHARED), microbatch, self._weights[index])
        if self._window.acknowledges(index):  # with an empty value
            self._p2p.send(Endpoint(index - 1, StreamKind.GRADIENTS), microbatch, ())
        self._inboxes[index].begin(microbatch)
        return output

    def _recv_acknowledgement(self, stage: int) -> None:
        self._p2p.recv_next(Endpoint(stage, StreamKind.GRADIENTS))
        self._inboxes[stage].acknowledge()

    def _handle_ready_gradients(self) -> None:
        receivers = [s for s in self._own.values() if self._window.arriving(s.index)]
        while (stage := next(filter(self._has_gradients, receivers), None)) is not None:
            self._recv_gradients(stage)

    def _has_gradients(self, stage: InterlockingStage) -> bool:
        return self._p2p.is_ready(Endpoint(stage.index, StreamKind.GRADIENTS))

    def _recv_gradients(self, stage: InterlockingStage) -> None:
        inbox = self._inboxes[stage.index]
        arrived: dict[tuple[int, int], Gradients | Refusal] = {}  # by microbatch and origin
        while not arrived or self._has_gradients(stage):
            number, value = self._p2p.recv_next(Endpoint(stage.index, StreamKind.GRADIENTS))
            microbatch, origin = divmod(number, self._shape.num_stages)
            gradients = value if isinstance(value, Refusal) else tensors_of(value)
            arrived[microbatch, origin] = gradients
            inbox.put(microbatch, origin)
        for task in inbox.take():
            self._handle(stage, task, arrived)

    def _handle_own(
        self, stage: InterlockingStage, microbatch: int, gradients: Gradients | Refusal
    ) -> None:
        task = self._inboxes[stage.index].take_own(microbatch)
        self._handle(stage, task, {(microbatch, stage.index): gradients})

    def _handle(
        self,
        stage: InterlockingStage,
        task: GradientTask,
        arrived: Mapping[tuple[int, int], Gradients | Refusal],
    ) -> None:
        """Send input gradients to the previous stage; accumulate the weights' once complete.

        A refusal is sent on in its gradient's place; a stage that learns from it skips an update.
        """
        index, microbatch = stage.index, task.microbatch
        for origin, weight in task.learned.items():
            gradients = arrived[microbatch, origin]
            if isinstance(gradients, Refusal):
                stage.skip_update(gradients)
            else:
                self._add(index, microbatch, gradients, weight)
        if task.sent:
            sent = {origin: arrived[microbatch, origin] for origin in task.sent}
            self._send_input_grads(stage, microbatch, sent)
        if not task.is_complete:
            return
        total = self._sums.pop((index, microbatch), ())
        joint = None if task.joint is None else arrived[microbatch, task.joint]
        with self._recording(Action(index, Kind.LEARN, microbatch)):
            if joint is None or isinstance(joint, Refusal):
                stage.accumulate_grads(microbatch, total)
            else:
                found = stage.backward(microbatch, total)
                assert not isinstance(found, Refusal), "the gradients are not"
                joint = tensors_of(found)
        if task.joint is not None and joint is not None:
            self._send(index, microbatch, task.joint, joint)

    def _send_input_grads(
        self,
        stage: InterlockingStage,
        microbatch: int,
        gradients: Mapping[int, Gradients | Refusal],
    ) -> None:
        present = {o: each for o, each in gradients.items() if not isinstance(each, Refusal)}
        for origin, each in gradients.items():
            if isinstance(each, Refusal):
                self._send(stage.index, microbatch, origin, each)
        if not present:
            return
        with self._recording(Action(stage.index, Kind.BACKWARD_INPUT, microbatch)):
            input_grads = stage.input_vjp(microbatch, [*present.values()])
        for origin, found in zip(present, input_grads, strict=True):
            self._send(stage.index, microbatch, origin, found)

    def _add(self, stage: int, microbatch: int, gradients: Gradients, weight: float) -> None:
        scaled = gradients if weight == 1.0 else tuple(gradient * weight for gradient in gradients)
        total = self._sums.get((stage, microbatch))
        if total is not None:
            scaled = tuple(a + b for a, b in zip(total, scaled, strict=True))
        self._sums[stage, microbatch] = scaled

    def _send(
        self, stage: int, microbatch: int, origin: int, gradients: Gradients | Refusal
    ) -> None:
        number = microbatch * self._shape.num_stages + origin
        self._p2p.send(Endpoint(stage - 1, StreamKind.GRADIENTS), number, gradients)

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
            weight = self._p2p.recv(endpoint, action.microbatch)
            assert not isinstance(weight, Refusal), "p2p raises StepRefusedError"
            (self._weights[stage],) = tensors_of(weight)
