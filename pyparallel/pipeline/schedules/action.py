"""One thing a stage does for one microbatch, in the notation of torch's pipelines."""

import re
from enum import IntEnum
from typing import NamedTuple

_LETTERS = "FBIWUHL"
_NOTATION = re.compile(rf"(\d+)([{_LETTERS}])(\d+)")


class Kind(IntEnum):
    """What an action does. The first four are torch's, the others ours (torch has no words).

    ``HEAD`` and ``LEARN`` are those of ``Interlocking``: the loss of a stage's own head, and the
    gradient of the stage's weights by the last loss that it learns from.
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
        """The letter in the notation: F, B, I, W, U, H or L."""
        return _LETTERS[self]


class Action(NamedTuple):
    """``kind`` on ``stage`` for ``microbatch``, printed as ``2F0``.

    Microbatches are counted from the last time the pipe was empty. An update bears the number of
    the last microbatch whose gradient it takes.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.microbatch}"


def parse_action(text: str) -> Action:
    """The action that is written so.

    Raises:
        ValueError: the text is not a stage, one letter and a microbatch.
    """
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"an action must be a stage, one of {', '.join(_LETTERS)} and a microbatch, as in 2F0, "
            f"got {text!r}"
        )
    stage, letter, microbatch = match.groups()
    return Action(int(stage), Kind(_LETTERS.index(letter)), int(microbatch))
