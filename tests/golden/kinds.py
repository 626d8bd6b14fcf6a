"""The kinds of trainers, their saved states, and how ranks replay them."""

import gzip
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.golden import compression, gossip, pipeline, subnets
from tests.golden.job import Job, Recorded, differences, from_bytes, record, resume, this_cpu

STATES = Path(__file__).parent / "states"


@dataclass(frozen=True)
class Kind:
    """Jobs that run one after another in one set of processes."""

    jobs: dict[str, Job]
    num_ranks: int


KINDS = {
    "gossip": Kind(gossip.JOBS, gossip.NUM_RANKS),
    "pipeline": Kind(pipeline.JOBS, pipeline.NUM_RANKS),
    "subnets": Kind(subnets.JOBS, subnets.NUM_RANKS),
    "compression": Kind(compression.JOBS, compression.NUM_RANKS),
}


def saved_files(kind: str) -> list[Path]:
    """Return the files of a kind, in the order in which they were written."""
    return sorted(STATES.glob(f"{kind}-*.pt.gz"))


def load_saved(kind: str) -> dict[str, Any]:
    """Return by job the "states" and "expected" of each rank; "torch" and "cpu" of the file."""
    found: dict[str, Any] = {}
    for path in saved_files(kind):
        found.update(from_bytes(gzip.decompress(path.read_bytes())))
    return found


def record_all(rank: int, kind: str, names: list[str]) -> dict[str, Recorded | str]:
    """Record jobs on one rank; for each the record or the error."""
    jobs = KINDS[kind].jobs
    return {name: _attempt(lambda name=name: record(jobs[name])) for name in names}


def replay_all(rank: int, kind: str) -> dict[str, list[str] | str]:
    """Replay all jobs on one rank; return by job the differences found, or the error."""
    saved = load_saved(kind)
    jobs = {name: job for name, job in KINDS[kind].jobs.items() if name in saved}
    return {
        name: _attempt(lambda name=name, job=job: _replay(rank, job, saved[name]))
        for name, job in jobs.items()
    }


def _replay(rank: int, job: Job, saved: Any) -> list[str]:
    state, expected = saved["states"][rank], saved["expected"][rank]
    return [
        f"loaded in way {way}: {difference}"
        for way in range(job.ways)
        for difference in differences(resume(job, state, way), expected, exact=_exact(job, saved))
    ]


def _exact(job: Job, saved: Any) -> bool:
    same_place = (saved["torch"], saved["cpu"]) == (str(torch.__version__), this_cpu())
    return not job.rounded and (job.exact or same_place)


def _attempt(run: Callable[[], Any]) -> Any:
    """Return the result of a function, or its error as text, so that the next job still runs."""
    try:
        return run()
    except Exception:
        return traceback.format_exc()
