"""Ranks of trials, forked from one warm process; each interpreter ends as that of a user's script.

``python -m benchmarks.soak.faults.ranks`` reads trials as lines of JSON. What ranks report, and how
they end, are lines of JSON on its standard output. All its processes end with the process that
started it, even if that is killed.
"""

import ctypes
import datetime
import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.harness.link import Rendezvous
from benchmarks.soak import restarts
from benchmarks.soak.faults.plan import STEPS, TIMEOUT, TRAINERS, Trial, is_pipeline
from benchmarks.soak.trainers import Running, checksum

PR_SET_PDEATHSIG = 1
LONGEST_LIFE = 120  # seconds; then a rank prints its stacks and exits, whatever its parent does
LONGEST_TEXT = 2000  # a line that fits into a pipe's buffer is written whole


class UserError(Exception):
    """What the user's code raises on the victim."""


@dataclass
class Rank:
    """A rank of a trial, in a process of its own."""

    trial: Trial
    place: Rendezvous
    rank: int
    log: Path
    reports: TextIO
    step: int = 0
    slow: bool = False
    left: bool = False

    def report(self, event: str, **values: object) -> None:
        """Write an event in one piece."""
        line = {"event": event, "rank": self.rank, "time": time.monotonic(), **values}
        self.reports.write(json.dumps(line) + "\n")
        self.reports.flush()

    def live(self) -> None:
        """Join the process group and train; an error is reported and ends the interpreter."""
        detach(self.log)
        faulthandler.enable()
        faulthandler.dump_traceback_later(LONGEST_LIFE, exit=True)
        self.place.enter(self.rank)
        torch.set_num_threads(1)
        torch.manual_seed(self.rank)
        timeout = datetime.timedelta(seconds=TIMEOUT)
        hosts = self.trial.what.hosts_store and self.rank == 0
        address = self.place.host, self.place.port
        store = dist.TCPStore(*address, None, hosts, timeout, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.trial.ranks, timeout=timeout
        )
        self.meet(store, "connected")
        try:
            digest = self.train()
        except BaseException as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            self.report("error", type=kind, text=str(error)[:LONGEST_TEXT], step=self.step)
            raise
        if self.left:
            return
        self.report("done", digest=digest)
        self.meet(store, "done")
        dist.destroy_process_group()
        if hosts:  # the others may still be leaving
            store.wait([f"left/{other}" for other in range(1, self.trial.ranks)])
        else:
            store.set(f"left/{self.rank}", "")

    def meet(self, store: dist.Store, name: str) -> None:
        """Wait for all ranks, however long the victim of a harmless fault takes."""
        store.set(f"{name}/{self.rank}", "")
        keys = [f"{name}/{other}" for other in range(self.trial.ranks)]
        store.wait(keys, datetime.timedelta(seconds=LONGEST_LIFE))

    def train(self) -> str:
        if self.trial.checkpoints:
            return restarts.train(self)
        self.enter("construction")
        running = TRAINERS[self.trial.trainer]()
        if self.trial.what.phase == "join":
            with running.trainer.join():
                for step in range(STEPS - 5 * self.trial.ranks + 5 * self.rank):
                    self.step = step
                    self.enter("join", running)
                    running.step()
            return digest_of(self.trial.trainer, running)
        for step in range(STEPS):
            self.step = step
            if self.step == self.trial.step:
                self.call_the_phase(running)
            if self.left:
                return ""
            if self.slow:
                time.sleep(self.trial.what.seconds or 0)
            if self.trial.what.kind == "cut":
                time.sleep(0.02)  # cutting takes longer than a step
            running.step()
        self.enter("flush")
        running.finish()
        return digest_of(self.trial.trainer, running)

    def call_the_phase(self, running: Running) -> None:
        """Call what the phase has ranks call together; on the victim, the fault strikes first."""
        phase = self.trial.what.phase
        if phase == "step":
            self.enter(phase, running)
        elif phase == "consensus":
            self.enter(phase)
            with running.trainer.consensus():
                pass
        elif phase in ("state_dict", "load_state_dict"):
            if is_pipeline(self.trial.trainer):
                running.finish()
            if phase == "state_dict":
                self.enter(phase)
            saved = running.state.state_dict()
            if phase == "load_state_dict":
                self.enter(phase)
                running.state.load_state_dict(saved)

    def enter(self, phase: str, running: Running | None = None) -> None:
        """Let the fault strike, if it is this rank's and this phase's, and it is time."""
        trial, what = self.trial, self.trial.what
        if phase != what.phase or self.rank != trial.victim:
            return
        if phase == "join" and self.step != trial.step:
            return
        if what.kind in ("kill", "stop"):
            number = signal.SIGKILL if what.kind == "kill" else signal.SIGSTOP
            if phase in ("step", "construction"):
                threading.Timer(trial.delay, self.send_signal, [number]).start()
            else:
                self.send_signal(number)
            return
        self.report("fault")
        if what.kind == "raise":
            for module in modules_of(trial.trainer, running):
                module.register_forward_pre_hook(raise_user_error)
        elif what.kind == "exit":
            sys.exit(0)
        self.slow = what.kind == "sleep"
        self.left = what.kind == "return"

    def send_signal(self, number: int) -> None:
        self.report("fault")
        os.kill(os.getpid(), number)


def raise_user_error(module: nn.Module, inputs: object) -> None:
    raise UserError("a mistake in the user's code")


def modules_of(trainer: str, running: Running) -> list[nn.Module]:
    """Return what this rank calls in a step."""
    if is_pipeline(trainer):
        return [stage.module for stage in running.trainer.stages]
    if trainer == "SubnetTrainer":
        return [running.trainer.module]
    return [running.trainer]


def digest_of(trainer: str, running: Running) -> str:
    if trainer == "SubnetTrainer":
        with running.trainer.full_model() as module:
            return checksum(list(module.parameters()))
    parameters = chain.from_iterable(each.parameters() for each in modules_of(trainer, running))
    return checksum([each.to_local() if isinstance(each, DTensor) else each for each in parameters])


def host_store(place: Rendezvous, log: Path) -> None:
    """Host the store, as torchrun does, until this process is killed."""
    detach(log)
    place.enter(0)
    store = dist.TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
    while store:
        signal.pause()


def detach(log: Path) -> None:
    """Make this process the leader of a session, and write its output to a file."""
    os.setsid()
    end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def serve() -> Rank | None:
    """Fork the ranks of each trial and report how they end; return a rank in its own process."""
    reports = os.fdopen(os.dup(1), "w")
    report = functools.partial(print, file=reports, flush=True)
    gc.freeze()  # what is forked stays: an interpreter's last collection is fast
    report(json.dumps({"event": "ready"}))
    for line in sys.stdin:
        job = json.loads(line)
        trial, place = Trial(**job["trial"]), Rendezvous(**job["place"])
        folder = Path(job["folder"])
        host = None
        if not trial.what.hosts_store:
            host = os.fork()
            if not host:
                host_store(place, folder / "store")
        processes = {}
        for rank in range(trial.ranks):
            process = os.fork()
            if not process:
                return Rank(trial, place, rank, folder / f"rank-{rank}", reports)
            processes[process] = rank
        report(json.dumps({"event": "started", "processes": list(processes)}))
        while processes:
            process, status = os.wait()
            if process in processes:
                ended = {"event": "ended", "rank": processes.pop(process)}
                ended["status"] = os.waitstatus_to_exitcode(status)
                report(json.dumps({**ended, "time": time.monotonic()}))
        if host:
            os.kill(host, signal.SIGKILL)
            os.waitpid(host, 0)
        report(json.dumps({"event": "over"}))
    return None


if __name__ == "__main__":
    end_with_parent()
    if own := serve():
        own.live()
