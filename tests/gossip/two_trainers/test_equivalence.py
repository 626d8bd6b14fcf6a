"""Two trainers in one training step: equal to one GAN on the joined batch, and to each alone."""

import random
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pyparallel import GossipDataParallel
from pyparallel.gossip import DPSGD, OSGP, SGP, AllReduce
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.loops import flat
from tests.gossip.two_trainers.gan import LR, STEPS, Gan, build, data_of, one_fake, train, weights

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


# ------------------------------------------------------------------ each trainer as if it was alone


def overlapped(num_ranks):
    graph = OnePeerExponential(num_ranks)
    return [SGP(graph, 1)] * 2, [OSGP(graph)] * 2, [SGP(graph, 1), OSGP(graph)]


def replay(rank, algorithms):
    """Train a GAN; then step each network alone, with a trainer, by the gradients that it had."""
    gan, gradients = Gan(algorithms, momentum=0), ([], [])

    def record(index):
        parameters = gan.models[index].parameters()
        gradients[index].append([parameter.grad.clone() for parameter in parameters])

    gan.before_step = record
    train(gan, one_fake, data_of(8, rank, dist.get_world_size()))
    for index, module in enumerate(build()):
        optimizer = torch.optim.SGD(module.parameters(), lr=(LR, 2 * LR)[index])
        alone = GossipDataParallel(module, optimizer, algorithms[index])
        for step in gradients[index]:
            for parameter, gradient in zip(module.parameters(), step, strict=True):
                parameter.grad = gradient
            optimizer.step()
        assert torch.equal(weights(gan)[index], flat(module)), algorithms
        assert gan.models[index].push_sum_weight == alone.push_sum_weight
    return weights(gan)


@pytest.mark.parametrize("num_ranks", [slow(2), 4])
def test_overlapped_messages_of_both_are_those_of_trainers_alone(ranks, num_ranks):
    """Which follow the papers: test_sgp.py and test_osgp.py."""
    cases = [(algorithms,) for algorithms in overlapped(num_ranks)]
    for of_ranks in ranks.run_each(num_ranks, replay, cases):
        for network in zip(*of_ranks, strict=True):
            assert (network[0] - network[1]).abs().max() > 1e-3  # ranks differ


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
