"""Two trainers in one training step: equal to one GAN on the joined batch, and to the papers."""

import random
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.gossip import DPSGD, OSGP, SGP, AllReduce
from pyparallel.gossip.algorithms.osgp import osgp
from pyparallel.gossip.algorithms.sgp import combine_while_adapt
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.loops import flat
from tests.gossip.two_trainers.gan import (
    LR,
    STEPS,
    Gan,
    build,
    critic_loss,
    data_of,
    is_real,
    one_fake,
    train,
    weights,
)

# ------------------------------------------------------------------- replicas equal one network

EXACT = {
    "all-reduce": [AllReduce, AllReduce],
    "dpsgd": [lambda: DPSGD(Complete(dist.get_world_size()))] * 2,
    "both": [AllReduce, lambda: SGP(Complete(dist.get_world_size()))],
}


def train_replicas(rank, num_steps, names):
    found = {}
    for name in names:
        for name_of_step, step in STEPS.items():
            gan = Gan([make() for make in EXACT[name]])
            losses = train(gan, step, data_of(num_steps, rank, dist.get_world_size()))
            num_bytes = [model.bytes_sent for model in gan.models]
            found[name, name_of_step] = losses, weights(gan), num_bytes
    return found


@pytest.mark.parametrize("sizes", [(1, 2), slow((4,))], ids=str)
def test_replicas_equal_one_gan_on_the_joined_batch(ranks, subtests, sizes):
    """SGD is linear in the gradients, so the mean of updated weights is a step on their mean."""
    alone = {}
    for name, step in STEPS.items():
        gan = Gan()
        alone[name] = train(gan, step, data_of(6)), weights(gan)
        assert (weights(gan)[0] - flat(build()[0])).abs().max() > 0.1
    for num_ranks in sizes:
        names = ["all-reduce", "dpsgd"] if num_ranks == 4 else ["both"]
        results = ranks.run(num_ranks, train_replicas, 6, names)
        for name, step in results[0]:
            with subtests.test(f"{name}, {step}, {num_ranks} ranks"):
                found = [result[name, step] for result in results]
                expected, final = alone[step]
                mean = torch.stack([losses for losses, *_ in found]).mean(0)
                torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)
                for _, those, num_bytes in found:
                    torch.testing.assert_close(those, final, rtol=0, atol=1e-5)
                    assert num_ranks == 1 or min(num_bytes) > 0
                if num_ranks == 1:
                    assert torch.equal(mean, expected)
                    assert all(map(torch.equal, found[0][1], final))


# -------------------------------------------------------------------------- against the papers


class Matrices:
    """A network of all ranks by the paper's rule, with numerators x and weights w as matrices.

    Args:
        module: in float64, at the start; evaluated with the weights of one rank after another.
    """

    def __init__(self, module, algorithm, lr):
        self.module, self.topology, self.lr = module.double(), algorithm.topology, lr
        self.is_sgp = isinstance(algorithm, SGP)
        num_ranks = self.topology.num_ranks
        self.x = flat(module).repeat(num_ranks, 1)
        self.w = torch.ones(num_ranks, 1, dtype=torch.float64)
        self.buffers = [[b.clone() for b in module.buffers()] for _ in range(num_ranks)]
        self.sent, self.index = None if self.is_sgp else {}, 0

    def at(self, rank):
        """Return the module as it is on a rank, which forwards may change the buffers of."""
        values = self.x[rank] / self.w[rank]
        nn.utils.vector_to_parameters(values.clone(), self.module.parameters())
        for buffer, own in zip(self.module.buffers(), self.buffers[rank], strict=True):
            buffer.data = own
        return self.module

    def step(self, gradients):
        matrix = torch.as_tensor(self.topology.mixing_matrix(self.index), dtype=torch.float64)
        if self.is_sgp:
            self.x, self.w, self.sent = combine_while_adapt(
                self.x, self.w, self.sent, lambda z: self.lr * gradients, matrix, merges=True
            )
        else:
            self.x, self.w = osgp(
                self.index, self.x, self.w, self.sent, lambda z, x: self.lr * gradients, matrix, 1
            )
        self.index += 1


def gradient(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([each.flatten() for each in found])


def one_fake_by_hand(generators, discriminators, data):
    """Take the steps of `one_fake`; return the weights z of all ranks, and w."""
    num_ranks = len(data)
    for batches in zip(*data, strict=True):
        reals, noises = ([each[i].double() for each in batches] for i in (0, 1))
        rows = []
        for rank in range(num_ranks):
            critic = discriminators.at(rank)
            fake = generators.at(rank)(noises[rank][0]).detach()
            rows.append(gradient(critic_loss(critic, reals[rank], fake), critic))
        discriminators.step(torch.stack(rows))
        rows = []
        for rank in range(num_ranks):
            critic, generator = discriminators.at(rank), generators.at(rank)
            loss = is_real(critic(generator(noises[rank][0])))
            rows.append(gradient(loss, generator))
        generators.step(torch.stack(rows))
    return [(each.x / each.w, each.w) for each in (generators, discriminators)]


def overlapped(num_ranks):
    graph = OnePeerExponential(num_ranks)
    return {
        "sgp": [SGP(graph, 1)] * 2,
        "osgp": [OSGP(graph)] * 2,
        "one each": [SGP(graph, 1), OSGP(graph)],
    }


def train_overlapped(rank, num_steps):
    num_ranks, found = dist.get_world_size(), {}
    for name, algorithms in overlapped(num_ranks).items():
        gan = Gan(algorithms, momentum=0)
        train(gan, one_fake, data_of(num_steps, rank, num_ranks))
        found[name] = weights(gan), [float(model.push_sum_weight) for model in gan.models]
    return found


@pytest.mark.parametrize("num_ranks", [slow(2), 4])
def test_overlapped_messages_of_both_follow_the_papers(ranks, subtests, num_ranks):
    results = ranks.run(num_ranks, train_overlapped, 8)
    for name, algorithms in overlapped(num_ranks).items():
        with subtests.test(name):
            networks = map(Matrices, build(), algorithms, (LR, 2 * LR))
            data = [data_of(8, rank, num_ranks) for rank in range(num_ranks)]
            expected = one_fake_by_hand(*networks, data)
            for network, (z, w) in enumerate(expected):
                assert (z - z.mean(0)).abs().max() > 1e-3  # ranks differ
                for rank, result in enumerate(results):
                    own, weight = (each[network] for each in result[name])
                    torch.testing.assert_close(own.double(), z[rank], rtol=0, atol=2e-6)
                    assert weight == float(w[rank])


# ------------------------------------------------------------------------- ranks of other speeds

MIXED = {
    "other overlaps": [lambda: SGP(Ring(4)), lambda: SGP(OnePeerExponential(4), overlap=1)],
    "other algorithms": [AllReduce, lambda: OSGP(OnePeerExponential(4), delay=2)],
}


def pause(pauses, longest, index):
    time.sleep(pauses.random() * longest)


def train_with_pauses(rank, name, step):
    results = []
    for longest in (0.0, 0.01):
        gan, pauses = Gan([make() for make in MIXED[name]]), random.Random(rank)
        gan.before_step = partial(pause, pauses, longest)
        losses = train(gan, STEPS[step], data_of(10, rank, 4))
        results.append([losses, *weights(gan)])
    return results


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("other overlaps", "one_fake"),
        ("other algorithms", "penalized"),
        slow("other overlaps", "penalized"),
        slow("other algorithms", "one_fake"),
    ],
)
def test_messages_of_two_trainers_do_not_mix_when_ranks_pause(ranks, name, step):
    for even, paused in ranks.run(4, train_with_pauses, name, step):
        assert all(map(torch.equal, even, paused))
