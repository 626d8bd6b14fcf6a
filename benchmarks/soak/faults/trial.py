"""One trial: its processes, their fault, and what each of them ended with."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.link import Rendezvous, limited_links, loopback, set_link
from benchmarks.soak.faults.plan import TIMEOUT, Trial

GRACE = TIMEOUT + 5.0  # seconds after the timeout in which a survivor must have ended
# gloo waits so long for a member that dies after it has published its address.
CONNECT_TIMEOUT = 5 * TIMEOUT
LONGEST_START = 60.0  # seconds
LONGEST_RUN = 60.0  # of a run that goes on to its end
MBIT_PER_S = 1000
SECONDS_OF_STACKS = 2  # in which a rank prints them
LINES_OF_LOG = 60
HUNG = -1000  # no signal has this number


@dataclass
class End:
    """How a rank of a trial ended."""

    # Exit status; negative: a signal; None: it was still there, and was killed
    status: int | None = None
    error: tuple[str, str] | None = None  # class and text of what it raised; None: nothing
    seconds: float = 0.0  # from the fault to the error
    ended: float = 0.0  # from the fault to the end of the process, in seconds
    digest: str | None = None
    log: str = ""  # the end of its output, with the stacks if it was still there


@dataclass
class Outcome:
    """The ends of all ranks of a trial."""

    ends: list[End]
    left: int = 0  # number of other processes that they left
    struck: bool = False
    begun: float = 0.0  # when the last rank began to take steps, if it reports that
    struck_at: float = 0.0


class Server:
    """A warm process that forks the ranks of one trial after another."""

    def __init__(self) -> None:
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.faults.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            start_new_session=True,  # an interrupt is this process's
        )

    def begin(self, trial: Trial, place: Rendezvous, folder: str) -> None:
        job = {"trial": asdict(trial), "place": asdict(place), "folder": folder}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, or None if there is none for so long.

        Raises:
            RuntimeError: the process has ended.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            found = os.read(self._process.stdout.fileno(), 65536)
            if not found:
                raise RuntimeError("the process that starts the ranks has ended")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """End the process, and with it all ranks; a trial that runs raises."""
        self._process.kill()

    def close(self) -> None:
        with self._process:
            self.kill()


@dataclass
class Watch:
    """What is known of a trial while it runs."""

    trial: Trial
    place: Rendezvous
    processes: list[int] = field(default_factory=list)
    outcome: Outcome = field(init=False)
    running: set[int] = field(default_factory=set)
    struck_at: float | None = None
    heals_at: float | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + LONGEST_START)
    stopped: bool = False  # the victim, until the others have ended
    over: bool = False

    def __post_init__(self) -> None:
        self.outcome = Outcome([End() for _ in range(self.trial.ranks)])

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                self.processes = event["processes"]
                self.running = set(range(self.trial.ranks))
            case "begun":
                self.outcome.begun = event["time"]
            case "fault":
                self.strike(event["time"])
            case "error":
                end = self.outcome.ends[event["rank"]]
                end.error = event["type"], event["text"]
                end.seconds = event["time"] - (self.struck_at or event["time"])
            case "done":
                self.outcome.ends[event["rank"]].digest = event["digest"]
            case "ended":
                self.running.discard(event["rank"])
                end = self.outcome.ends[event["rank"]]
                end.ended = event["time"] - (self.struck_at or event["time"])
                if end.status != HUNG:
                    end.status = event["status"]
            case "over":
                self.over = True

    def strike(self, at: float) -> None:
        what = self.trial.what
        if what.kind == "cut":
            set_link(self.place, self.trial.victim, "down")
            at = time.monotonic()
        self.struck_at = self.outcome.struck_at = at
        self.outcome.struck = True
        timeout = CONNECT_TIMEOUT if what.phase == "construction" else TIMEOUT
        self.deadline = at + (LONGEST_RUN if what.harmless else timeout + GRACE)
        if what.kind in ("stop", "cut") and what.seconds is not None:
            self.heals_at = at + what.seconds
        self.stopped = what.kind == "stop" and what.seconds is None

    def tick(self) -> None:
        """Undo a fault whose time has come, and end ranks that are past the deadline."""
        now = time.monotonic()
        if self.heals_at is not None and now >= self.heals_at:
            self.heals_at = None
            self.heal()
        if self.stopped and self.running <= {self.trial.victim}:
            # What it waited for is gone: it must end as the others have.
            self.stopped = False
            self.deadline = now + TIMEOUT + GRACE
            self.heal()
        if now >= self.deadline and self.processes:
            self.end_hung()
            self.deadline = now + LONGEST_START

    def heal(self) -> None:
        """Let a stopped victim continue, or connect it again."""
        if self.trial.what.kind == "cut":
            set_link(self.place, self.trial.victim, "up")
        elif self.trial.victim in self.running:
            _signal(self.processes[self.trial.victim], signal.SIGCONT)

    def end_hung(self) -> None:
        """Have ranks that should have ended print their stacks, and kill all."""
        for rank in self.running:
            if rank != self.trial.victim or not self.stopped:
                self.outcome.ends[rank].status = HUNG
                _signal(self.processes[rank], signal.SIGABRT)
        time.sleep(SECONDS_OF_STACKS)
        for rank in self.running:
            _signal(self.processes[rank], signal.SIGKILL)


def run_trial(trial: Trial, server: Server) -> Outcome:
    """Run a trial to its end.

    Raises:
        RuntimeError: the server has ended, or a cut link needs network namespaces, which this
            machine refuses.
    """
    cuts = trial.what.kind == "cut"
    network = limited_links(trial.ranks, MBIT_PER_S) if cuts else loopback()
    with tempfile.TemporaryDirectory() as folder, network as place:
        watch = Watch(trial, place)
        server.begin(trial, place, folder)
        while not watch.over:
            event = server.read(0.02)
            if event:
                watch.take(event)
            watch.tick()
        watch.outcome.left = end_leftovers(set(watch.processes))
        for rank, end in enumerate(watch.outcome.ends):
            log = Path(folder, f"rank-{rank}")
            if end.status == HUNG:
                end.status = None
            if log.exists():
                end.log = "\n".join(log.read_text(errors="replace").splitlines()[-LINES_OF_LOG:])
        return watch.outcome


def end_leftovers(sessions: set[int]) -> int:
    """Kill and count the processes of sessions whose leaders, the ranks, have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, *fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) in sessions and state != "Z":
                found.append(int(path.parent.name))
    for process in found:
        _signal(process, signal.SIGKILL)
    return len(found)


def _signal(process: int, number: int) -> None:
    """Send a signal; nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
