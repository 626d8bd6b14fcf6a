"""``python -m benchmarks.soak.members [--algorithms ...] [--processes ...] [--again]``.

Processes train digits under a lighthouse (``membership=``), and end at random moments: they are
killed or stopped, raise, exit, or get a SIGTERM and leave. Each is started again at once, or goes
on once it has been left behind. Who ends and when is drawn: times between two faults are
exponential, with a mean in steps of a rank. Steps sleep, so that those of several processes fit on
one core. The peer is torchft: its Manager over gloo, whose steps count if it commits them. In a
calm run nobody ends: it also takes SGP of a fixed group, for what a membership costs. Where links
are cut each process has a network namespace of its own, and so has the lighthouse.

Of one run: how many changes, whether any process has hung, by how much push-sum weights of an epoch
differ from their number, the share of steps whose round was averaged or committed, steps per living
second beside those of the calm beginning, how much longer a step with a change took, how long a
process that was ready waited until it was a member, and accuracy on held-out digits.

Rows go to ``benchmarks/results/members.csv``; those that are there are kept.
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.link import Rendezvous, limited_links, loopback, set_link
from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, Row, RunRows
from benchmarks.soak.member_logs import summarize
from benchmarks.soak.table import by_case
from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, Change, DiLoCo, Lighthouse, NoLoCo
from pyparallel.gossip.topology import OnePeerExponential

FIELDS = [
    "algorithm", "processes", "case", "seed", "step_ms", "deadline_s", "faults", "changes", "hangs",
    "weight_error", "steps", "rounds_kept", "efficiency", "stall_s", "stall_most_s", "join_s",
    "join_most_s", "rejoin_s", "rejoin_most_s", "growth_kb", "more_fds", "accuracy", "machine",
    "torch", "commit",
]  # fmt: skip
KINDS = ["kill", "stop", "raise", "exit", "leave"]
HELD_OUT = 300
TORCHFT, FIXED = "torchft", "SGP, all ranks"


class Case(NamedTuple):
    """How often processes end, and how long steps are."""

    faults: int
    every: float  # steps of a rank between two
    sleep: float  # seconds of a step
    deadline: float
    kinds: Sequence[str] = KINDS


CASES = {
    "calm": Case(0, 400, 0.05, 5.0),
    "soak": Case(1000, 40, 0.05, 5.0),
    "short soak": Case(100, 40, 0.05, 5.0),
    "cut links": Case(100, 40, 0.05, 5.0, ["cut"]),
    "one in 21 steps": Case(8, 21, 2.0, 20.0, ["kill"]),
    "one in 3.75 steps": Case(40, 3.75, 2.0, 20.0, ["kill"]),
    "one a step": Case(60, 1, 2.0, 20.0, ["kill"]),
}
ALGORITHMS: dict[str, Any] = {
    "SGP": SGP(OnePeerExponential),
    "DiLoCo": DiLoCo(interval=10),
    "NoLoCo": NoLoCo(interval=10),
    FIXED: SGP(OnePeerExponential),
    TORCHFT: None,
}
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pyparallel", "torch._dynamo", "sklearn.datasets"])
_stores: list[Any] = []  # of this process, which serve while it lives


class Run(NamedTuple):
    """One run of processes that end."""

    algorithm: str
    processes: str
    case: str
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for algorithm in options.algorithms:
        for processes in options.processes:
            for case in options.cases:
                yield from (Run(algorithm, processes, case, seed) for seed in options.seeds)


def load_images() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images.float()[order] / 16, labels[order]


class _FaultError(Exception):
    """What a process that is to fail raises."""


Write = Callable[..., object]


class Training(NamedTuple):
    """What a process trains with.

    ``begin`` begins a step, and returns what tells after it whether it was averaged or committed.
    """

    module: nn.Module
    optimizer: Any
    begin: Callable[[], Callable[[], bool]]
    columns: dict[str, Any]  # of the row of a new member
    leave: Callable[[], object]


def train(
    name: str,
    folder: Path,
    place: Rendezvous,
    address: str,
    algorithm: str,
    start: int,
    case: Case,
) -> None:
    """Train until the file "stop" exists; a signal asks this process to raise or to exit."""
    place.enter(int(name[1:]))
    faulthandler.register(signal.SIGUSR1)
    errors = os.open(folder / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    lines = (folder / f"{name}.log").open("a", buffering=1)
    asked: list[str] = []
    signal.signal(signal.SIGUSR2, lambda *_: asked.append("raise"))
    signal.signal(signal.SIGHUP, lambda *_: asked.append("exit"))

    def write(**row: Any) -> None:
        lines.write(json.dumps(row | {"time": time.monotonic(), "pid": os.getpid()}) + "\n")

    torch.set_num_threads(1)
    images, labels = load_images()
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    write(ready=True)
    makes = {TORCHFT: with_torchft, FIXED: partial(with_all_ranks, folder)}
    make = makes.get(algorithm, partial(with_members, ALGORITHMS[algorithm]))
    model, optimizer, begin_step, columns, leave = make(module, name, address, start, case, write)
    write(member=True, **columns, **held())
    while not (folder / "stop").exists():
        begin, is_kept = time.monotonic(), begin_step()
        optimizer.zero_grad()  # torchft's agrees with the others here, before they compute
        time.sleep(case.sleep)
        batch = torch.randint(len(labels) - HELD_OUT, (32,), generator=generator)
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        write(seconds=time.monotonic() - begin, kept=is_kept())
        if "exit" in asked:
            os._exit(3)
        if asked:
            raise _FaultError
    with torch.no_grad():
        right = module(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]
    write(accuracy=float(right.float().mean()), **held())
    leave()


def with_members(
    algorithm: Any, module: nn.Module, name: str, address: str, start: int, case: Case, write: Write
) -> Training:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    made: list[GossipDataParallel] = []

    def note(change: Change) -> None:
        weight = float(made[0].push_sum_weight) if made else None
        write(change=vars(change), weight=weight)

    membership = Lighthouse(address, name=name, start=start, deadline=case.deadline, on_change=note)
    trainer = GossipDataParallel(module, optimizer, algorithm, membership=membership)
    made.append(trainer)
    columns = {"weight": float(trainer.push_sum_weight), "epoch": trainer.epoch}

    def begin() -> Callable[[], bool]:
        epoch = trainer.epoch
        return lambda: trainer.epoch == epoch

    return Training(trainer, optimizer, begin, columns, trainer.leave)


def with_all_ranks(
    folder: Path, module: nn.Module, name: str, address: str, start: int, case: Case, write: Write
) -> Training:
    """Train without membership, which only a calm run survives."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=int(name[1:]), world_size=start)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    trainer = GossipDataParallel(module, optimizer, ALGORITHMS[FIXED])
    columns = {"weight": float(trainer.push_sum_weight), "epoch": 0}
    return Training(trainer, optimizer, lambda: lambda: True, columns, dist.destroy_process_group)


def with_torchft(
    module: nn.Module, name: str, address: str, start: int, case: Case, write: Write
) -> Training:
    """Train with torchft's Manager, which averages the gradients; a step is kept if it commits it.

    Not with its DistributedDataParallel, in which survivors end with an AssertionError if a peer's
    death is known when the all-reduce begins, as with torch 2.13.
    """
    import torchft
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exports

    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    timeout = timedelta(seconds=case.deadline)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=name,
    )

    def begin() -> Callable[[], bool]:
        step = manager.current_step()
        return lambda: bool(manager.current_step() > step)

    class Averaged(torchft.Optimizer):  # type: ignore[misc]  # has no types
        def step(self, closure: object | None = None) -> None:
            gradients = [each.grad for each in module.parameters() if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients])
            manager.allreduce(flat).wait()
            parts = flat.split([each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            super().step()

    return Training(module, Averaged(manager, optimizer), begin, {}, manager.shutdown)


def held() -> dict[str, int]:
    """Return the memory in kB and the descriptors that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"kb": 4 * pages, "fds": len(os.listdir("/proc/self/fd"))}


@dataclass
class Processes:
    """The processes of a run, by name, and their logs."""

    folder: Path
    place: Rendezvous
    address: str
    run: Run
    alive: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, float] = field(default_factory=dict)  # or cut off, and when they go on
    struck: dict[str, tuple[int, float]] = field(default_factory=dict)  # last pid, and until when

    @property
    def case(self) -> Case:
        return CASES[self.run.case]

    def start(self, name: str, start: int = 1) -> None:
        algorithm = self.run.algorithm
        arguments = name, self.folder, self.place, self.address, algorithm, start, self.case
        self.alive[name] = _CONTEXT.Process(target=train, args=arguments, daemon=True)
        self.alive[name].start()

    def rows(self, name: str) -> list[Row]:
        path = self.folder / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def tail(self, name: str) -> Row:
        """Return the last row of the process that has the name now, or an empty one."""
        path = self.folder / f"{name}.log"
        if not path.exists():
            return {}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4000))
            lines = file.read().splitlines()
        rows = [json.loads(each) for each in lines[-3:] if each[:1] == b"{" and each[-1:] == b"}"]
        own = [each for each in rows if each["pid"] == self.alive[name].pid]
        return own[-1] if own else {}

    def find_steppers(self) -> list[str]:
        """Return those that take steps, and are about to take more."""
        found = []
        for name, process in self.alive.items():
            last = self.tail(name)
            pid, until = self.struck.get(name, (0, 0.0))
            is_spared = process.pid != pid or last.get("time", 0.0) > until
            if process.is_alive() and "seconds" in last and is_spared:
                found.append(name)
        return found

    def strike(self, name: str, kind: str) -> None:
        signals = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGSTOP,
            "raise": signal.SIGUSR2,
            "exit": signal.SIGHUP,
            "leave": signal.SIGTERM,
        }
        pid, until = self.alive[name].pid, math.inf
        if kind in ("stop", "cut"):
            until = self.stopped[name] = time.monotonic() + self.case.deadline + 2
        self.struck[name] = pid, until
        if kind == "cut":
            set_link(self.place, int(name[1:]), "down")
        else:
            os.kill(pid, signals[kind])

    def tend(self) -> None:
        """Start again what has ended, and let go on what has been left behind."""
        for name, until in list(self.stopped.items()):
            if time.monotonic() > until:
                if self.place.namespaces:
                    set_link(self.place, int(name[1:]), "up")
                else:
                    os.kill(self.alive[name].pid, signal.SIGCONT)
                del self.stopped[name]
        for name, process in self.alive.items():
            if not process.is_alive():
                process.join()
                self.start(name)

    def wait(self, condition: Callable[[], bool], *, tends: bool = True) -> None:
        """Wait; a RuntimeError if no process takes a step for long, or begins to."""
        limit = 4 * self.case.deadline + 60
        last, since = None, time.monotonic()
        while not condition():
            if tends:
                self.tend()
            now = [(self.folder / f"{name}.log").stat().st_size
                   for name in self.alive if (self.folder / f"{name}.log").exists()]  # fmt: skip
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > limit:
                for process in self.alive.values():
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1)
                texts = {name: (self.folder / f"{name}.err").read_text()[-3000:]
                         for name in self.alive}  # fmt: skip
                raise RuntimeError(f"no process has gone on for {limit} s: {texts}")
            time.sleep(0.02)

    def end(self) -> None:
        (self.folder / "stop").touch()
        processes = self.alive.values()
        self.wait(lambda: not any(each.is_alive() for each in processes), tends=False)


def serve(algorithm: str) -> Any:
    """Start a lighthouse in this process: of torchft's own README, but for the heartbeats."""
    if algorithm != TORCHFT:
        return Lighthouse.serve("0.0.0.0:0")
    os.environ.setdefault("RUST_LOG", "error")  # else it prints each request
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=700
    )


@contextmanager
def inside(place: Rendezvous, rank: int) -> Iterator[None]:
    """Have this thread, and those that it starts, in the namespace of a rank, if there are any."""
    with open("/proc/thread-self/ns/net") as own:
        home = Rendezvous("127.0.0.1", 0, "lo", [f"/proc/self/fd/{own.fileno()}"])
        place.enter(rank)
        try:
            yield
        finally:
            home.enter(0)


def perform(run: Run) -> Row:
    case, draw = CASES[run.case], random.Random(run.seed)
    num_processes = int(run.processes)
    names = [f"r{index}" for index in range(num_processes)]
    links = limited_links(num_processes + 1, 1000) if "cut" in case.kinds else loopback()
    with tempfile.TemporaryDirectory() as folder, links as place, inside(place, num_processes):
        server = serve(run.algorithm)
        host = f"10.0.0.{num_processes + 1}" if place.namespaces else place.host
        address = f"http://{host}:{server.address().rpartition(':')[2]}"
        processes = Processes(Path(folder), place, address, run)
        try:
            for name in names:
                processes.start(name, len(names))
            processes.wait(lambda: all(len(processes.rows(name)) > 23 for name in names))
            struck = 0
            if not case.faults:
                begin = time.monotonic()
                processes.wait(lambda: time.monotonic() > begin + case.every * case.sleep)
            while struck < case.faults:
                at = time.monotonic() + draw.expovariate(1 / (case.every * case.sleep))
                processes.wait(lambda at=at: time.monotonic() > at)
                able = processes.find_steppers()
                if len(able) > 1:  # the last member is spared: it has all that was learned
                    processes.strike(draw.choice(able), draw.choice(case.kinds))
                    struck += 1
            processes.wait(lambda: len(processes.find_steppers()) == len(names))
            processes.end()
            logs = {name: processes.rows(name) for name in names}
        finally:
            for process in processes.alive.values():
                process.kill()
            server.shutdown()
    columns = summarize(logs, discards=run.algorithm == TORCHFT)
    return {**columns, "deadline_s": case.deadline, "faults": struck, "hangs": 0}


if __name__ == "__main__":
    rows = RunRows(RESULTS / "members.csv", FIELDS, num_keys=4)
    choices = {"algorithms": list(ALGORITHMS), "processes": ["4", "8"], "cases": list(CASES)}
    compare("soak.members", __doc__, rows, find_runs, perform, by_case, range(1), **choices)
