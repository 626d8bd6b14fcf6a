"""OSGP against Algorithm 2 of Assran et al. (ICML 2019), computed for all ranks at once."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel, optim
from pyparallel.gossip import OSGP
from pyparallel.gossip.algorithms.osgp import osgp
from pyparallel.gossip.push_sum import dense_buffer as round_buffer
from pyparallel.gossip.push_sum.delayed import DelayedPushSum
from pyparallel.gossip.push_sum.dense_buffer import BiasedBuffer, DenseBuffer
from pyparallel.gossip.topology import (
    BaseGraph,
    Complete,
    DirectedExponential,
    FromMatrix,
    Lazy,
    OnePeerExponential,
    Phases,
    Ring,
    Star,
)
from tests.cases import nightly
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import flat, take_step
from tests.local_transport import run_threads

LR = 0.1
START = np.array([1.0, -2.0, 0.5])
NESTEROV = {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True}
OPTIONS = [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, NESTEROV]
UNEVEN = [[0.5, 0.25, 0, 0], [0, 0.25, 0.5, 0.125], [0.25, 0, 0.5, 0.125], [0.25, 0.5, 0, 0.75]]
GRAPHS = {
    "ring": Ring(5),
    "one peer": OnePeerExponential(6),
    "directed": DirectedExponential(4),
    "complete": Complete(3),
    "base graph": BaseGraph(6),  # regular, but ranks without a peer keep all of their mass
    "lazy": Lazy(Ring(4), 0.5),
    "star": Star(4),
    "chords": StarWithChords(5),
    "uneven": FromMatrix(np.array(UNEVEN)),
    "phases": Phases([(Complete(4), 3), (OnePeerExponential(4), 4)]),
}


def targets_of(num_ranks):
    return np.random.default_rng(7).standard_normal((num_ranks, 3))


def algorithm_2(topology, delay, num_steps, biased=False, momentum=0.0, weight_decay=0.0, **sgd):
    """Return z and w of all ranks after each step of Algorithm 2 for ``|z - target|^2 / 2``.

    Each rank's optimizer is SGD, as torch defines it, of the numerator x.
    """
    targets = torch.from_numpy(targets_of(topology.num_ranks))
    x, w = torch.tensor(START).repeat(len(targets), 1), torch.ones(len(targets), 1).double()
    velocity, sent, history = torch.zeros_like(x), {}, []

    def update(z, x):
        gradient = z - targets + weight_decay * x
        velocity.mul_(momentum).add_(gradient)
        return LR * (gradient + momentum * velocity if sgd.get("nesterov") else velocity)

    for step in range(num_steps):
        matrix = torch.from_numpy(topology.mixing_matrix(step // delay))
        x, w = osgp(step, x, w, sent, update, matrix, delay, biased=biased)
        z, weights = (x, torch.ones_like(w)) if biased else (x / w, w)
        history.append((z.numpy(), weights.numpy()))
    return history


def mix_in_float64(values, weight, messages, masses):
    total = weight + masses.sum()
    values.mul_(weight / total)
    for message, mass in zip(messages, masses, strict=True):
        values.add_(message * (mass / total))
    weight.copy_(total)


def run_in_float64(topology, delay, num_steps, biased, options):
    def rank_main(exchange):
        target = torch.from_numpy(targets_of(topology.num_ranks)[exchange.rank])
        parameter = nn.Parameter(torch.from_numpy(START.copy()))
        kind = BiasedBuffer if biased else lambda each, to: DenseBuffer(each, to, snapshot=True)
        buffers = [kind(parameter.data, exchange)]
        averager = DelayedPushSum(buffers, exchange, topology, delay)
        optimizer = torch.optim.SGD([parameter], lr=LR, **options)
        history = []
        for _ in range(num_steps):
            parameter.grad = parameter.detach() - target
            take_step(averager, optimizer)
            history.append((parameter.detach().numpy().copy(), float(averager.status.weight)))
        return history

    return run_threads(topology.num_ranks, rank_main)


def check_histories(histories, expected, tolerance, case):
    """Compare z and w of each rank, in every step."""
    z, weights = (np.array(each) for each in zip(*expected, strict=True))
    for rank, history in enumerate(histories):
        place = f"{case}, rank {rank}"
        ours, weight = zip(*history, strict=True)
        np.testing.assert_allclose(ours, z[:, rank], tolerance, tolerance, err_msg=place)
        np.testing.assert_allclose(weight, weights[:, rank, 0], 0, 1e-12, err_msg=place)


CASES = list(itertools.product([1, 2, 4], OPTIONS, [False, True]))


# Five of the cases to each graph, in turns, so that every case has two graphs.
@pytest.mark.parametrize("num_cases", [5, nightly(len(CASES))])
@pytest.mark.parametrize("graph", GRAPHS)
def test_osgp_is_algorithm_2_of_assran_et_al(graph, num_cases, monkeypatch):
    monkeypatch.setattr(round_buffer, "mix_unchecked", mix_in_float64)
    topology, first = GRAPHS[graph], 5 * list(GRAPHS).index(graph)
    for delay, options, biased in (CASES * 3)[first : first + num_cases]:
        expected = algorithm_2(topology, delay, 21, biased, **options)
        histories = run_in_float64(topology, delay, 21, biased, options)
        check_histories(histories, expected, 1e-12, f"delay {delay}, {options}, {biased}")


def test_the_order_differs_from_merging_before_the_update():
    delayed = algorithm_2(OnePeerExponential(4), 1, 12)
    weights = [float(w[0, 0]) for _, w in delayed]
    assert weights[:4] == [0.5, 0.75, 0.625, 0.6875]  # Assran et al.: they go to 2/3
    z, mean = np.tile(START, (4, 1)), targets_of(4)
    for step in range(12):  # the line order of D-PSGD on the same matrices
        mixed = OnePeerExponential(4).mixing_matrix(step - 1) @ z if step else z
        z = mixed - LR * (z - mean)
    assert np.abs(z - delayed[-1][0]).max() > 0.05


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(START, dtype=torch.float32))

    def forward(self, target):
        return (self.values - target).square().sum() / 2


def train_on_gloo(rank, topology, delay, biased, make_optimizer, options):
    model = Vector()
    optimizer = make_optimizer(model.parameters(), lr=LR, **options)
    wrapped = GossipDataParallel(model, optimizer, OSGP(topology, delay, biased))
    target = torch.tensor(targets_of(topology.num_ranks)[rank], dtype=torch.float32)
    history = []
    for _ in range(21):
        optimizer.zero_grad()
        wrapped(target).backward()
        optimizer.step()
        history.append((flat(model).numpy(), float(wrapped.push_sum_weight)))
    return history


@pytest.mark.slow  # 26 seconds; the order alone is tested without processes
def test_osgp_is_algorithm_2_on_gloo(ranks):
    graphs = [OnePeerExponential(4), Ring(4), Star(4), Complete(4), GRAPHS["phases"]]
    makers = [torch.optim.SGD, optim.SGD]
    cases = [
        (graph, delay, biased, make, options)
        for (graph, delay), biased, (make, options) in zip(
            itertools.product(graphs, [1, 2, 4]),
            itertools.cycle([False, False, True, False]),
            itertools.cycle(itertools.product(makers, OPTIONS)),
            strict=False,
        )
    ] + [(Star(4), 1, False, optim.SGD, NESTEROV), (Star(4), 2, True, optim.SGD, NESTEROV)]
    results = ranks.run_each(4, train_on_gloo, cases)
    for (graph, delay, biased, make, options), histories in zip(cases, results, strict=True):
        expected = algorithm_2(graph, delay, 21, biased, **options)
        check_histories(histories, expected, 1e-5, f"{graph}, {delay}, {biased}, {make}, {options}")
