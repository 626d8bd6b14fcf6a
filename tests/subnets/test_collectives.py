"""The collectives of subnets; over gloo they run in test_trainer.py."""

import pytest
import torch

from pyparallel.comm import DisagreementError
from pyparallel.subnets.collectives import SubnetCollectives


def test_one_rank_alone_needs_no_group():
    collectives = SubnetCollectives(None, torch.device("cpu"))
    tensor = torch.arange(3.0)
    collectives.broadcast_(tensor, 0)
    collectives.all_reduce_(tensor)
    assert (collectives.rank, collectives.size, collectives.bytes_sent) == (0, 1, 0)
    assert tensor.tolist() == [0, 1, 2]
    assert collectives.all_to_all(tensor, [3], [3]) is tensor
    assert collectives.all_gather_ints([4, 5]) == [[4, 5]]
    collectives.check_consistent_across_ranks([("seed", "0")], None)
    with pytest.raises(DisagreementError, match=r"^rank 0: it is wrong$"):
        collectives.check_consistent_across_ranks([], "it is wrong")
