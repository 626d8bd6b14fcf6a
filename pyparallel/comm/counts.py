"""What a rank counts in its steps, and how ranks compare it."""

import enum
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

ANY = -1
"""Of a round or a count: not compared."""

# A row of 8 float64, which ranks compare and messages have as their header. In a row of a call, not
# of a message or an average, the code of the call is in place of the mass.
MASS, TRAINER, ROUND, LENGTH, STEPS, REPEATS, FORWARDS, NONFINITE = range(8)
NUM_FIELDS = 8
MUST_BE_EQUAL = {
    TRAINER: ("of the same trainer", "step all trainers in the same order on all ranks"),
    ROUND: ("of the same round", "load checkpoints of one step on all ranks"),
    LENGTH: (
        "as long as the receiver expects, in bytes",
        "wrap equal models, and load the same state on all ranks (negative: a difference to an "
        "earlier message, which a rank without that state cannot read)",
    ),
    STEPS: (
        "sent after as many optimizer steps",
        "step alike on all ranks, also inside no_sync(), or use join() for unequal numbers of "
        "batches",
    ),
    REPEATS: (
        "sent after as many steps without a training forward since the step before",
        "call optimizer.step() once after each forward and backward",
    ),
}


class Call(enum.IntEnum):
    """The code of a call that all ranks make together."""

    ARGUMENTS = -1
    ATTENTION = -7
    LOAD = -2
    STEP = -3
    FLUSH = -4
    FULL_MODEL = -5
    BACKWARD = -6


_COMPARED = "a comparison of all ranks' arguments", "ring_attention()"
_OTHERS = "load_state_dict()", "optimizer.step()", "flush()", "full_model()", "backward()"
_NAMES: dict[float, str] = dict(zip(Call, (*_COMPARED, *_OTHERS), strict=True))


def describe_call(row: Sequence[float]) -> str:
    """Return the call that a row of a rank is of."""
    if row[MASS] >= 0:
        return f"an average after {row[STEPS]:g} steps"
    return _NAMES.get(row[MASS], "another call")


@dataclass
class StepCounts:
    """Count what a rank has done since its trainer was made, for comparison between ranks."""

    steps: int = 0  # of the optimizer, those inside ``no_sync()`` included
    repeats: int = 0  # steps without a training forward since the step before
    forwards: int = 0  # in training
    nonfinite: float | Tensor = 0.0  # gradient elements of the last step; on GPUs 0-d float64 there
    policy: str = "raise"  # for such gradients: or "skip", "allow"
    are_compared: bool = True  # by ranks; not inside ``not_compared``
    synchronizes: bool = True  # steps communicate; not inside ``no_sync``

    def count_step(self, *, saw_forward: bool = True) -> None:
        """Count an optimizer step, and whether a training forward came before it."""
        self.steps += 1
        self.repeats += not saw_forward

    def count_forward(self) -> None:
        """Count a training forward."""
        self.forwards += 1

    def count_nonfinite(self, number: float | Tensor) -> None:
        """Note how many gradient elements of the step just taken are not finite."""
        self.nonfinite = number

    @contextmanager
    def not_compared(self) -> Iterator[None]:
        """Have the counts left out inside: this rank takes no step of its own."""
        before, self.are_compared = self.are_compared, False
        try:
            yield
        finally:
            self.are_compared = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip communication in steps inside; the first step outside communicates."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def describe(self, call: str) -> str:
        """Return a call with its step: "step 7", or "flush() after 6 steps"."""
        if self.steps == ANY:
            return call
        after = f"after {self.steps} step{'s' * (self.steps != 1)}"
        return f"step {self.steps}" if call == "step" else f"{call} {after}"

    def reset(self, steps: int = 0, *, are_compared: bool = True) -> None:
        """Count from here again: all ranks do so together."""
        self.steps, self.repeats, self.forwards, self.are_compared = steps, 0, 0, are_compared


def find_difference(
    row: Sequence[float], fields: Sequence[float]
) -> tuple[int, float, float] | None:
    """Return the first field of a row (8,) that is not as fields (6,) say, with both values.

    ``ANY`` on either side fits everything but a length.
    """
    for index, theirs, ours in zip(range(TRAINER, NONFINITE), row[TRAINER:], fields, strict=False):
        if theirs != ours and (index == LENGTH or ANY not in (theirs, ours)):
            return index, ours, theirs
    return None


def make_row(
    mass: float, fields: Sequence[float], nonfinite: float | Tensor, device: torch.device
) -> Tensor:
    """Return a row of mass, fields and non-finite elements, (8,) float64 on the device."""
    if not isinstance(nonfinite, Tensor) or nonfinite.is_cpu:
        return to_device([mass, *fields, float(nonfinite)], device)
    row = to_device([mass, *fields, 0.0], device)
    row[NONFINITE] = nonfinite
    return row


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as (n,) float64; the host does not wait for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    pinned = torch.tensor(numbers, dtype=torch.float64, pin_memory=True, device="cpu")
    return pinned.to(device, non_blocking=True)


def format_number(value: float) -> str:
    """Return a number, without a fraction where it has none."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
