"""A small model, wrapped, and one step of a user's loop."""

import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.topology import Complete, OnePeerExponential

ALGORITHMS = [SGP(OnePeerExponential(2)), SGP(Complete(2)), AllReduce()]


def wrap(algorithm, model=None, lr=0.1, **options):
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return GossipDataParallel(model, optimizer, algorithm, **options), optimizer


def step(model, optimizer, dtype=torch.float32):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4, dtype=dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def take_step(averager, optimizer=None):
    """Take a step as the trainer does, without a module; without an optimizer nothing changes."""
    averager.before_step()
    averager.before_update()
    if optimizer is not None:
        optimizer.step()
    averager.after_update()
    averager.after_step()
