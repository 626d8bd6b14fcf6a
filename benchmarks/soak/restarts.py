"""A rank of a pipeline is killed at a random moment; all ranks start again from a checkpoint.

Three ranks train, and each saves its state every few steps. The survivors of the rank that is
killed must end within the process group's timeout, all with one message. The run that goes on from
the last checkpoint of all ranks must have the losses and final weights of one that nothing
disturbed, bit for bit.
"""

import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.harness.rows import Row, stamp
from benchmarks.soak.faults.plan import TIMEOUT, Trial
from benchmarks.soak.faults.trial import Outcome, Server, run_trial
from benchmarks.soak.trainers import checksum
from pyparallel import PipelineTrainer, optim
from pyparallel.pipeline import OneForwardOneBackward, PipeOptim, Schedule

if TYPE_CHECKING:
    from benchmarks.soak.faults.ranks import Rank

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
FAULTS = {"launcher": "kill -9", "rank 0": "kill -9 of the store's host"}  # by who hosts the store
NUM_RANKS, MICROBATCHES, STEPS, EVERY = 3, 4, 100, 5


def campaign(num_trials: int, seed: int) -> Iterator[Row]:
    """Yield the row of each trial; a seed draws the victims and moments."""
    server, undisturbed = Server(), dict[str, list[str | None]]()
    try:
        pairs = itertools.cycle(itertools.product(SCHEDULES, FAULTS))
        for number, (schedule, store) in zip(range(num_trials), pairs, strict=False):
            draw = random.Random(f"{seed}, {number}")
            victim, step, delay = draw.randrange(NUM_RANKS), draw.randrange(STEPS - EVERY), 0.03
            delay *= draw.random()
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(FAULTS[store], schedule, NUM_RANKS, victim, step, delay, folder)
                whole = replace(trial, fault="none")
                if schedule not in undisturbed:
                    undisturbed[schedule] = digests(run_trial(whole, server))
                    for path in Path(folder).iterdir():
                        path.unlink()
                killed = run_trial(trial, server)
                checkpoint = last_checkpoint(Path(folder))
                resumed = digests(run_trial(replace(whole, resume=checkpoint), server))
            equal = resumed == undisturbed[schedule] and None not in resumed
            texts = sorted(set(texts_of(killed, victim).values()))
            yield {
                "trial": number,
                "schedule": schedule,
                "store": store,
                "victim": victim,
                "after_s": f"{killed.struck_at - killed.begun:.2f}",
                "last_end_s": f"{last_end(killed, victim):.2f}",
                "messages": len(texts),
                "checkpoint": checkpoint,
                "equal": "yes" if equal else "no",
                "verdict": "; ".join(find_problems(killed, victim, equal=equal)) or OK,
                "text": " | ".join(texts),
                **stamp(),
            }
    finally:
        server.close()


def digests(outcome: Outcome) -> list[str | None]:
    return [end.digest for end in outcome.ends]


def texts_of(killed: Outcome, victim: int) -> dict[int, str]:
    """Return the messages of the survivors that raised the trainer's error, by rank."""
    return {
        rank: end.error[1]
        for rank, end in enumerate(killed.ends)
        if rank != victim and end.error and end.error[0].endswith("StageError")
    }


def last_end(killed: Outcome, victim: int) -> float:
    return max(end.ended for rank, end in enumerate(killed.ends) if rank != victim)


def find_problems(killed: Outcome, victim: int, *, equal: bool) -> list[str]:
    texts = texts_of(killed, victim)
    survivors = {*range(NUM_RANKS)} - {victim}
    hung = [rank for rank, end in enumerate(killed.ends) if end.status is None]
    problems = ["the rank was not killed"] * (not killed.struck)
    problems += [f"rank {rank} hangs" for rank in hung]
    problems += [f"rank {rank} raised nothing" for rank in sorted(survivors - texts.keys())]
    problems += ["the messages differ"] * (len(set(texts.values())) > 1)
    dead = f"rank {victim} (stage {victim}) died"
    problems += [f"rank {rank} does not name the victim"
                 for rank, text in texts.items() if not text.startswith(dead)]  # fmt: skip
    problems += ["a rank ended after the timeout"] * (last_end(killed, victim) > TIMEOUT)
    return problems + ["other losses or weights after the restart"] * (not equal)


def summarize(rows: Sequence[Row]) -> str:
    ends = [float(row["last_end_s"]) for row in rows]
    one = sum(row["messages"] == "1" for row in rows)
    equal = sum(row["equal"] == "yes" for row in rows)
    return (
        f"{len(rows)} kills: the last rank ended after {statistics.median(ends):.2f} s (median), "
        f"{max(ends):.2f} s (most); one message in {one}; bit for bit after the restart {equal}"
    )


def train(rank: "Rank") -> str:
    """Train on a rank with a checkpoint every few steps; return a checksum of weights and losses.

    The fault of the rank's trial strikes in its step.
    """
    trial = rank.trial
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()) for _ in range(2 * NUM_RANKS)
    ]
    trainer = PipelineTrainer(
        layers,
        nn.functional.mse_loss,
        lambda parameters: optim.AdamW(parameters, lr=1e-3),
        SCHEDULES[trial.trainer],
        num_microbatches=MICROBATCHES,
        split=range(2, 2 * NUM_RANKS, 2),
    )
    folder, losses = Path(trial.checkpoints), list[float]()
    if trial.resume is not None:
        saved = torch.load(folder / f"{trial.resume}-{rank.rank}.pt")
        losses = saved["losses"]
        trainer.load_state_dict(saved["trainer"])
    rank.report("begun")
    for step in range(trial.resume or 0, STEPS):
        rank.step = step
        if step == trial.step and trial.fault != "none":
            rank.enter("step")
        if step % EVERY == 0:
            trainer.flush()
            state = {"losses": losses, "trainer": trainer.state_dict()}
            path = folder / f"{step}-{rank.rank}.pt"
            torch.save(state, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)  # under its name once it is complete
        inputs = torch.randn(4 * MICROBATCHES, 64, generator=torch.Generator().manual_seed(step))
        loss = trainer.step(inputs, inputs.sin())
        losses += [loss] if rank.rank == NUM_RANKS - 1 else []  # others know it later
    trainer.flush()
    weights = [each for stage in trainer.stages for each in stage.module.parameters()]
    return checksum([*weights, torch.tensor(losses, dtype=torch.float64)])


def last_checkpoint(folder: Path) -> int | None:
    """Return the last step that all ranks have saved; None: there is none."""
    saved = [
        {int(path.name.partition("-")[0]) for path in folder.glob(f"*-{rank}.pt")}
        for rank in range(NUM_RANKS)
    ]
    return max(set.intersection(*saved), default=None)
