"""PushSum without processes: ranks are threads, so hypothesis can try many graphs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Complete, DirectedExponential, OnePeerExponential, Ring
from tests.gossip.graphs import StarWithChords
from tests.local_transport import run_threads

KINDS = [Ring, OnePeerExponential, DirectedExponential, Complete, StarWithChords]


def run_rounds(topology, num_rounds, *, dtype=torch.float32, lengths=(33, 5)):
    """Return each rank's initial buffers, final buffers and final weight."""

    def rank_main(exchange):
        generator = torch.Generator().manual_seed(exchange.rank)
        buffers = [torch.randn(n, generator=generator).to(dtype) for n in lengths]
        before = [buffer.double() for buffer in buffers]
        averaging = PushSum.of_dense(buffers, exchange, topology)
        for _ in range(num_rounds):
            averaging.after_step()
        return before, [buffer.double() for buffer in buffers], averaging.status.weight

    return run_threads(topology.num_ranks, rank_main)


@settings(deadline=None, max_examples=15)
@given(kind=st.sampled_from(KINDS), num_ranks=st.integers(1, 9), num_rounds=st.integers(0, 20))
def test_mass_is_conserved(kind, num_ranks, num_rounds):
    results = run_rounds(kind(num_ranks), num_rounds)
    assert abs(sum(float(weight) for _, _, weight in results) - num_ranks) < 1e-12
    for index in range(2):
        before = sum(first[index] for first, _, _ in results)
        after = sum(weight * last[index] for _, last, weight in results)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-5)


def test_weights_stay_exactly_one_on_regular_graphs():
    for kind in KINDS[:-1]:
        for num_ranks in (1, 4, 7):
            results = run_rounds(kind(num_ranks), 9)
            assert all(float(weight) == 1.0 for _, _, weight in results), (kind, num_ranks)


def test_low_precision_buffers_approach_the_average():
    for dtype in (torch.bfloat16, torch.float16):
        results = run_rounds(OnePeerExponential(4), 2, dtype=dtype)
        mean = sum(first[0] for first, _, _ in results) / 4
        for _, last, _ in results:
            torch.testing.assert_close(last[0], mean, rtol=2e-2, atol=2e-2)
