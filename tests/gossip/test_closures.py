"""``optimizer.step(closure)``: the same rounds and the same bits as without a closure."""

import warnings

import networkx as nx
import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel, optim
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, LocalSGD
from pyparallel.gossip.topology import FromGraph, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import batches, start
from tests.workers import on_ranks

IRREGULAR = FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))


def train(algorithm, rank, uses_closure, make_optimizer, **options):
    """Return the parameters, the losses, and in how many closures a message was in flight."""
    model, optimizer, trainer = start(algorithm, make_optimizer, 0.01, 0.0002, **options)
    losses, in_flight = [], 0
    for number, (inputs, targets) in enumerate(batches(rank, 7, size=6)):
        failures = [KeyError("a batch that cannot be read")] if number == 3 else []

        def evaluate(inputs=inputs, targets=targets, failures=failures):
            nonlocal in_flight
            if failures and uses_closure:
                raise failures.pop()
            in_flight += trainer._averager.status.in_flight
            optimizer.zero_grad()
            for part in (slice(0, 4), slice(4, 6)):  # accumulates
                loss = nn.functional.mse_loss(trainer(inputs[part]), targets[part])
                loss.backward()
            nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
            losses.append(loss.item())
            return loss

        if not uses_closure:
            evaluate()
            optimizer.step()
            continue
        try:
            optimizer.step(evaluate)
        except KeyError:
            optimizer.step(evaluate)
    trainer.flush()
    counts = trainer._averager.run.counts
    assert (counts.steps, counts.repeats, counts.forwards) == (7, 0, 14)
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    trainer.close()
    return end, losses, in_flight


CASES = [
    (algorithm, *optimizer)
    for algorithm in (
        SGP(Ring(3)),
        SGP(OnePeerExponential(3), overlap=1),
        SGP(Ring(3), overlap=2),
        SGP(IRREGULAR),
        SGP(IRREGULAR, overlap=3),
        SGP(Ring(3), overlap=1, compressor=Int8()),
        LocalSGD(2),
    )
    for optimizer in (
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"foreach": True}),
        (optim.AdamW, {}),
    )
]


def compare_with_closures(rank, algorithm, make_optimizer, options):
    plain, losses, _ = train(algorithm, rank, False, make_optimizer, **options)
    end, others, in_flight = train(algorithm, rank, True, make_optimizer, **options)
    assert torch.equal(plain, end)
    assert losses == others
    assert in_flight == (6 if getattr(algorithm, "overlap", 0) else 0)  # during a closure


# Each algorithm with one optimizer, in turns, and compressed messages with a fused one.
@pytest.mark.parametrize(
    "cases", [[*CASES[::4], CASES[9], CASES[17]], slow(CASES)], ids=["covering", "all"]
)
def test_trajectories_with_a_closure_are_those_without_it(ranks, cases):
    ranks.run_each(3, compare_with_closures, cases)


class Perturbs(torch.optim.Optimizer):
    """As SAM: evaluates at other parameters and steps from the ones before."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01)
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p, value in zip(group["params"], before, strict=True):
                p.copy_(value).sub_(p.grad.sign(), alpha=group["lr"])
        return loss


@on_ranks(3)
def test_optimizers_that_evaluate_often_or_elsewhere_see_debiased_parameters(rank):
    """Parameters that no step changes."""
    for kind, options in ((torch.optim.LBFGS, {"max_iter": 4}), (Perturbs, {})):
        for overlap in (0, 1):
            torch.manual_seed(3)
            module = nn.Linear(4, 1)
            initial = module.weight.detach().clone()
            optimizer = kind(module.parameters(), lr=0.0, **options)
            model = GossipDataParallel(module, optimizer, SGP(StarWithChords(3), overlap=overlap))
            values = []

            def closure(optimizer=optimizer, model=model, initial=initial, values=values):
                inputs = torch.randn(20, 4)
                optimizer.zero_grad()
                shift = 0.01 / model.push_sum_weight if isinstance(optimizer, Perturbs) else 0.0
                values.append(model.module.weight.detach() - initial - shift)
                loss = (model(inputs) - inputs[:, :1]).square().mean()
                loss.backward()
                return loss

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    optimizer.step(closure)
            model.flush()
            assert float(model.push_sum_weight) != 1
            assert max(float(value.abs().max()) for value in values) < 1e-6, kind
            assert float((module.weight - initial).abs().max()) < 1e-6, kind
            assert len(values) == (10 if kind is torch.optim.LBFGS else 5)
            warned = [str(each.message) for each in caught if "overlap" in str(each.message)]
            expected = (
                f"{kind.__name__} may evaluate its closure several times in a step, or at other "
                "parameters, so messages are received before the first evaluation: overlap hides "
                "nothing; call backward() and then step() without a closure"
            )
            assert warned == [expected] * overlap
            model.close()
