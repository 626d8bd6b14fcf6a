"""Bugs of the authors' code of Stochastic Gradient Push, which must not occur here.

They were found by reading facebookresearch/stochastic_gradient_push. ``test_sgp.py`` tests overlap,
which a later port switched off, and unbiased evaluation with messages in flight; gradients through
deprecated hooks would be a warning, and all warnings are errors here.
"""

import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import (
    Circulant,
    DirectedExponential,
    OnePeerExponential,
    Phases,
    Star,
)
from tests.workers import on_ranks


def test_no_peer_comes_twice_in_a_period():
    for num_ranks in range(2, 20):
        # With 4 ranks +2 and -2 are the same one: theirs were 1, 3, 2, 2.
        topology = DirectedExponential(num_ranks)
        offsets = [topology.offsets(index) for index in range(topology.period)]
        assert len(set(offsets)) == len(offsets), num_ranks


def test_no_offset_is_lost_to_a_rounded_logarithm():
    assert OnePeerExponential(1).out_peers(0, 0) == ()  # their code took the logarithm of zero
    # A floating-point logarithm gives a period one too small at each of these sizes.
    for num_ranks, peers, period in [(244, 2, 6), (243, 2, 5), (1001, 9, 4)]:
        topology = OnePeerExponential(num_ranks, peers=peers)
        assert topology.period == period, num_ranks
        topology.validate()


@on_ranks(4)
def test_one_round_and_one_exact_weight_per_step_for_any_dtypes(rank):
    model = nn.ModuleDict({"low": nn.Linear(4, 4).bfloat16(), "high": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counting = CountingExponential(4)
    wrapped = GossipDataParallel(model, optimizer, SGP(counting), bucket_cap_mb=5e-5)
    num_groups = len(dist.distributed_c10d._world.pg_map)
    counting.called.clear()
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):  # several backward passes are one step
            x = torch.randn(2, 4)
            loss = model["high"](x).sum() + model["low"](x.bfloat16()).float().sum()
            loss.backward()
        optimizer.step()
    assert sorted(set(counting.called)) == [0, 1]  # not once for each dtype, bucket or backward
    assert {each.dtype for each in wrapped._buckets.buffers} == {torch.float32, torch.bfloat16}
    assert wrapped.push_sum_weight.dtype == torch.float64
    assert wrapped.push_sum_weight == 1.0
    assert num_groups == 2  # the default and the trainer's: not one for each edge


class CountingExponential(OnePeerExponential):
    """Records the rounds in which it is called."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks)
        self.called = []

    def out_peers(self, rank, round_index):
        self.called.append(round_index)
        return super().out_peers(rank, round_index)


class OneOffset(Circulant):
    """A regular graph, with one offset."""

    def offsets(self, round_index):
        return (1,)


def test_a_regular_phase_after_an_irregular_one_is_not_regular():
    topology = Phases([(Star(3), 2), (OneOffset(3), 4)])
    assert not topology.regular  # so updates keep scaling by the weight
