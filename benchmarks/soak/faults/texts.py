"""What the text of a survivor's error says: who failed, and where."""

import re
from dataclasses import dataclass

_LIST = r"(\d+(?:(?:, | and | or |, and |, or )(?:rank )?\d+)*)"
_ENDED = (
    r"died|did not respond|does not respond|ended|failed|has failed|has ended|left|closed|"
    r"was silent|did not connect|stopped|aborted|raised|took|sent nothing|made other|returned"
)
# "rank 2 died or ended", "stage 1 on rank 2 failed", "ranks 1 and 3 did not respond".
_BLAMED = re.compile(rf"\branks? {_LIST}(?: \([^)]*\))?(?:,)? (?:\w+ ){{0,2}}?(?:{_ENDED})\b")
_EDGE = re.compile(rf"\b(?:from|to|with|between) ranks? {_LIST}")
_PLACE = re.compile(r"\b(?:step|stages?|microbatch|update|round) \d+|\b\d+[FBIWU]\d+\b")
_RANK = re.compile(r"\brank \d+")


@dataclass(frozen=True)
class Reading:
    """What a text says.

    Args:
        names: it says that the victim failed; of a link, or that it could not be reached.
        blames: ranks other than the victim that it says failed.
        places: it says step, stage or microbatch.
        raw: it is torch's or gloo's text alone.
    """

    names: bool
    blames: tuple[int, ...]
    places: bool
    raw: bool


def read(text: str, victim: int, *, cut: bool = False) -> Reading:
    """Return what the text of a survivor's error says of a victim, or of its link that was cut."""
    blamed = _numbers(_BLAMED, text)
    named = blamed | (_numbers(_EDGE, text) if cut else set())
    return Reading(
        victim in named,
        tuple(sorted(blamed - {victim})),
        bool(_PLACE.search(text)),
        not _RANK.search(text),
    )


def _numbers(pattern: re.Pattern[str], text: str) -> set[int]:
    return {int(each) for found in pattern.findall(text) for each in re.findall(r"\d+", found)}
