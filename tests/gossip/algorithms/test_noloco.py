"""NoLoCo against the paper's rule, computed in float64 for all ranks at once."""

import pytest
import torch
from torch import nn

from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import NoLoCo
from pyparallel.gossip.algorithms.noloco import noloco
from pyparallel.gossip.messages.averages import Pairs
from pyparallel.gossip.topology import RandomMatching
from pyparallel.training import FlatBuckets
from tests.gossip.loops import batches, start, take_step, train_wrapped
from tests.local_transport import run_threads

INTERVAL, STEPS, LR = 3, 14, 0.1


class Rank:
    """One rank that descends towards its own target, without autograd."""

    def __init__(self, algorithm, exchange, target):
        self.target = target
        module = nn.Linear(len(target), 1, bias=False)
        self.parameter = module.weight
        nn.init.zeros_(self.parameter)
        buckets = FlatBuckets([self.parameter], 2**20)
        pairs = Pairs(exchange, algorithm.topology, algorithm.compressor, algorithm.pull_turns)
        self.optimizer = torch.optim.SGD([self.parameter], lr=LR)
        self.averager = algorithm.start(module, self.optimizer, buckets, exchange.run)
        self.averager.regroup(None, None, pairs)  # which go through the threads' queues

    def step(self):
        self.parameter.grad = self.parameter.detach() - self.target
        take_step(self.averager, self.optimizer)
        return self.parameter.detach()[0].clone()


def target_of(rank):
    return torch.randn(5, generator=torch.Generator().manual_seed(rank))


def simulate(algorithm, num_ranks, num_steps):
    """Return theta of all ranks after each step, in float64, with outer steps by ``noloco``."""
    targets = torch.stack([target_of(rank).double() for rank in range(num_ranks)])
    theta, phi, momentum = (torch.zeros_like(targets) for _ in range(3))
    options = algorithm.momentum, algorithm.outer_lr, algorithm.pull
    history = []
    for step in range(1, num_steps + 1):
        theta = theta - LR * (theta - targets)
        if step % algorithm.interval == 0:
            for rank in range(num_ranks):
                partner = algorithm.topology.partner(rank, step // algorithm.interval - 1)
                if partner is None or partner > rank:
                    pair = [rank] if partner is None else [rank, partner]
                    states = theta[pair], phi[pair], momentum[pair]
                    phi[pair], momentum[pair] = noloco(*states, *options)
            theta = phi.clone()
        history.append(theta)
    return history


def assert_follows(rule, algorithm, num_ranks):
    def rank_main(exchange):
        rank = Rank(algorithm, exchange, target_of(exchange.rank))
        return [rank.step() for _ in range(STEPS)]

    histories = torch.stack([torch.stack(each) for each in run_threads(num_ranks, rank_main)])
    expected = torch.stack(rule(algorithm, num_ranks, STEPS), 1)
    torch.testing.assert_close(histories.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "outer_lr": 0.9, "pull": 1.4}])
def test_follows_the_papers_rule(options):
    for num_ranks in range(1, 5):
        algorithm = NoLoCo(RandomMatching(num_ranks, seed=5), INTERVAL, **options)
        assert_follows(simulate, algorithm, num_ranks)


DENSITY, TURNS = 0.4, 2
COMPRESSED = {"compressor": ErrorFeedback(TopK(DENSITY), decay=0.9), "pull_turns": TURNS}


def simulate_compressed(algorithm, num_ranks, num_steps):
    """Do as ``simulate``, but a pair only knows the largest changes, and a slice of phi in turn."""
    targets = torch.stack([target_of(rank).double() for rank in range(num_ranks)])
    theta, phi, momentum, error = (torch.zeros_like(targets) for _ in range(4))
    numel, history = targets.shape[1], []
    for step in range(1, num_steps + 1):
        theta = theta - LR * (theta - targets)
        if step % algorithm.interval == 0:
            number = step // algorithm.interval - 1
            start, end = (numel * (number % TURNS + more) // TURNS for more in (0, 1))
            changes, drifts = algorithm.outer_lr * (theta - phi), torch.zeros_like(phi)
            partners = [algorithm.topology.partner(rank, number) for rank in range(num_ranks)]
            means = changes.clone()
            sent = torch.zeros_like(changes)
            for rank, partner in enumerate(partners):
                if partner is not None:
                    total = changes[rank] + 0.9 * error[rank]
                    kept = total.abs().topk(round(DENSITY * numel)).indices
                    sent[rank, kept] = total[kept]
                    error[rank] = total - sent[rank]
                    drifts[rank, start:end] = (phi[rank] - phi[partner])[start:end] / 2
            for rank, partner in enumerate(partners):
                if partner is not None:
                    means[rank] = (sent[rank] + sent[partner]) / 2
            momentum = algorithm.momentum * momentum + means - algorithm.pull * drifts
            phi = phi + momentum
            theta = phi.clone()
        history.append(theta)
    return history


def test_compressed_changes_and_a_pull_in_turns():
    for num_ranks in (2, 3):
        algorithm = NoLoCo(RandomMatching(num_ranks, seed=5), INTERVAL, **COMPRESSED)
        assert_follows(simulate_compressed, algorithm, num_ranks)


def train_rank(rank, algorithm, data_seed=None):
    data = batches(rank if data_seed is None else data_seed, STEPS)
    return train_wrapped(algorithm, list(data), momentum=0.9)


def test_identical_data_keep_ranks_equal_bit_for_bit(ranks):
    first, *others = ranks.run(3, train_rank, NoLoCo(RandomMatching(3), INTERVAL), 0)
    assert all(torch.equal(other, first) for other in others)


def shrink_distance(rank, topology):
    """Start ranks from different parameters and do not train: only the pull acts."""
    _, optimizer, wrapped = start(NoLoCo(topology, interval=1), lr=0.0)
    averager = wrapped._averager
    state = averager.state_dict()
    state["outer"][0]["slow"] = [slow + rank for slow in state["outer"][0]["slow"]]
    averager.load_state_dict(state)
    distances = []
    for _ in range(30):
        with torch.no_grad():  # theta = phi: no outer gradient
            for buffer, slow in zip(
                averager.buffers, averager.state_dict()["outer"][0]["slow"], strict=True
            ):
                buffer.copy_(slow)
        optimizer.step()
        distances.append(wrapped.consensus_distance())
    return distances, wrapped.bytes_sent, wrapped._buckets.num_bytes


def test_the_pull_reaches_consensus_with_one_message_a_round(ranks):
    for distances, bytes_sent, model_bytes in ranks.run(4, shrink_distance, RandomMatching(4)):
        assert distances[0] > 1
        assert distances[-1] < 1e-2 * distances[0]
        assert bytes_sent == 30 * (model_bytes + 64)
