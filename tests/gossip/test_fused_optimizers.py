"""GossipDataParallel with ``pyparallel.optim``: the same training, in fewer passes."""

import io
from contextlib import nullcontext

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel, optim
from pyparallel.comm import PeerError
from pyparallel.gossip import SGP, GossipState
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum import PushSum
from pyparallel.gossip.topology import Complete, FromGraph, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.every_algorithm import DETERMINISTIC, EVERY_ALGORITHM
from tests.local_transport import LocalRun
from tests.ops.op_counter import OpCounter
from tests.workers import assert_equal_on_all_ranks, on_ranks

IRREGULAR = FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)]))
SMALL_BUCKETS = 0.0005  # MiB: several for each parameter group
OPTIMIZERS = {
    "AdamW": {"lr": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
}


def project(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.2, 0.2)


def step_and_project(optimizer, closure=None):
    super(type(optimizer), optimizer).step(closure)
    project(optimizer)


class Loop:
    """A user's loop with two parameter groups."""

    def __init__(
        self, package, algorithm, name="AdamW", mode="plain", bucket_cap_mb=SMALL_BUCKETS, **options
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        kind = getattr(package, name)
        if mode == "subclass":
            kind = type("Projected", (kind,), {"step": step_and_project})
        self.optimizer = kind(groups, **{**OPTIMIZERS[name], **options})
        if mode == "hook":
            self.optimizer.register_step_post_hook(project)
        self.model = GossipDataParallel(
            model, self.optimizer, algorithm, bucket_cap_mb=bucket_cap_mb
        )
        self.ops = OpCounter("mul_", "div_", "copy_")
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def backward(self, scale=1.0):
        self.optimizer.zero_grad()
        x = torch.randn(8, 8, generator=self.generator)
        loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True)) * scale
        self.model.record_loss(loss)
        loss.backward()
        return loss

    def train(self, steps, mode="plain"):
        for step in range(steps):
            skip = self.model.no_sync() if mode == "no_sync" and step % 3 == 1 else nullcontext()
            with skip, self.ops:
                if mode == "closure":
                    self.optimizer.step(self.backward)
                else:
                    self.backward()
                    self.optimizer.step()

    def values(self):
        self.model.flush()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def end(self):
        values = self.values().clone()
        self.model.close()
        return values


def equals_torchs(rank, algorithm, name, mode):
    ends = []
    for package in (torch.optim, optim):
        loop = Loop(package, algorithm, name, mode)
        loop.train(6, mode)
        ends.append(loop.end())
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


EVERY_ORDER = [
    (SGP(Ring(4)), "SGD", "closure"),
    (SGP(IRREGULAR), "AdamW", "no_sync"),
    (SGP(OnePeerExponential(4), overlap=1), "Adam", "no_sync"),
    (SGP(IRREGULAR, overlap=1), "SGD", "closure"),
    (SGP(Ring(4), overlap=2), "AdamW", "closure"),
    (SGP(IRREGULAR, overlap=3), "Adam", "no_sync"),
    # What writes weights after the update is in the message.
    (SGP(Ring(4)), "AdamW", "hook"),
    (SGP(Ring(4), overlap=1), "SGD", "subclass"),
    (SGP(OnePeerExponential(4), overlap=2), "AdamW", "hook"),
]
ALL = [(EVERY_ALGORITHM[name](4), "AdamW", "plain") for name in DETERMINISTIC]
UNCOMPRESSED = [row for row in ALL if getattr(row[0], "compressor", None) is None]


HOOKED = [(algorithm, name, "hook") for algorithm, name, _ in UNCOMPRESSED]


@pytest.mark.parametrize("rows", [slow(UNCOMPRESSED + HOOKED), EVERY_ORDER], ids=["all", "orders"])
def test_training_is_that_of_torchs_optimizers(ranks, rows):
    ranks.run_each(4, equals_torchs, rows)


@on_ranks(4)
def test_a_step_is_one_op_a_bucket(rank):
    for algorithm, ops_of_a_step in [
        (SGP(Ring(4)), ["adamw_step_", "mix_"]),
        (SGP(Ring(4), overlap=1), ["adamw_step_"]),
        (SGP(OnePeerExponential(4), overlap=2), ["adamw_step_"]),
    ]:
        loop = Loop(optim, algorithm)
        loop.train(2)
        loop.ops.calls.clear()
        loop.train(6)
        num_buckets = len(loop.model._buckets.buffers)
        assert num_buckets > 2
        assert loop.ops.calls == dict.fromkeys(ops_of_a_step, 6 * num_buckets), algorithm
        loop.end()


@on_ranks(3)
def test_a_state_in_flight_follows_parameters_into_other_buckets(rank):
    for overlap, saves, loads in (
        (1, torch.optim, optim),
        (3, optim, torch.optim),
        (3, optim, optim),
    ):
        loop = Loop(saves, SGP(Ring(3), overlap=overlap))
        loop.train(4)
        file = io.BytesIO()
        torch.save(GossipState(loop.model, loop.optimizer).state_dict(), file)
        file.seek(0)
        other = Loop(loads, SGP(Ring(3), overlap=overlap))
        state = torch.load(file)
        GossipState(other.model, other.optimizer).load_state_dict(state)
        other.generator.set_state(loop.generator.get_state())
        loop.train(4)
        other.train(4)
        difference = float((loop.end() - other.end()).abs().max())
        assert difference == 0 if saves is loads else difference < 1e-6


def scale(rank):
    loop = Loop(optim, SGP(Complete(2), overlap=0), bucket_cap_mb=25)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    rounds = []
    for step in range(4):
        loop.backward()
        gradients = [p.grad for p in loop.model.parameters()]
        for gradient in gradients:
            gradient.mul_(scaler.get_scale())
        scaler.scale(torch.ones(()))  # creates the scale
        if step == 2 and rank == 0:
            gradients[0].fill_(torch.inf)
        before = loop.values().clone()
        scaler.step(loop.optimizer)
        scaler.update()
        rounds.append((float((loop.values() - before).abs().max()), scaler.get_scale()))
    counts = {float(state["step"]) for state in loop.optimizer.state.values()}
    return loop.end(), rounds, counts


def test_a_step_that_amp_skips_still_takes_its_round(ranks):
    (own, rounds, counts), (other, _, others) = ranks.run(2, scale)
    torch.testing.assert_close(own, other)  # a complete round ends every step
    assert own.isfinite().all()
    assert all(change > 0 for change, _ in rounds)
    assert rounds[2][1] == rounds[1][1] / 2
    assert counts == {3.0}
    assert others == {4.0}


@on_ranks(2)
def test_mistakes_end_no_run(rank):
    loop = Loop(optim, SGP(Ring(2)))
    loop.train(1)
    errors = []
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    loop.backward()
    with pytest.raises(RuntimeError, match="must train the parameters it had") as error:
        loop.optimizer.step()
    errors.append(str(error.value))
    del loop.optimizer.param_groups[-1]
    parameter = next(loop.model.parameters())
    view, parameter.data = parameter.data, parameter.data.clone()
    with pytest.raises(RuntimeError, match="must stay views of their flat buffers") as error:
        loop.optimizer.step()
    errors.append(str(error.value))
    parameter.data = view
    gradient, parameter.grad = parameter.grad, torch.zeros(16, 8).to_sparse()
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        loop.optimizer.step()
    parameter.grad = gradient
    loop.train(2)  # nothing was lost, and no rank waits
    loop.end()
    loop.optimizer.step()  # alone again
    assert_equal_on_all_ranks(errors)


@on_ranks(2)
def test_another_kind_of_optimizer_on_a_rank_is_an_error_on_all(rank):
    groups = {"lr": 0.01} if rank else {"lr": 0.01, "foreach": None}
    package = optim if rank else torch.optim
    with pytest.raises(ValueError, match="buckets"):
        Loop(package, SGP(Ring(2)), **groups)


class FailingExchange(NeighborExchange):
    """An exchange whose second message never arrives."""

    def __init__(self):
        super().__init__(LocalRun(0, 2))
        self.started = 0

    def start(self, sends, receives):
        self.started += 1
        receives[0].tensor.copy_(sends[0].tensor)  # the neighbor's header is like the own one
        return self if self.started == 2 else Arrived()

    def wait(self, kind=None):
        raise PeerError("rank 1 died")


class Arrived:
    def wait(self, kind=None):
        pass


def test_a_step_is_complete_when_a_neighbor_fails():
    buffers = [torch.ones(64), torch.ones(64), torch.ones(64)]
    averager = PushSum.of_dense(buffers, FailingExchange(), Ring(2), overlap=1)
    averager.send()
    steps = []

    def step_bucket(index, *, mass, messages, masses, message):
        steps.append((index, len(messages), float(mass)))
        if messages:
            mass.fill_(1)  # as after the average

    for _ in range(2):  # later steps are complete, too, and raise the same error
        with pytest.raises(PeerError, match="rank 1 died"):
            averager.step_buckets(step_bucket, 3)
    assert [index for index, _, _ in steps] == [0, 1, 2, 0, 1, 2]
    assert [count for _, count, _ in steps[:3]] == [1, 0, 1]
    assert steps[1][2] == 1  # the mass that was sent has come back
