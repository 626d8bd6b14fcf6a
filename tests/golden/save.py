"""Save the state and the result of each run that has none: ``python -m tests.golden.save``.

To record one again, delete its file.
"""

import copy
import gzip
import io
from pathlib import Path
from typing import Any

import torch

from tests.golden.runs import RUNS, Run
from tests.workers import run_ranks

STATES = Path(__file__).parent / "states"
SAVED_AT, STEPS = 5, 9


def finish(run: Run, losses: list[float | None]) -> dict[str, list[Any]]:
    """Return the losses and what was trained: lists of floats hold every bit of a float32."""
    trained = {name: each.detach().double().tolist() for name, each in run.finish().items()}
    return {"losses": [each for each in losses if each is not None], **trained}


def record(rank: int, kind: str) -> tuple[bytes, dict[str, list[Any]]]:
    """Train on one rank; return the bytes of the state that is saved on the way, and the result."""
    run = RUNS[kind][0]()
    losses = [run.step(step) for step in range(SAVED_AT)]
    file = io.BytesIO()
    torch.save(copy.deepcopy(run.save()), file)
    losses += [run.step(step) for step in range(SAVED_AT, STEPS)]
    return file.getvalue(), finish(run, losses)


def resume(rank: int, kind: str) -> dict[str, list[Any]]:
    """Return the result of a run on one rank that goes on from the saved state."""
    run = RUNS[kind][0]()
    run.load(load_saved(kind)["states"][rank])
    return finish(run, [run.step(step) for step in range(SAVED_AT, STEPS)])


def load_saved(kind: str) -> dict[str, Any]:
    """Return the state and the result of each rank."""
    with gzip.open(STATES / f"{kind}.pt.gz") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True)


if __name__ == "__main__":
    missing = {n: p for n in RUNS if not (p := STATES / f"{n}.pt.gz").exists()}
    for name, path in missing.items():
        ranks = run_ranks(RUNS[name][1], record, name, time_limit=300)
        states = [torch.load(io.BytesIO(state), weights_only=True) for state, _ in ranks]
        written = io.BytesIO()
        torch.save({"states": states, "results": [result for _, result in ranks]}, written)
        path.write_bytes(gzip.compress(written.getvalue(), mtime=0))
