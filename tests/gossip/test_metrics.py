"""What GossipDataParallel.metrics() returns, against values computed in other ways."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import optim
from pyparallel.gossip import OSGP, SGP
from pyparallel.gossip.topology import OnePeerExponential
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import build_model, flat, start, step, wrap

NAMES = {"bytes_sent", "waiting_seconds", "hidden_seconds", "staleness", "push_sum_weight"}
NAMES |= {"bits_per_parameter", "steps", "skipped_steps"}
HEADER_BYTES = 64
MESSAGE_BYTES = 4 * 4 * 64  # of loops.build_model: four parameters, each padded to 64 elements


def steps_of(wrapped, optimizer, model, num_steps, spoil=lambda index: False):
    for index in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(5, 6)
        wrapped(inputs).square().mean().backward()
        if spoil(index):
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()


def counted(rank):
    found = {}
    model, optimizer, wrapped = start(SGP(StarWithChords(3)))
    found["first"] = wrapped.metrics()
    steps_of(wrapped, optimizer, model, 4)
    found["irregular"] = wrapped.metrics(consensus_distance=True)
    found["vector"] = flat(model).clone()
    for name, algorithm in [
        ("overlap 0", SGP(OnePeerExponential(3))),
        ("overlap 1", SGP(OnePeerExponential(3), overlap=1)),
        ("overlap 3", SGP(OnePeerExponential(3), overlap=3)),
        ("osgp", OSGP(OnePeerExponential(3))),
        ("osgp 3", OSGP(OnePeerExponential(3), 3)),
    ]:
        for make in (torch.optim.SGD, optim.SGD):
            model, optimizer, wrapped = start(algorithm, make)
            steps_of(wrapped, optimizer, model, 8)
            found[name, make] = wrapped.metrics()["rank/staleness"]
    # Rank 1 has a nan in two of five steps: it skips them, and takes their rounds.
    model = build_model()
    wrapped, optimizer = wrap(SGP(OnePeerExponential(3)), model, nonfinite="skip")
    steps_of(wrapped, optimizer, model, 5, lambda index: rank == 1 and index in (1, 3))
    found["skipped"] = wrapped.metrics()
    model, optimizer, wrapped = start(SGP(OnePeerExponential(3)))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for index in range(3):
        optimizer.zero_grad()
        scaler.scale(wrapped(torch.randn(5, 6)).square().mean()).backward()
        if index == rank:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    found["scaled"] = wrapped.metrics()
    wrapped.close()
    with pytest.raises(RuntimeError, match="must not be used after close"):
        wrapped.metrics()
    return found


def test_counts_weight_and_distance(ranks, subtests):
    results = ranks.run(3, counted)
    shares = torch.tensor(  # of column's mass to row: an equal part to each out-peer and to itself
        [[1 / 3, 1 / 3, 1 / 2], [1 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 2]], dtype=torch.float64
    )
    weights = torch.linalg.matrix_power(shares, 4) @ torch.ones(3, dtype=torch.float64)
    vectors = torch.stack([found["vector"].double() for found in results])
    mean = (weights[:, None] * vectors).sum(0) / 3
    distance = float((vectors - mean).square().sum(1).mean().sqrt())
    for rank, found in enumerate(results):
        assert found["first"].keys() == {f"rank/{name}" for name in NAMES}
        assert all(type(value) is float for value in found["first"].values())
        assert sum(found["first"].values()) == 1  # the weight
        irregular = found["irregular"]
        num_messages = (2, 2, 1)[rank] * 4
        assert irregular["rank/bytes_sent"] == num_messages * (MESSAGE_BYTES + HEADER_BYTES)
        assert irregular["rank/push_sum_weight"] == pytest.approx(float(weights[rank]), rel=1e-12)
        assert irregular["rank/steps"] == 4
        assert 0 < irregular["consensus_distance"] == pytest.approx(distance, rel=1e-6)
        expected = {"overlap 0": 0, "overlap 1": 1, "overlap 3": 3, "osgp": 1, "osgp 3": 3}
        for (name, make), staleness in ((k, v) for k, v in found.items() if isinstance(k, tuple)):
            with subtests.test(name=name, make=make, rank=rank):
                assert staleness == expected[name]
        assert found["scaled"]["rank/steps"] == 3
        assert found["scaled"]["rank/skipped_steps"] == 1
        assert found["skipped"]["rank/steps"] == 5
        assert found["skipped"]["rank/skipped_steps"] == (2 if rank == 1 else 0)


WAITING = [  # one of each kind of message and collective
    "sgp-overlap-1", "noloco", "leadersgd", "adpsgd", "allreduce",
]  # fmt: skip


def with_a_slow_rank(rank):
    """Sleep on rank 0 before a step in which all algorithms communicate; return two steps' waits.

    With overlap the messages of that step are waited for in the next one.
    """
    found = {}
    for name in WAITING:
        model, optimizer = wrap(EVERY_ALGORITHM[name](4), nn.Linear(4, 2))
        waited = []
        for index in range(13):
            if index == 11:  # the 12th step: intervals are 2, 3 and 4
                dist.barrier()
                time.sleep(0.3 if rank == 0 else 0)
            model.record_loss(1.0)
            step(model, optimizer)
            waited.append(model.metrics()["rank/waiting_seconds"])
        found[name] = sum(waited[11:])
        model.flush()
    return found


def test_waiting_is_measured_where_a_rank_waits(ranks, subtests):
    slow, *others = ranks.run(4, with_a_slow_rank)
    for name in WAITING:
        with subtests.test(name=name):
            longest = max(found[name] for found in others)
            if name == "adpsgd":  # stragglers do not block other ranks
                assert longest < 0.2
            else:
                assert 0.2 < longest < 5
            assert 0 <= slow[name] < 0.2
