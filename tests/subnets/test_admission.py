"""What a rank says of its module; test_trainer.py has what it finds wrong with it."""

import torch
from torch import nn

from pyparallel.subnets.admission import describe, find_problem_of_optimizer


def test_every_parameter_and_buffer_is_a_fact():
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3, affine=False))
    module[0].weight.requires_grad_(False)
    assert describe(module) == [
        ("number of parameters and buffers", "4"),
        ("tensor 0", "0.weight float32 [3, 2] cpu frozen"),
        ("tensor 1", "1.running_mean float32 [3] cpu"),
        ("tensor 2", "1.running_var float32 [3] cpu"),
        ("tensor 3", "1.num_batches_tracked int64 [] cpu"),
    ]


def test_an_optimizer_is_over_what_it_was_given():
    parameters = list(nn.Linear(2, 2).parameters())
    assert find_problem_of_optimizer(torch.optim.SGD(parameters), parameters) is None
    more = torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(1))])
    assert "lacks 0 and has 1 others" in find_problem_of_optimizer(more, parameters)
