"""The trials of a campaign: which fault strikes which trainer, where and when."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.soak.trainers import STARTS, Start, pipelined
from pyparallel import pipeline

TIMEOUT = 6.0  # of the process group, in seconds
STEPS = 60  # of a run that nothing disturbs
CONTROLS = ("DDP", "FSDP2")  # their errors are torch's own
# Two stages on each of two ranks, beside Interleaved.
PLACED: Mapping[str, Start] = {
    f"{type(each).__name__}, two stages on a rank": partial(pipelined, each, 2)
    for each in (pipeline.GPipe(), pipeline.ZeroBubble())
}
TRAINERS: dict[str, Start] = {
    **{name: start for name, start in STARTS.items() if name not in CONTROLS},
    **PLACED,
}
FIRST_PIPELINE, LAST_PIPELINE = "GPipe", "Interlocking(1)"


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, the victim."""

    # ``kill`` (SIGKILL), ``raise`` (in its forward), ``exit`` (``sys.exit(0)``), ``return``
    # (without ``flush()`` or ``join()``), ``stop`` (SIGSTOP), ``sleep`` (in each step),
    # ``cut`` (its network link)
    kind: str
    phase: str = "step"  # ``step``, or another one, at whose beginning the fault strikes
    seconds: float | None = None  # of a stop or a cut, and of the sleep; None: for good
    every: int = 3  # how many trainers share one trial
    # The victim is rank 0, which hosts the store, as without torchrun. Otherwise the store
    # is in a process of its own.
    hosts_store: bool = False
    # No rank may raise, and all parameters must be those of an undisturbed run
    harmless: bool = False


FAULTS = {
    "kill -9": Fault("kill", every=1),
    "exception": Fault("raise", every=2),
    "sys.exit(0)": Fault("exit", every=2),
    "early return": Fault("return", every=2),
    "SIGSTOP, too long": Fault("stop", every=2),
    "link cut": Fault("cut"),
    "kill -9 in construction": Fault("kill", "construction"),
    "kill -9 in consensus()": Fault("kill", "consensus", every=2),
    "kill -9 in join()": Fault("kill", "join", every=2),
    "kill -9 in flush()": Fault("kill", "flush"),
    "kill -9 in state_dict()": Fault("kill", "state_dict", every=4),
    "kill -9 in load_state_dict()": Fault("kill", "load_state_dict", every=4),
    "kill -9 of the store's host": Fault("kill", hosts_store=True),
    "SIGSTOP of the store's host": Fault("stop", every=4, hosts_store=True),
    "SIGSTOP, short": Fault("stop", seconds=2.0, every=2, harmless=True),
    "slow rank": Fault("sleep", seconds=0.1, every=4, harmless=True),
    "link cut, short": Fault("cut", seconds=1.5, every=4, harmless=True),
}
UNDISTURBED = Fault("none", harmless=True)


@dataclass(frozen=True)
class Trial:
    """A run of a trainer, with a fault."""

    fault: str  # name of the fault; "none" for the run that others are compared with
    trainer: str  # name in `TRAINERS`
    ranks: int
    victim: int
    step: int  # in which it strikes
    delay: float  # seconds after the beginning of that step, of faults from outside
    checkpoints: str = ""  # the folder of a run of ``restarts``; none: it writes no checkpoints
    # The step of the checkpoint that such a run goes on from; None: from the start
    resume: int | None = None

    @property
    def what(self) -> Fault:
        return FAULTS.get(self.fault, UNDISTURBED)


def plan(seed: int) -> Iterator[Trial]:
    """Yield all trials; a seed gives the same ones."""
    for fault, what in FAULTS.items():
        able = [name for name in TRAINERS if can_strike(what.phase, name)]
        first = sum(map(ord, fault)) % what.every  # other trainers for each fault
        for trainer in able[first :: what.every]:
            yield make_trial(fault, trainer, seed)


def make_trial(fault: str, trainer: str, seed: int) -> Trial:
    draw = random.Random(f"{seed}, {fault}, {trainer}")
    ranks = ranks_of(trainer)
    what = FAULTS.get(fault, UNDISTURBED)
    victim = 0 if what.hosts_store else draw.randrange(ranks)
    if what.kind == "cut":
        victim = draw.randrange(1, ranks)  # the store is beside rank 0
    return Trial(fault, trainer, ranks, victim, draw.randrange(10, 20), draw.uniform(0, 0.03))


def baseline(trainer: str) -> Trial:
    return Trial("none", trainer, ranks_of(trainer), 0, 0, 0.0)


def is_pipeline(trainer: str) -> bool:
    names = list(TRAINERS)
    first, last = names.index(FIRST_PIPELINE), names.index(LAST_PIPELINE)
    return first <= names.index(trainer) <= last or trainer in PLACED


def is_gossip(trainer: str) -> bool:
    return list(TRAINERS).index(trainer) < list(TRAINERS).index(FIRST_PIPELINE)


def ranks_of(trainer: str) -> int:
    """Return 4, or 2 to 4 for a pipeline of at most five layers."""
    if not is_pipeline(trainer):
        return 4
    if trainer in PLACED or trainer == "Interleaved":
        return 2
    return 4 if trainer in ("OneForwardOneBackward", "PipeDream") else 3


def can_strike(phase: str, trainer: str) -> bool:
    """Return whether a trainer has a phase, in which its ranks wait for each other."""
    if phase == "consensus":
        return is_gossip(trainer)
    if phase == "join":
        return is_gossip(trainer) and trainer != "Hierarchical"  # needs equal numbers of batches
    if phase in ("construction", "flush", "state_dict", "load_state_dict"):
        return is_gossip(trainer) or is_pipeline(trainer) or trainer == "SubnetTrainer"
    return True
