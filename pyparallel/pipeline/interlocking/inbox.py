"""What a stage does with the gradients that arrive: the policy, without tensors or times."""

from collections import defaultdict
from dataclasses import dataclass

from .window import Window


@dataclass(frozen=True)
class GradientTask:
    """What to do with gradients of one microbatch that have arrived at a stage, in this order."""

    microbatch: int
    learned: dict[int, float]  # losses whose gradients the stage learns from, with their weights
    sent: tuple[int, ...]  # losses whose input gradients are sent to the previous stage
    is_complete: bool  # the weights' gradients are accumulated now, from the sum
    joint: int | None  # the loss whose input gradient that backward computes too, to be sent


class GradientInbox:
    """The gradients that have arrived at a stage, and the decision what to do with them.

    A gradient is named by its microbatch and its origin, the stage of the loss. ``max_ahead`` is
    how many microbatches the stage may be ahead of the next one where no gradient makes it wait.
    """

    def __init__(self, stage: int, window: Window, max_ahead: int) -> None:
        self._stage = stage
        self._window = window
        self._max_ahead = max_ahead
        self._missing: dict[int, set[int]] = {}  # origins by microbatch
        self._arrived: list[tuple[int, int]] = []  # microbatch and origin
        self._ahead = 0  # forwards that the next stage has not acknowledged
        weights = {origin: window.weight(origin, stage) for origin in window.origins(stage)}
        only = next(iter(weights)) if list(weights.values()) == [1.0] else None
        self._weights = weights
        # The sum is this gradient: one backward computes the weights' gradients and the inputs'.
        self._joint = only if only is not None and self._is_sent(only) else None

    @property
    def must_wait(self) -> bool:
        """Return whether the next forward must wait until the next stage acknowledges one."""
        return self._ahead >= self._max_ahead

    @property
    def is_ahead(self) -> bool:
        """Return whether the next stage has not acknowledged all forwards."""
        return self._ahead > 0

    @property
    def has_arrived(self) -> bool:
        """Return whether ``take`` would return a task."""
        return bool(self._arrived)

    def begin(self, microbatch: int) -> None:
        """Begin the forward of a microbatch."""
        self._missing[microbatch] = {self._stage, *self._window.arriving(self._stage)}
        self._ahead += self._window.acknowledges(self._stage + 1)

    def acknowledge(self) -> None:
        """Count one more forward of the next stage."""
        self._ahead -= 1

    def put(self, microbatch: int, origin: int) -> None:
        """Add a gradient that has arrived from the next stage."""
        self._arrived.append((microbatch, origin))

    def take(self) -> list[GradientTask]:
        """Return what to do with all that has arrived, a task for each microbatch."""
        arrived: dict[int, list[int]] = defaultdict(list)
        for microbatch, origin in self._arrived:
            arrived[microbatch].append(origin)
        self._arrived.clear()
        return [self._decide(microbatch, origins) for microbatch, origins in arrived.items()]

    def take_own(self, microbatch: int) -> GradientTask:
        """Return what to do with the gradient of the stage's own loss."""
        return self._decide(microbatch, [self._stage])

    def is_incomplete(self, microbatch: int) -> bool:
        """Return whether the backward of a microbatch still waits for gradients."""
        return microbatch in self._missing

    def _decide(self, microbatch: int, origins: list[int]) -> GradientTask:
        missing = self._missing[microbatch]
        missing.difference_update(origins)
        is_complete = not missing
        if is_complete:
            del self._missing[microbatch]
        joint = self._joint if is_complete and self._joint in origins else None
        return GradientTask(
            microbatch,
            {origin: self._weights[origin] for origin in origins if origin in self._weights},
            tuple(each for each in origins if self._is_sent(each) and each != joint),
            is_complete,
            joint,
        )

    def _is_sent(self, origin: int) -> bool:
        return self._stage > 0 and self._window.wanted(origin, self._stage - 1)
