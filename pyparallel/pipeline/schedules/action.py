"""Actions of a stage on a microbatch, in the notation of torch's pipelines."""

import re
from enum import IntEnum
from typing import NamedTuple

_LETTERS = "FBIWUHL"
_NOTATION = re.compile(rf"(\d+)([{_LETTERS}])(\d+)")


class Kind(IntEnum):
    """The kind of an action. The first four are torch's; torch has no names for the others.

    ``HEAD`` and ``LEARN`` belong to ``Interlocking``: of a stage's own head, and the backward that
    completes the gradient of the stage's weights.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    UPDATE = 4
    HEAD = 5
    LEARN = 6

    @property
    def letter(self) -> str:
        """Return the letter of the notation: F, B, I, W, U, H or L."""
        return _LETTERS[self]


class Action(NamedTuple):
    """An action of ``kind`` on ``stage`` for ``microbatch``, printed as ``2F0``.

    Microbatches are counted from the last time the pipeline was empty. An update has the number of
    the last microbatch whose gradient it applies.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Parse an action such as ``2F0``: a stage, one letter and a microbatch, or a ValueError."""
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"an action must be a stage, one of {', '.join(_LETTERS)} and a microbatch, as in 2F0, "
            f"got {text!r}"
        )
    stage, letter, microbatch = match.groups()
    return Action(int(stage), Kind(_LETTERS.index(letter)), int(microbatch))
