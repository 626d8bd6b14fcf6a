"""``python -m benchmarks.soak [--part PART ...] [--only NAME ...] [--dry-run]``: long runs, faults.

* ``rounds``: 20,000 PushSum rounds over gloo at 3 and 4 ranks, on irregular graphs too, dense and
  compressed: the total mass must stay what it was.
* ``steps``: 5,000 steps of every trainer on 2 ranks, with plain DDP and FSDP2 as controls.
* ``made``: 300 trainers of each kind, one after another in one process that may open 1,024 files,
  with two steps each; half of them are closed, the others dropped.
* ``faults``: a rank of every trainer is killed, stopped, slowed, cut off, or leaves; all others
  must end soon after the process group's timeout, with an error that names it (`faults/plan.py` has
  the trials, `faults/judge.py` the requirements and columns).
* ``restarts``: a rank of a pipeline is killed at a random moment, and all start again from the last
  checkpoint: the others must end with one message, and the run go on bit for bit (`restarts.py`).

In the first three, memory, file descriptors and threads must be flat: after a warm-up of 40 % of
the steps no file descriptor and no thread is added (``made``: 60, as process groups are destroyed
several at a time), and resident memory rises by less than 100 kB in 1,000 steps (of which ``made``
has too few), by lines fitted to both halves of its samples, of which the smaller slope counts: a
single jump is no leak. The table has the rank that grows most.
Rows go to ``benchmarks/results/soak-<machine>.csv``, where they replace those of the same cases.
The exit status is 1 if a case failed. Ranks that exceed a case's time limit print their stacks and
end.

Rows of trials go to ``benchmarks/results/faults-<machine>.csv``, and those of restarts to
``restarts-<machine>.csv``. Links are cut between network namespaces; where a machine refuses those,
the rows say skipped.

``--dry-run`` takes 20 steps, which show that all runs, and that descriptors and threads are flat
(not of ``made``: 20 trainers that leak stay below 60); of each fault, one trial; of restarts, two.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.harness.program import make_parser, prepare_for_ranks
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, commit, machine, record, stamp
from benchmarks.soak import restarts, rounds, trainers
from benchmarks.soak.faults import campaign, table
from benchmarks.soak.faults import judge as trials
from benchmarks.soak.rounds import find_problems
from benchmarks.soak.watch import BOUND_KB, Sample, judge

FIELDS = [
    "part", "case", "ranks", "steps", "early_step", "late_step", "early_rss_kb", "late_rss_kb",
    "growth_kb", "bound_kb", "early_fds", "late_fds", "early_threads", "late_threads",
    "weight_error", "sum_error", "verdict", "torch", "commit",
]  # fmt: skip
KEY = ["part", "case", "ranks"]
FLAT = "flat"
SEED, NUM_RESTARTS = 0, 20  # the seed draws victims and moments
SECONDS = 300  # time limit of a case


@dataclass(frozen=True)
class Part:
    """Cases of one kind."""

    # Their names, each with the numbers of ranks on which it runs
    cases: Mapping[str, Sequence[int]]
    steps: int
    # ``run(rank, case, steps)`` of a rank returns samples, and errors by column
    run: Callable[[int, str, int], tuple[list[Sample], Mapping[str, float]]]
    slack: int = 0  # descriptors, and threads, by which medians may differ


PARTS = {
    "rounds": Part({name: case.ranks for name, case in rounds.CASES.items()}, 20_000, rounds.run),
    "steps": Part(
        {case: (trainers.ranks_of(case),) for case in trainers.STARTS}, 5_000, trainers.run
    ),
    # Groups are destroyed several at a time: of 120 trainers that leak one each, 600 would be left.
    "made": Part(
        {case: (trainers.ranks_of(case),) for case in trainers.KINDS}, 300, trainers.make, slack=60
    ),
}


FAULTS, RESTARTS = "faults", "restarts"


def main() -> None:
    options = parse(sys.argv[1:])
    # Torch's flight recorder keeps the last 2,000 collectives, whose memory would look like a leak.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    prepare_for_ranks()
    print(f"torch {torch.__version__}, commit {commit()}\n")
    failed = watch_growth(options) if {*options.part} & {*PARTS} else []
    if FAULTS in options.part:
        failed += watch_faults(options)
    if RESTARTS in options.part:
        failed += watch_restarts(options)
    if failed:
        sys.exit("\n".join(["not as it must be:", *failed]))


def path_of(name: str) -> Path:
    return RESULTS / f"{name}-{machine()}.csv"


def watch_growth(options: argparse.Namespace) -> list[str]:
    """Run the cases of the first three parts; return those that are not flat."""
    found = record(soak(options), options.out or path_of("soak"), FIELDS, KEY)
    return [
        f"{row['case']} on {row['ranks']} ranks: {row['verdict']}"
        for row in found
        if row["verdict"] != FLAT
    ]


def watch_faults(options: argparse.Namespace) -> list[str]:
    chosen = campaign.choose(SEED, options.only, dry_run=options.dry_run)
    print(f"{len(chosen)} trials")
    rows, path = campaign.run_all(chosen), options.out or path_of(FAULTS)
    found = record(([row] for row in rows), path, trials.FIELDS, trials.KEY)
    print(f"\n{table.by_fault(found)}\n\n{table.by_trainer(found)}")
    return [
        f"{row['fault']}, {row['trainer']}: {row['verdict']}"
        for row in found
        if not row["verdict"].startswith((trials.OK, trials.SKIPPED))
    ]


def watch_restarts(options: argparse.Namespace) -> list[str]:
    rows = restarts.campaign(2 if options.dry_run else NUM_RESTARTS, SEED)
    path = options.out or path_of(RESTARTS)
    found = record(([row] for row in rows), path, restarts.FIELDS, restarts.KEY)
    print(f"\n{restarts.summarize(found)}")
    bad = [row for row in found if row["verdict"] != restarts.OK]
    return [f"restart {row['trial']}: {row['verdict']}" for row in bad]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("soak", __doc__)
    parts = [*PARTS, FAULTS, RESTARTS]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="cases, faults or trainers whose names begin so"
    )
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if options.out and {*options.part} & {FAULTS, RESTARTS} and len(options.part) > 1:
        parser.error("--out is one file: faults and restarts have other columns than rounds and "
                     "steps; pass one --part")  # fmt: skip
    known = [case for part in options.part if part in PARTS for case in PARTS[part].cases]
    known += campaign.names() if FAULTS in options.part else []
    for name in options.only or ():
        if not any(case.startswith(name) for case in known):
            parser.error(f"--only must begin the name of a case, got {name!r}: {', '.join(known)}")
    return options


def soak(options: argparse.Namespace) -> Iterator[list[Row]]:
    for name in filter(PARTS.__contains__, options.part):
        part = PARTS[name]
        count, wanted = 20 if options.dry_run else part.steps, tuple(options.only or [""])
        for case in filter(lambda case: case.startswith(wanted), part.cases):
            for num_ranks in part.cases[case]:
                yield [run_case(name, case, num_ranks, count, SECONDS)]


def run_case(name: str, case: str, num_ranks: int, num_steps: int, seconds: float) -> Row:
    """Return the row of a case: of the rank that grows most, with the problems of all ranks."""
    row: Row = {
        "part": name,
        "case": case,
        "ranks": num_ranks,
        "steps": num_steps,
        "bound_kb": f"{BOUND_KB:.0f}",
        **stamp(),
    }
    try:
        answers = run_on_loopback(num_ranks, seconds, PARTS[name].run, case, num_steps)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {**row, "verdict": "failed: " + str(error).strip().splitlines()[-1]}
    reports = [judge(samples, PARTS[name].slack) for samples, _ in answers]
    problems = [
        f"rank {rank}: {each}" for rank, report in enumerate(reports) for each in report.problems
    ]
    errors = answers[0][1]  # the same on all ranks
    problems += find_problems(errors, num_steps)
    worst = max(reports, key=lambda report: (report.growth_kb or 0, report.late.rss_kb))
    row["growth_kb"] = "" if worst.growth_kb is None else f"{worst.growth_kb:.1f}"
    for when, sample in (("early", worst.early), ("late", worst.late)):
        row |= {f"{when}_{key}": value for key, value in asdict(sample).items()}
    row |= {key: f"{error:.1e}" for key, error in errors.items()}
    return {**row, "verdict": "; ".join(problems) or FLAT}


if __name__ == "__main__":
    main()
