"""What the library keeps beside the parameters, and legal acts that change the parameters alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.compression import ErrorFeedback, Int8, TopK
from pyparallel.gossip import (
    EASGD,
    OSGP,
    SGP,
    DiLoCo,
    Hierarchical,
    LocalSGD,
    NoLoCo,
    SlowMo,
)
from pyparallel.gossip.topology import OnePeerExponential, RandomMatching, Star
from tests.cases import slow
from tests.gossip.loops import batches, build_model, flat
from tests.workers import on_ranks

# ---------------------------------------------------------- the numerator, of an optimizer's copies


class ScheduleFree(torch.optim.SGD):
    """Keeps weights of its own: what it trains is between them and their average."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                fast, k = state.setdefault("fast", p.clone()), state.get("k", 0) + 1
                state["k"] = k
                p.lerp_(fast, 1 / k).sub_(p.grad, alpha=group["lr"] * (0.1 + 0.9 / k))
                fast.sub_(p.grad, alpha=group["lr"])


class Lookahead(torch.optim.SGD):
    """Goes on from halfway between its own copy and the parameters in every second step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            slow_copy, k = state.setdefault("slow", p.clone()), state.get("k", 0) + 1
            state["k"] = k
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            if k % 2 == 0:
                p.copy_(slow_copy.lerp_(p, 0.5))


def asgd(parameters, lr):
    return torch.optim.ASGD(parameters, lr=lr, t0=0)


def adafactor(parameters, lr):
    return torch.optim.Adafactor(parameters, lr=lr)


KINDS = (torch.optim.SGD, ScheduleFree, Lookahead, asgd, adafactor)


def see_debiased(rank, kind, algorithm):
    """Take steps of rate 0 of equal ranks, in which nothing must move, not even for a hook."""
    model, seen = build_model(torch.float64), []
    start = flat(model).clone()
    optimizer = kind(model.parameters(), lr=0.0)

    def look(*_):
        seen.append(float((flat(model) - start).abs().max()))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    trainer = GossipDataParallel(model, optimizer, algorithm)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for inputs, targets in batches(0, 5, dtype=torch.float64):
        optimizer.zero_grad()
        nn.functional.mse_loss(trainer(inputs), targets).backward()
        optimizer.step()
    copies = [
        (value - p).abs().max()
        for p in model.parameters()
        for name, value in optimizer.state[p].items()
        if name in ("fast", "slow", "ax")
    ]
    assert len(seen) == 20
    assert max(seen) < 1e-15
    assert max(copies, default=0) < 1e-15
    assert float(trainer.push_sum_weight) != 1
    trainer.close()


@on_ranks(3)
def test_an_optimizer_and_its_hooks_see_debiased_parameters(rank):
    for kind in KINDS[:4]:
        see_debiased(rank, kind, OSGP(OnePeerExponential(3)))


@pytest.mark.slow
@on_ranks(4)
def test_every_optimizer_and_its_hooks_see_debiased_parameters(rank):
    graph, nodes = OnePeerExponential(4), OnePeerExponential(2)
    for kind in KINDS:
        for algorithm in (SGP(graph, overlap=2), SGP(Star(4)), SGP(Star(4), overlap=3)):
            see_debiased(rank, kind, algorithm)
        see_debiased(rank, kind, Hierarchical(OSGP(nodes), 2))
        see_debiased(rank, kind, SlowMo(SGP(graph, overlap=2), 50))


def algorithm_1(kind, topology, num_steps):
    """Algorithm 1 of Assran et al.: x changes by what each rank's optimizer does to z."""
    models = [build_model(torch.float64) for _ in range(topology.num_ranks)]
    optimizers = [kind(each.parameters(), lr=0.05) for each in models]
    data = [list(batches(rank, num_steps, dtype=torch.float64)) for rank in range(len(models))]
    x, w = torch.stack(list(map(flat, models))), torch.ones(len(models), 1, dtype=torch.float64)
    for step in range(num_steps):
        z = x / w
        for rank, model in enumerate(models):
            inputs, targets = data[rank][step]
            nn.utils.vector_to_parameters(z[rank].clone(), model.parameters())
            optimizers[rank].zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizers[rank].step()
        mixing = torch.from_numpy(topology.mixing_matrix(step))
        x, w = mixing @ (x + torch.stack(list(map(flat, models))) - z), mixing @ w
    return x / w


def train(rank, kind, algorithm):
    model = build_model(torch.float64)
    optimizer = kind(model.parameters(), lr=0.05)
    trainer = GossipDataParallel(model, optimizer, algorithm)
    for inputs, targets in batches(rank, 5, dtype=torch.float64):
        optimizer.zero_grad()
        nn.functional.mse_loss(trainer(inputs), targets).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("kind", [ScheduleFree, slow(Lookahead), slow(asgd), slow(adafactor)])
def test_what_such_an_optimizer_changes_is_the_update_of_algorithm_1(ranks, kind):
    expected = algorithm_1(kind, Star(3), 5)
    assert (flat(build_model()) - expected).abs().max() > 0.02
    for found, each in zip(ranks.run(3, train, kind, SGP(Star(3))), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=1e-14)


# ------------------------------------------------- every copy, and every act that changes no copy

OUTER = {
    "anchor and momentum": lambda: DiLoCo(2),
    "anchor of 16-bit weights": lambda: DiLoCo(2),
    "anchor and residual": lambda: DiLoCo(2, compressor=ErrorFeedback(TopK(0.3))),
    "anchor in flight": lambda: DiLoCo(2, delay=1),
    "anchors of fragments": lambda: DiLoCo(2, fragments=2),
    "slow momentum": lambda: SlowMo(None, 2),
    "slow weights of pairs": lambda: NoLoCo(RandomMatching(2), 2),
    "weights of the last average": lambda: LocalSGD(2, compressor=Int8()),
}
# After each outer step all ranks are equal; not in pairs, nor where only a part has been averaged.
EQUAL = set(OUTER) - {"anchor in flight", "anchors of fragments", "slow weights of pairs"}
GOSSIP = {
    "message": lambda: SGP(OnePeerExponential(2), overlap=1),
    "numerator and message": lambda: SGP(OnePeerExponential(2), overlap=2),
    "two messages": lambda: OSGP(OnePeerExponential(2)),
    "replicas of neighbors": lambda: SGP(OnePeerExponential(2), compressor=TopK(0.3)),
}
COPIES = {**OUTER, **GOSSIP, "center": lambda: EASGD(2)}
DTYPES = dict.fromkeys(COPIES, torch.float64) | {"anchor of 16-bit weights": torch.bfloat16}
DTYPES |= dict.fromkeys(
    ("anchor and residual", "weights of the last average", "replicas of neighbors"), torch.float32
)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 0.0}


class Case:
    """A run on this rank, of which a layer is watched."""

    def __init__(self, rank, copy):
        self.copy, self.dtype = copy, DTYPES[copy]
        self.module = build_model(self.dtype)
        self.module.register_buffer("seen", torch.zeros(1))
        self.layer = self.module[2]
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.optimizer.register_step_post_hook(lambda *_: self.write())
        self.trainer = GossipDataParallel(self.module, self.optimizer, COPIES[copy]())
        self.data, self.tolerance = batches(rank, 99, dtype=self.dtype), TOLERANCE[self.dtype]

    def write(self):
        """Do nothing after a step."""

    def train(self, num_steps):
        for _ in range(num_steps):
            inputs, targets = next(self.data)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.trainer(inputs), targets).backward()
            self.optimizer.step()

    def weight(self):
        return self.layer.weight.detach().clone()

    def average(self):
        """Return what the ranks and the messages in flight are together."""
        with self.trainer.consensus():
            return self.weight()


def freeze(case):
    """Momentum, residuals and pulls are no training."""
    case.train(4)
    case.layer.requires_grad_(False)
    if "flight" in case.copy:
        case.train(4)  # ranks have learned since the last outer step
    before, average = case.weight(), case.average()
    case.train(7)
    if case.copy in OUTER:
        assert torch.equal(case.weight(), before)
    elif case.copy in GOSSIP:
        torch.testing.assert_close(case.average(), average, rtol=0, atol=case.tolerance)


def unfreeze(case):
    case.layer.requires_grad_(False)
    case.train(4)
    before = case.weight()
    case.layer.requires_grad_(True)
    case.train(6)
    assert (case.weight() - before).abs().max() > 1e-3


def load(case, *, swaps=False):
    """Load between two outer steps: ranks stay together, or their average stays."""
    case.train(5)
    average, own = case.average(), {k: v.clone() for k, v in case.trainer.state_dict().items()}
    if swaps:
        case.trainer.load_state_dict({k: 0.5 * v for k, v in own.items()})
    case.trainer.load_state_dict(own)
    # Two messages are of other steps than the weights, and in no state; so is what a swap merges.
    if case.copy in GOSSIP and case.copy != "two messages" and not swaps:
        torch.testing.assert_close(case.average(), average, rtol=0, atol=case.tolerance)
    for _ in range(3):
        if case.copy in EQUAL:
            case.train(1 if case.trainer.metrics()["rank/steps"] % 2 else 2)
            assert case.trainer.consensus_distance() == 0
    (center, *_), _ = case.trainer._averager.as_evaluated()
    centers = [torch.empty_like(center) for _ in range(2)]
    dist.all_gather(centers, center)
    assert case.copy != "center" or torch.equal(*centers)


def swap_and_back(case):
    load(case, swaps=True)


def hook_that_writes(case):
    """What a hook of the optimizer writes is part of the update, on all ranks alike."""
    case.optimizer.param_groups[0]["lr"] = 0.0
    before = case.weight()

    @torch.no_grad()
    def write():
        case.layer.weight += 0.0625

    case.write = write
    case.train(6)
    case.trainer.flush()
    assert case.trainer.consensus_distance() < 1e-5
    assert (case.weight() - before).min() > 0.1
    if case.copy in ("message", "replicas of neighbors", "weights of the last average"):
        assert (case.weight() - before - 6 * 0.0625).abs().max() < 1e-6


def buffer_assigned_anew(case):
    case.train(2)
    case.module.seen = torch.full((1,), float(dist.get_rank()))
    with case.trainer.consensus():
        assert case.module.seen == 0.5
    assert case.module.seen == dist.get_rank()


ACTS = [freeze, unfreeze, load, swap_and_back, hook_that_writes, buffer_assigned_anew]


def change_parameters_alone(rank, copy, act):
    case = Case(rank, copy)
    act(case)
    case.trainer.close()


EVERY = [(copy, act) for copy in COPIES for act in ACTS]
SAMPLE = [
    ("anchor and momentum", freeze), ("anchor and residual", freeze), ("slow momentum", load),
    ("slow weights of pairs", freeze), ("center", swap_and_back), ("message", hook_that_writes),
]  # fmt: skip


@pytest.mark.parametrize("cases", [SAMPLE, slow(EVERY)], ids=["sample", "all"])
def test_copies_follow_legal_acts(ranks, cases):
    ranks.run_each(2, change_parameters_alone, cases)
