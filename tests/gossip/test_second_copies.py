"""What the library keeps beside the parameters, and legal acts that change the parameters alone."""

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import OSGP, SGP, Hierarchical, SlowMo
from pyparallel.gossip.topology import OnePeerExponential, Star
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
