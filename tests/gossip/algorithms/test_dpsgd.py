"""DPSGD against Algorithm 1 of Lian et al., and with the order of SGP."""

import numpy as np
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import DPSGD
from pyparallel.gossip.algorithms.dpsgd import dpsgd
from pyparallel.gossip.algorithms.sgp import sgp
from pyparallel.gossip.topology import Hypercube, Lazy, Ring


def lian_et_al(topology, targets, num_steps, lr):
    """Return x of all ranks after each step of Algorithm 1 of Lian et al. (NeurIPS 2017)."""
    x, history = torch.zeros_like(targets), []
    for step in range(num_steps):
        x = dpsgd(x, lambda x: lr * (x - targets), torch.from_numpy(topology.mixing_matrix(step)))
        history.append(x)
    return history


def adapt_then_combine(topology, targets, num_steps, lr):
    x, w, history = torch.zeros_like(targets), torch.ones(len(targets), 1).double(), []
    for step in range(num_steps):
        matrix = torch.from_numpy(topology.mixing_matrix(step))
        x, w = sgp(x, w, lambda z: lr * (z - targets), matrix)
        history.append(x)
    torch.testing.assert_close(w, torch.ones_like(w))
    return history


def descend(rank, topology, overlap):
    values = nn.Parameter(torch.zeros(3))
    module = nn.ParameterList([values])
    optimizer = torch.optim.SGD([values], lr=0.3)
    wrapped = GossipDataParallel(module, optimizer, DPSGD(topology, overlap=overlap))
    target, history = torch.tensor(TARGETS[rank], dtype=torch.float32), []
    for _ in range(15):
        values.grad = values.detach() - target
        optimizer.step()
        history.append(values.detach().numpy().copy())
    wrapped.flush()
    return history


TARGETS = np.random.default_rng(3).standard_normal((4, 3))


def test_overlap_1_is_algorithm_1_of_lian_et_al_and_0_adapt_then_combine(ranks):
    for topology in (Ring(4), Lazy(Hypercube(4), 0.7)):
        cases = [(topology, overlap) for overlap in (0, 1)]
        # The library averages x after an update and before the next; Lian et al. before the first.
        rounds = Shifted(topology)
        printed = lian_et_al(rounds, torch.from_numpy(TARGETS), 15, 0.3)
        other = adapt_then_combine(topology, torch.from_numpy(TARGETS), 15, 0.3)
        for expected, found in zip(
            (other, printed), ranks.run_each(4, descend, cases), strict=True
        ):
            for rank, history in enumerate(found):
                np.testing.assert_allclose(history, [x[rank] for x in expected], 1e-5, 1e-6)


class Shifted:
    """A topology's matrices, one round later; the first average, of equal models, changes none."""

    def __init__(self, topology):
        self.topology = topology

    def mixing_matrix(self, index):
        return self.topology.mixing_matrix(index - 1) if index else np.eye(self.topology.num_ranks)
