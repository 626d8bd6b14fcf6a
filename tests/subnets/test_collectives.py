"""The collectives of subnets; over gloo they run in test_trainer.py."""

import pytest
import torch

from pyparallel.comm import DisagreementError
from pyparallel.subnets.collectives import SubnetCollectives


def test_one_rank_alone_needs_no_group():
    members = SubnetCollectives(None, torch.device("cpu"))
    tensor = torch.arange(3.0)
    members.broadcast_(tensor, 0)
    members.sum_(tensor)
    assert (members.rank, members.size, members.bytes_sent) == (0, 1, 0)
    assert tensor.tolist() == [0, 1, 2]
    assert members.exchange(tensor, [3], [3]) is tensor
    assert members.gather_numbers([4, 5]) == [[4, 5]]
    members.check_consistent_across_ranks([("seed", "0")], None)
    with pytest.raises(DisagreementError, match=r"^rank 0: it is wrong$"):
        members.check_consistent_across_ranks([], "it is wrong")
