"""torch's optimizers make the correction that the schedule needs."""

import torch
from torch import nn
from torch.optim import SGD

from pyparallel.pipeline import Kind, Nesterov, PipelineShape


def test_torchs_nesterov_momentum_is_the_papers_look_ahead_on_stale_gradients():
    # d = u * (w - last w); next w = w + d - lr * (1 - u) * g, g at the w + d of its forward.
    rate, u, curvature = 0.3, 0.9, torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = SGD([parameter], lr=rate * (1 - u), momentum=u, nesterov=True)
    now = last = parameter.detach().clone()
    read, ahead = {}, {}
    for action in Nesterov().rank_actions(PipelineShape(4, 30, 4), rank=0):
        if action.kind is Kind.FORWARD:
            read[action.microbatch] = parameter.detach().clone()
            ahead[action.microbatch] = now + u * (now - last)
        elif action.kind is Kind.UPDATE:
            parameter.grad = curvature * read[action.microbatch]
            optimizer.step()
            stale = curvature * ahead[action.microbatch]
            now, last = now + u * (now - last) - rate * (1 - u) * stale, now
            torch.testing.assert_close(parameter.detach(), now + u * (now - last))
    assert len(read) == 30
    assert not torch.equal(parameter, read[0])
