"""The campaign: all trials, two at a time, and a row for each."""

import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.link import limited_links
from benchmarks.harness.rows import Row
from benchmarks.soak.faults.judge import NOT_REPEATABLE, base_row, judge
from benchmarks.soak.faults.plan import FAULTS, TRAINERS, Trial, baseline, plan
from benchmarks.soak.faults.trial import MBIT_PER_S, Server, run_trial

AT_ONCE = 2


def names() -> list[str]:
    """Return what ``--only`` may begin: faults and trainers."""
    return [*FAULTS, *TRAINERS]


def choose(seed: int, only: Sequence[str] | None, *, dry_run: bool) -> list[Trial]:
    """Return the trials of a seed whose fault or trainer begins so; at most one of each fault."""
    chosen = [
        trial
        for trial in plan(seed)
        if only is None
        or trial.fault.startswith(tuple(only))
        or trial.trainer.startswith(tuple(only))
    ]
    if dry_run:
        chosen = list({trial.fault: trial for trial in reversed(chosen)}.values())[::-1]
    return chosen


def run_all(trials: Sequence[Trial]) -> Iterator[Row]:
    refusal = None
    if any(trial.what.kind == "cut" for trial in trials):
        try:
            with limited_links(2, MBIT_PER_S):
                pass
        except RuntimeError as error:
            refusal = str(error)
    runner = Runner(refusal)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        pending = [pool.submit(runner.run, trial) for trial in trials]
        for each in pending:
            yield each.result()
    finally:
        for server in runner.servers:
            server.kill()  # ends trials that still run
        pool.shutdown(cancel_futures=True)
        for server in runner.servers:
            server.close()


class Runner:
    """Runs trials, `AT_ONCE` at a time, each harmless one after its undisturbed run.

    Args:
        refusal: why links cannot be cut; None if they can.
    """

    def __init__(self, refusal: str | None) -> None:
        self._refusal = refusal
        self.servers = [Server() for _ in range(AT_ONCE)]
        self._free: queue.SimpleQueue[Server] = queue.SimpleQueue()
        for server in self.servers:
            self._free.put(server)
        self._undisturbed: dict[str, list[str | None]] = {}

    def run(self, trial: Trial) -> Row:
        """Return the row of a trial; print the logs of ranks that hung or aborted, with stacks."""
        if self._refusal and trial.what.kind == "cut":
            return {**base_row(trial), "verdict": f"skipped: {self._refusal}"}
        server = self._free.get()
        try:
            undisturbed = None
            if trial.what.harmless and trial.trainer not in NOT_REPEATABLE:
                undisturbed = self._undisturbed.get(trial.trainer)
                if undisturbed is None:
                    ends = run_trial(baseline(trial.trainer), server).ends
                    undisturbed = [end.digest for end in ends]
                    self._undisturbed[trial.trainer] = undisturbed
            outcome = run_trial(trial, server)
        finally:
            self._free.put(server)
        for rank, end in enumerate(outcome.ends):
            if end.status is None or (end.status < 0 and rank != trial.victim):
                of_rank = f"{trial.fault}, {trial.trainer}, rank {rank}"
                print(f"--- {of_rank}:\n{end.log}", file=sys.stderr)
        return judge(trial, outcome, undisturbed)
