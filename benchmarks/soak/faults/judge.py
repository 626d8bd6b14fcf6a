"""The row of a trial: what its ranks ended with, and which requirements that breaks."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.harness.rows import Row, stamp
from benchmarks.soak.faults.plan import Trial, is_pipeline
from benchmarks.soak.faults.trial import Outcome

# One row is one trial. Counts are of survivors: all ranks but the victim.
FIELDS = [
    "fault",  # its name
    "trainer",
    "ranks",
    "victim",  # the rank that the fault struck
    "store",  # who hosts it: "launcher", as with torchrun, or "rank 0", which is then the victim
    "survivors",
    # Ranks, the victim of a stop included, still there 11 s after the timeout; in construction that
    # is gloo's for a connection, five times the group's.
    "hangs",
    "aborts",  # ended by a signal
    "errors",  # raised an error
    "named",  # of them: the text names the victim as the rank that failed (a link: its edge)
    "blamed",  # the text says of a living rank that it failed
    "placed",  # the text has step, stage or microbatch
    "raw",  # torch's or gloo's text alone
    "slowest_s",  # from the fault to the last error
    "slowest_end_s",  # to the end of the last process
    "left",  # processes that remained
    "equal",  # harmless faults: yes if all parameters are those of the undisturbed run
    "verdict",  # "ok", "skipped: ...", or the requirements that are broken
    "texts",  # JSON: first line of each survivor's error, by rank; of a cut link, the victim's too
    "torch",
    "commit",
]
KEY = ["fault", "trainer"]
OK, SKIPPED = "ok", "skipped"
NOT_REPEATABLE = ("ADPSGD",)  # which ranks average, and when, depends on time
WITHOUT_STEPS = ("construction", "load_state_dict")
LONGEST_TEXT = 240


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
    """What a text says."""

    names: bool  # it says that the victim failed; of a link, or that it could not be reached
    blames: tuple[int, ...]  # ranks other than the victim that it says failed
    places: bool  # it says step, stage or microbatch
    raw: bool  # it is torch's or gloo's text alone


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


def base_row(trial: Trial) -> Row:
    return {
        "fault": trial.fault,
        "trainer": trial.trainer,
        "ranks": trial.ranks,
        "victim": trial.victim,
        "store": "rank 0" if trial.what.hosts_store else "launcher",
        **stamp(),
    }


def judge(trial: Trial, outcome: Outcome, undisturbed: list[str | None] | None) -> Row:
    """Return the row of a trial.

    ``undisturbed`` has the digests of all ranks without a fault; None: there was no such run.
    """
    cut = trial.what.kind == "cut"
    survivors = {
        rank: end
        for rank, end in enumerate(outcome.ends)
        if rank != trial.victim or trial.what.harmless
    }
    errors = {rank: end.error for rank, end in enumerate(outcome.ends) if end.error}
    raised = {rank: errors[rank] for rank in survivors if rank in errors}
    readings = {rank: read(text, trial.victim, cut=cut) for rank, (_, text) in raised.items()}
    shown = errors if cut else raised
    hung = [rank for rank, end in enumerate(outcome.ends) if end.status is None]
    aborted = [rank for rank, end in survivors.items() if (end.status or 0) < 0]
    row = base_row(trial) | {
        "survivors": len(survivors),
        "hangs": len(hung),
        "aborts": len(aborted),
        "errors": len(raised),
        "named": sum(each.names for each in readings.values()),
        "blamed": sum(bool(each.blames) for each in readings.values()),
        "placed": sum(each.places for each in readings.values()),
        "raw": sum(each.raw for each in readings.values()),
        "slowest_s": f"{max(end.seconds for end in survivors.values()):.1f}",
        "slowest_end_s": f"{max(end.ended for end in survivors.values()):.1f}",
        "left": outcome.left,
        "texts": json.dumps({rank: first_line(*each) for rank, each in shown.items()}),
    }
    problems = [f"rank {rank} hangs" for rank in hung]
    problems += [f"rank {rank} is aborted: {survivors[rank].status}" for rank in aborted]
    problems += ["the fault did not strike"] * (not outcome.struck)
    problems += [f"{outcome.left} processes left"] * bool(outcome.left)
    if trial.what.harmless:
        digests = [end.digest for end in outcome.ends]
        if undisturbed:
            row["equal"] = "yes" if digests == undisturbed and None not in digests else "no"
        problems += [f"rank {rank} raised" for rank in raised]
        problems += ["other parameters"] * (row.get("equal") == "no" and not raised and not hung)
    else:
        ending = {*survivors}
        if trial.what.kind in ("stop", "cut") and not hung:
            ending.add(trial.victim)  # a stopped one continues later, a cut one is only alone
        problems += [f"rank {rank} raised nothing" for rank in sorted(ending - {*errors, *hung})]
        problems += find_unclear(trial, readings)
        if is_pipeline(trial.trainer) and trial.what.kind in ("kill", "raise", "exit", "return"):
            texts = {text for kind, text in raised.values() if kind.endswith("StageError")}
            problems += ["the messages differ"] * (len(texts) > 1)
    return {**row, "verdict": "; ".join(problems) or OK}


def find_unclear(trial: Trial, readings: Mapping[int, Reading]) -> list[str]:
    """Return the requirements that texts break.

    Without the store, only ranks that waited for the victim itself can know that it failed: at
    least one must.
    """
    if trial.what.hosts_store:
        silent = readings and not any(each.names for each in readings.values())
        return ["no rank names the victim"] if silent else []
    problems = []
    for rank, each in readings.items():
        if not each.names:
            problems.append(f"rank {rank} does not name the victim")
        if each.blames:
            problems.append(f"rank {rank} blames {', '.join(map(str, each.blames))}")
        if not each.places and trial.what.phase not in WITHOUT_STEPS:
            problems.append(f"rank {rank} has no step")
    return problems


def first_line(kind: str, text: str) -> str:
    return f"{kind.rpartition('.')[2]}: {text}".splitlines()[0][:LONGEST_TEXT]
