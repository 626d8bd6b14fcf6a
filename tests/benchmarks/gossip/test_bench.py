"""The parts of the gossip benchmark that are no measurement, and its ranks."""

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.gossip import trainers
from benchmarks.gossip.models import SleepingCompute
from benchmarks.harness.link import limited_links, read_sent
from benchmarks.harness.ranks import run_on_loopback, run_ranks


def test_the_hidden_fraction_is_of_the_shorter():
    seconds = {"compute alone": [0.3], "round alone": [0.2], "SGP": [0.3]}
    assert trainers.hidden_fraction(seconds, "SGP") == pytest.approx(1)
    assert trainers.hidden_fraction({**seconds, "SGP": [0.5]}, "SGP") == pytest.approx(0)


def test_random_stragglers_are_the_same_for_all_methods_and_about_a_tenth():
    places = [(rank, 0, step) for rank in range(4) for step in range(500)]
    factors, again = (
        [trainers.factor(trainers.AT_RANDOM, *each) for each in places] for _ in range(2)
    )
    assert factors == again
    assert set(factors) == {1, trainers.SLOWER}
    assert 0.07 < factors.count(trainers.SLOWER) / len(factors) < 0.13
    slow = [trainers.factor(trainers.ONE_SLOW, rank, 0, 0) for rank in range(4)]
    assert slow == [1, 1, 1, trainers.SLOWER]
    assert trainers.factor(trainers.EVEN, 3, 0, 0) == 1


def fail_on_rank_one(rank):
    if rank == 1:
        raise ValueError("failure of rank 1")
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_error():
    with pytest.raises(RuntimeError, match=r"rank 1: [\s\S]*failure of rank 1"):
        run_on_loopback(2, 60, fail_on_rank_one)


def test_sent_bytes_are_read_off_the_link(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = read_sent()
    assert read_sent() >= before >= 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-link")
    with pytest.raises(RuntimeError, match="no network interface no-such-link"):
        read_sent()


def list_interfaces(rank):
    return sorted(os.listdir("/sys/class/net")), os.readlink("/proc/thread-self/ns/net")


@pytest.mark.slow  # two runs of ranks
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None,
    reason="limited links need root and iproute2's tc",
)
def test_ranks_on_limited_links_train_and_leave_nothing_behind():
    before = set(os.listdir("/sys/class/net"))
    compute = SleepingCompute(layers=2, width=64, seconds=0.01)
    with limited_links(2, 500) as place:
        namespaces = [answer[1] for answer in run_ranks(2, place, 90, list_interfaces)]
        seconds, _ = run_ranks(2, place, 90, trainers.measure_steps, compute, 1, 1)
        holders = [int(name.split("/")[2]) for name in place.namespaces]
    assert len({*namespaces, os.readlink("/proc/self/ns/net")}) == 3
    assert set(seconds) == {*(method.name for method in trainers.METHODS), trainers.ROUND_ALONE}
    assert set(os.listdir("/sys/class/net")) == before
    assert not any(Path(f"/proc/{holder}").exists() for holder in holders)
