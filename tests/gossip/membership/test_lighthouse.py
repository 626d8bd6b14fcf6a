"""Real processes under torchft's lighthouse: they die in any way, and others take their place."""

import signal
import socket
import time

import pytest
from torch.distributed import TCPStore

from pyparallel.gossip import Lighthouse
from pyparallel.gossip.membership import epochs
from tests.gossip.membership.processes import Job, start_lighthouse

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow

NAMES = ["r0", "r1", "r2", "r3"]


@pytest.fixture
def lighthouse():
    process, address = start_lighthouse()
    yield process, address
    process.kill()
    process.join()


@pytest.fixture
def job(tmp_path, lighthouse):
    job = Job(tmp_path, lighthouse[1])
    yield job
    job.close()


def without(name):
    return [each for each in NAMES if each != name]


def lost(job, name="r0"):
    return job.last_change(name)["lost"]


def test_members_end_in_every_way_and_come_back(job):
    for name in NAMES:
        job.start(name)
    job.wait_for_members(NAMES, 120)
    job.wait_for_steps(NAMES)

    job.signal("r1", signal.SIGKILL)
    job.wait_for_members(without("r1"))
    assert 0 < lost(job) < 0.5
    job.wait_for_steps(without("r1"))
    job.start("r1")
    job.wait_for_members(NAMES)
    assert lost(job) == 0

    job.signal("r2", signal.SIGSTOP)  # its connections stay open
    job.wait_for_members(without("r2"))
    job.wait_for_steps(without("r2"))
    job.signal("r2", signal.SIGCONT)  # it finds that it was left behind, and joins
    job.wait_for_members(NAMES)
    job.wait_for_steps(NAMES)

    for ending, code in (("raise", 1), ("exit", 3)):
        (job.folder / f"r3.{ending}").touch()
        job.processes["r3"].join(30)
        assert job.processes["r3"].exitcode == code
        job.wait_for_members(without("r3"))
        job.start("r3")
        job.wait_for_members(NAMES)

    job.signal("r0", signal.SIGTERM)  # what it has goes to another one
    job.processes["r0"].join(30)
    assert job.processes["r0"].exitcode == -signal.SIGTERM
    job.wait_for_members(without("r0"))
    assert lost(job, "r1") == 0

    job.end()
    for name in without("r0"):
        last = job.rows(name)[-2]
        assert job.processes[name].exitcode == 0, job.report()
        assert last["finite"]
        assert last["accuracy"] > 0.8


def test_training_goes_on_without_the_lighthouse(job, lighthouse):
    process, address = lighthouse
    for name in NAMES[:3]:
        job.options["start"] = 3
        job.start(name)
    job.wait_for_members(NAMES[:3], 120)
    process.kill()
    process.join()
    time.sleep(2)
    job.wait_for_steps(NAMES[:3], 30)
    again, _ = start_lighthouse(address.removeprefix("http://"))
    job.start("r3")
    job.wait_for_members(NAMES)
    job.signal("r1", signal.SIGKILL)
    job.wait_for_members(without("r1"))
    job.end()
    assert all(job.processes[name].exitcode == 0 for name in without("r1")), job.report()
    again.kill()
    again.join()


def test_a_lighthouse_that_nobody_runs_is_one_sentence(monkeypatch):
    monkeypatch.setattr(epochs, "_SILENCE_SECONDS", 0.1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket() as bound:  # its port is nobody else's, and nobody listens
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        found = epochs.Epochs(Lighthouse(f"http://127.0.0.1:{port}", name="r0"), store, [])
        sentence = (
            r"r0: the membership's service has not responded .*; waiting for it: check that the "
            f"lighthouse runs at http://127.0.0.1:{port}, which PYPARALLEL_LIGHTHOUSE sets, and "
            f"that `nc -vz 127.0.0.1 {port}` reaches it from this host"
        )
        with pytest.raises(UserWarning, match=sentence):
            found.next()
        found.close()
