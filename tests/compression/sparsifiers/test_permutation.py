"""The permutation drawn alike by all ranks, and its shares."""

from collections import Counter
from itertools import product

import pytest
import torch

from pyparallel.compression import PermK
from pyparallel.compression.layout import BufferLayout
from pyparallel.compression.sparsifiers.permutation import Permutation

CPU = torch.device("cpu")
CASES = [(0, 3), (1, 3), (7, 3), (50, 4), (1000, 4), (1037, 3), (64, 1)]


def draw(numel, num_ranks, seed=0, step=1, run_length=32, name="buffer"):
    return Permutation(seed, run_length).draw(BufferLayout.flat(numel, name), step, num_ranks, CPU)


def test_shares_are_disjoint_and_cover_the_buffer(subtests):
    for (numel, num_ranks), run_length in product(CASES, [1, 32]):
        with subtests.test(f"{numel} {num_ranks} {run_length}"):
            order = draw(numel, num_ranks, run_length=run_length)
            places = torch.arange(numel)
            shares = [order.take(places, share) for share in range(num_ranks)]
            assert torch.cat(shares).sort().values.equal(places)
            lengths = [len(share) for share in shares]
            known = Permutation(0, run_length).shares(numel, num_ranks)
            assert lengths == [known.length(share) for share in range(num_ranks)]
            assert max(lengths) == known.longest
            assert sorted(order.share_of(rank) for rank in range(num_ranks)) == list(
                range(num_ranks)
            )


def test_draws_depend_on_seed_step_and_names_only():
    def who(**options):
        return draw(1000, 4, **options).runs.tolist()

    assert who() == who()
    assert all(who() != who(**other) for other in [{"seed": 1}, {"step": 2}, {"name": "other"}])


def test_all_permutations_of_few_entries_are_equally_likely():
    num_draws = 1200
    seen = Counter()
    for step in range(num_draws):
        order = draw(3, 3, step=step, run_length=1)
        owners = [int(order.take(torch.arange(3), order.share_of(rank))) for rank in range(3)]
        seen[tuple(owners)] += 1
    assert len(seen) == 6
    deviation = (num_draws * (1 / 6) * (5 / 6)) ** 0.5
    assert all(abs(count - num_draws / 6) < 5 * deviation for count in seen.values())


def test_runs_are_whole(subtests):
    for run_length in [0, -1, 1.5]:
        raises = pytest.raises(ValueError, match="run_length must be a positive integer")
        with subtests.test(str(run_length)), raises:
            PermK(run_length=run_length)
