"""Processes that train on digits under a lighthouse, and can be killed, stopped and started."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, Lighthouse
from tests.workers import _CONTEXT


def load_digits():
    """Return images and labels, a sixth of them held out."""
    from sklearn.datasets import load_digits as load

    images, labels = (torch.tensor(each) for each in load(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images.float()[order] / 16, labels[order]


def train(name, folder, address, options):
    """Train until the file "stop" exists; each step and change is a line of the log."""
    log = os.open(Path(folder, f"{name}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    lines = Path(folder, f"{name}.log").open("a", buffering=1)  # noqa: SIM115  until the end

    def write(**row):
        lines.write(json.dumps(row | {"time": time.time(), "pid": os.getpid()}) + "\n")

    begin = time.monotonic()
    membership = Lighthouse(
        address,
        name=name,
        start=options["start"],
        deadline=options["deadline"],
        on_change=lambda change: write(change=vars(change), seconds=time.monotonic() - begin),
    )
    images, labels = torch.load(Path(folder, "digits.pt"))
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    trainer = GossipDataParallel(module, optimizer, SGP(), membership=membership)
    index = 0
    while not Path(folder, "stop").exists():
        begin = time.monotonic()
        time.sleep(options["sleep"])
        batch = torch.randint(1500, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trainer(images[batch]), labels[batch]).backward()
        optimizer.step()
        index += 1
        if Path(folder, f"{name}.raise").exists():
            Path(folder, f"{name}.raise").unlink()
            raise KeyError("a user's error")
        if Path(folder, f"{name}.exit").exists():
            Path(folder, f"{name}.exit").unlink()
            sys.exit(3)
        write(step=index, seconds=time.monotonic() - begin, epoch=trainer.epoch)
    with torch.no_grad():
        accuracy = (module(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    usage = Path("/proc/self/statm").read_text().split()
    write(
        accuracy=float(accuracy),
        weight=float(trainer.push_sum_weight),
        finite=bool(torch.isfinite(torch.cat([p.flatten() for p in module.parameters()])).all()),
        descriptors=len(os.listdir("/proc/self/fd")),
        megabytes=int(usage[1]) * 4096 / 2**20,
        threads=len(os.listdir("/proc/self/task")),
    )
    trainer.leave()
    write(left=True)


class Job:
    """Processes by name, and their logs."""

    def __init__(self, folder, address, *, start=4, deadline=5.0, sleep=0.02):
        self.folder, self.address = Path(folder), address
        self.options = {"start": start, "deadline": deadline, "sleep": sleep}
        self.processes = {}
        torch.save(load_digits(), self.folder / "digits.pt")

    def start(self, name):
        process = _CONTEXT.Process(
            target=train, args=(name, str(self.folder), self.address, self.options), daemon=True
        )
        process.start()
        self.processes[name] = process

    def signal(self, name, number):
        os.kill(self.processes[name].pid, number)

    def rows(self, name):
        path = self.folder / f"{name}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last_change(self, name):
        changes = [row["change"] for row in self.rows(name) if "change" in row]
        return changes[-1] if changes else {"members": [], "epoch": 0}

    def wait_for(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.report()}"
            time.sleep(0.05)

    def wait_for_members(self, names, seconds=60):
        """Wait until all these, and no others, are members."""
        names = sorted(names)
        self.wait_for(
            lambda: all(self.last_change(name)["members"] == names for name in names),
            f"members {names}",
            seconds,
        )

    def wait_for_steps(self, names, number=5):
        """Wait until these have taken more steps in a row."""
        before = {name: len(self.rows(name)) for name in names}
        self.wait_for(
            lambda: all(len(self.rows(name)) >= before[name] + number for name in names), "steps"
        )

    def report(self):
        found = {}
        for name, process in self.processes.items():
            out = self.folder / f"{name}.out"
            tail = out.read_text()[-1500:] if out.exists() else ""
            found[name] = (process.exitcode, self.last_change(name), tail)
        return "\n".join(f"{name}: {each}" for name, each in found.items())

    def end(self):
        (self.folder / "stop").touch()
        for process in self.processes.values():
            process.join(60)

    def close(self):
        for process in self.processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()


def serve_at(bind, pipe):
    """Host a lighthouse in a process of its own."""
    server = Lighthouse.serve(bind)
    pipe.send(server.address())
    signal.pause()


def start_lighthouse(bind="127.0.0.1:0"):
    """Start a process with a lighthouse; return it and its address."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=serve_at, args=(bind, sender), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{receiver.recv().rpartition(':')[2]}"
