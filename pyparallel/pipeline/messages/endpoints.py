"""Where the output of an action is sent: to which stage, in which stream."""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple

from ..schedules.action import Action, Kind


class StreamKind(IntEnum):
    """What a stage receives; each kind is a stream with an order of its own."""

    ACTIVATIONS = 0  # from the previous stage
    GRADIENTS = 1  # from the next stage
    SHARED = 2  # from the previous stage: weights that later stages read too


class Endpoint(NamedTuple):
    """The receiving end of a stream: a stage and the kind of values."""

    stage: int
    kind: StreamKind

    @property
    def stream(self) -> int:
        """Return the number of the stream within a channel."""
        return len(StreamKind) * self.stage + self.kind

    def __str__(self) -> str:
        words = {StreamKind.GRADIENTS: "gradients", StreamKind.SHARED: "weights"}
        return f"{words.get(self.kind, 'activations')} for stage {self.stage}"


Destinations = Callable[[Action], Iterable[Endpoint]]


def destinations_of(action: Action) -> tuple[Endpoint, ...]:
    """Return where an action's output is sent, whether or not that stage exists."""
    if action.kind is Kind.FORWARD:
        return (Endpoint(action.stage + 1, StreamKind.ACTIVATIONS),)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return (Endpoint(action.stage - 1, StreamKind.GRADIENTS),)
    return ()


def source_of(action: Action) -> Endpoint:
    """Return where the input of a forward or a backward from another stage arrives."""
    kind = StreamKind.ACTIVATIONS if action.kind is Kind.FORWARD else StreamKind.GRADIENTS
    return Endpoint(action.stage, kind)
