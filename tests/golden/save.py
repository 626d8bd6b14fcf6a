"""Write the states of new jobs: ``python -m tests.golden.save``.

Files are never overwritten: the states of new jobs go to a new file.
"""

import gzip
from pathlib import Path

import torch

from tests.golden.job import from_bytes, this_cpu, to_bytes
from tests.golden.kinds import KINDS, STATES, load_saved, record_all, saved_files
from tests.workers import run_ranks


def save_missing(kind: str) -> Path | None:
    """Record the jobs of a kind that no file has; return the new file, or None."""
    names = sorted(KINDS[kind].jobs.keys() - load_saved(kind).keys())
    if not names:
        return None
    ranks = run_ranks(KINDS[kind].num_ranks, record_all, kind, names, time_limit=300)
    wrong = [
        f"{name}, rank {rank}: {found[name]}"
        for rank, found in enumerate(ranks)
        for name in names
        if isinstance(found[name], str)
    ]
    if wrong:
        raise RuntimeError("nothing is written:\n" + "\n".join(wrong))
    content = {
        name: {
            "states": [from_bytes(found[name].state) for found in ranks],
            "expected": [found[name].expected for found in ranks],
            "torch": str(torch.__version__),
            "cpu": this_cpu(),
        }
        for name in names
    }
    path = STATES / f"{kind}-{len(saved_files(kind)) + 1}.pt.gz"
    with path.open("xb") as file:  # refuses to overwrite
        file.write(gzip.compress(to_bytes(content), mtime=0))
    return path


if __name__ == "__main__":
    for each in KINDS:
        written = save_missing(each)
        print(f"{each}: {'nothing is missing' if written is None else written.name}")  # noqa: T201
