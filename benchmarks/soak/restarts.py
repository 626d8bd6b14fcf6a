"""A rank of a pipeline is killed at a random moment; all ranks start again from a checkpoint.

Three ranks train, and each saves its state every few steps. The survivors of the rank that is
killed must end within the process group's timeout, all with one message. The run that goes on from
the last checkpoint of all ranks must have the losses and final weights of one that nothing
disturbed, bit for bit.
"""

import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.link import Rendezvous, loopback
from benchmarks.harness.rows import Row, stamp
from benchmarks.soak.faults.ranks import checksum
from pyparallel import PipelineTrainer, optim
from pyparallel.pipeline import OneForwardOneBackward, PipeOptim, Schedule, StageError

# One row is one run that is killed.
FIELDS = [
    "trial", "schedule",
    "store",  # who hosts it: "rank 0", or "launcher", as with torchrun
    "victim",
    "after_s",  # from the first step to the kill
    "last_end_s",  # from the kill to the end of the last process
    "messages",  # how many different ones the survivors raised
    "checkpoint",  # the steps that were not trained again
    "equal",  # yes: losses and weights are those of the undisturbed run, bit for bit
    "verdict",  # "ok", or the requirements that are broken
    "text",  # the message, or all of them
    "torch", "commit",
]  # fmt: skip
KEY = ["trial"]
OK = "ok"

SCHEDULES: Mapping[str, Schedule] = {
    type(each).__name__: each for each in (OneForwardOneBackward(), PipeOptim())
}
STORES = "launcher", "rank 0"
NUM_RANKS, MICROBATCHES, STEPS, EVERY = 3, 4, 100, 5
TIMEOUT = 10.0  # of the process group, in seconds
LONGEST_RUN = 60.0  # seconds, of a run that nothing disturbs
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pyparallel.pipeline", "torch._dynamo"])


@dataclass
class Run:
    """What the ranks of a run ended with.

    Args:
        seconds: from its first step to its end.
        results: losses, and a checksum of the weights, by rank; empty of a rank that failed.
        texts: of errors, by rank.
        last_end: seconds from the kill to the end of the last process.
        struck: the victim was killed before any rank had finished.
        hung: ranks that had to be killed.
    """

    seconds: float = 0.0
    results: dict[int, tuple[list[float], str]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    last_end: float = 0.0
    struck: bool = False
    hung: list[int] = field(default_factory=list)


def campaign(num_trials: int, seed: int) -> Iterator[Row]:
    """Yield the row of each trial; a seed draws the victims and moments."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a store that ended with its rank
    undisturbed: dict[str, Run] = {}
    pairs = itertools.cycle(itertools.product(SCHEDULES, STORES))
    for trial, (schedule, store) in zip(range(num_trials), pairs, strict=False):
        draw = random.Random(f"{seed}, {trial}")
        if schedule not in undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                undisturbed[schedule] = run(schedule, store, Path(folder))
        yield run_trial(trial, schedule, store, undisturbed[schedule], draw)


def run_trial(trial: int, schedule: str, store: str, undisturbed: Run, draw: random.Random) -> Row:
    """Kill a rank, go on from the last checkpoint, and return what came of it."""
    victim, moment = draw.randrange(NUM_RANKS), draw.uniform(0, undisturbed.seconds)
    while True:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            killed = run(schedule, store, folder, victim, moment)
            if killed.struck:
                step = last_checkpoint(folder)
                resumed = run(schedule, store, folder, resume=step)
                break
        moment *= 0.8  # the end of the run came first
    equal = len(resumed.results) == NUM_RANKS and resumed.results == undisturbed.results
    texts = sorted(set(killed.texts.values()))
    return {
        "trial": trial,
        "schedule": schedule,
        "store": store,
        "victim": victim,
        "after_s": f"{moment:.2f}",
        "last_end_s": f"{killed.last_end:.2f}",
        "messages": len(texts),
        "checkpoint": step,
        "equal": "yes" if equal else "no",
        "verdict": "; ".join(find_problems(killed, victim, equal=equal)) or OK,
        "text": " | ".join(texts),
        **stamp(),
    }


def find_problems(killed: Run, victim: int, *, equal: bool) -> list[str]:
    """Return the requirements that are broken."""
    survivors = {*range(NUM_RANKS)} - {victim}
    problems = [f"rank {rank} hangs" for rank in killed.hung]
    problems += [f"rank {rank} raised nothing" for rank in sorted(survivors - killed.texts.keys())]
    problems += ["the messages differ"] * (len(set(killed.texts.values())) > 1)
    dead = f"rank {victim} (stage {victim}) died"
    problems += [f"rank {rank} does not name the victim"
                 for rank, text in killed.texts.items() if not text.startswith(dead)]  # fmt: skip
    problems += ["a rank ended after the timeout"] * (killed.last_end > TIMEOUT)
    return problems + ["other losses or weights after the restart"] * (not equal)


def summarize(rows: Sequence[Row]) -> str:
    """Return the figures of all trials in a sentence."""
    ends = [float(str(row["last_end_s"])) for row in rows]
    one = sum(row["messages"] == 1 for row in rows)
    equal = sum(row["equal"] == "yes" for row in rows)
    return (
        f"{len(rows)} kills: the last rank ended after {statistics.median(ends):.2f} s (median), "
        f"{max(ends):.2f} s (most); one message in {one}; bit for bit after the restart {equal}"
    )


def run(
    schedule: str,
    store: str,
    folder: Path,
    victim: int | None = None,
    moment: float = 0.0,
    resume: int | None = None,
) -> Run:
    """Run three ranks to their ends.

    Args:
        schedule: name in `SCHEDULES`.
        store: who hosts it.
        folder: of the checkpoints.
        victim: the rank to kill; None: none.
        moment: seconds from the beginning of its first step to the kill.
        resume: the step of the checkpoint to go on from; None: from the start.
    """
    with loopback() as place, contextlib.ExitStack() as stack:
        host = None
        if store == "launcher":
            host = dist.TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
        pipes: dict[int, Connection] = {}
        processes: dict[int, Any] = {}
        for rank in range(NUM_RANKS):
            pipes[rank], sender = _CONTEXT.Pipe(duplex=False)
            arguments = rank, place, host is None, schedule, folder, resume, sender
            processes[rank] = _CONTEXT.Process(target=live, args=arguments)
            processes[rank].start()
            stack.callback(processes[rank].join)
            stack.callback(processes[rank].kill)
            sender.close()
        return watch(pipes, processes, victim, moment)


def watch(
    pipes: Mapping[int, Connection], processes: Mapping[int, Any], victim: int | None, moment: float
) -> Run:
    """Kill the victim at its moment, and collect what the ranks end with."""
    outcome = Run()
    for rank in pipes:
        if not pipes[rank].poll(LONGEST_RUN) or pipes[rank].recv() != "begun":
            raise RuntimeError(f"rank {rank} did not begin: see its output")
    begin = time.monotonic()
    deadline = begin + LONGEST_RUN
    if victim is not None:
        processes[victim].join(moment)
        processes[victim].kill()
        begin = time.monotonic()
        deadline = begin + 2 * TIMEOUT
        processes[victim].join()
        outcome.struck = pipes[victim].poll() and is_empty(pipes[victim])
    running = {processes[rank].sentinel: rank for rank in processes if rank != victim}
    while running and (ended := wait([*running], deadline - time.monotonic())):
        outcome.last_end = time.monotonic() - begin
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            with contextlib.suppress(EOFError):  # it is missing in the outcome
                result = pipes[rank].recv()
                if isinstance(result, str):
                    outcome.texts[rank] = result
                else:
                    outcome.results[rank] = result
    outcome.struck = outcome.struck and not outcome.results
    outcome.hung = [*running.values()]
    outcome.seconds = time.monotonic() - begin
    return outcome


def is_empty(pipe: Connection) -> bool:
    """Return whether a process that has ended has sent nothing more."""
    try:
        pipe.recv()
    except EOFError:
        return True
    return False


def live(
    rank: int, place: Rendezvous, hosts: bool, schedule: str, folder: Path, resume: int | None,
    sender: Connection,
) -> None:  # fmt: skip
    """Train in a process of its own; send what ``train`` returns, or the error."""
    faulthandler.dump_traceback_later(LONGEST_RUN + 2 * TIMEOUT, exit=True)
    place.enter(rank)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    store = None if hosts else dist.TCPStore(place.host, place.port, is_master=False)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.host}:{place.port}" if hosts else None,
        store=store,
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timeout,
    )
    dist.barrier()
    try:
        sender.send(train(rank, schedule, folder, resume, sender))
    except StageError as error:
        sender.send(str(error))
        raise SystemExit(1) from None
    dist.barrier()  # rank 0 may hold the store, so it must leave last
    dist.destroy_process_group()


def train(
    rank: int, schedule: str, folder: Path, resume: int | None, sender: Connection
) -> tuple[list[float], str]:
    """Train with a checkpoint every few steps; return the losses and a checksum of the weights."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(2 * NUM_RANKS)
    ]
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: optim.AdamW(parameters, lr=1e-3),
        SCHEDULES[schedule],
        num_microbatches=MICROBATCHES,
        split=range(2, 2 * NUM_RANKS, 2),
    )
    losses: list[float] = []
    if resume is not None:
        saved = torch.load(folder / f"{resume}-{rank}.pt")
        losses = saved["losses"]
        trainer.load_state_dict(saved["trainer"])
    sender.send("begun")
    for step in range(resume or 0, STEPS):
        if step % EVERY == 0:
            trainer.flush()
            save({"losses": losses, "trainer": trainer.state_dict()}, folder / f"{step}-{rank}.pt")
        inputs = torch.randn(4 * MICROBATCHES, 64, generator=torch.Generator().manual_seed(step))
        loss = trainer.step(inputs, inputs.sin())
        losses += [] if loss is None else [loss]
    trainer.flush()
    weights = [each for stage in trainer.stages for each in stage.module.parameters()]
    return losses, checksum(weights)


def save(state: object, path: Path) -> None:
    """Save a state under its name once it is complete."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def last_checkpoint(folder: Path) -> int | None:
    """Return the last step that all ranks have saved; None: there is none."""
    saved = [
        {int(path.name.partition("-")[0]) for path in folder.glob(f"*-{rank}.pt")}
        for rank in range(NUM_RANKS)
    ]
    return max(set.intersection(*saved), default=None)
