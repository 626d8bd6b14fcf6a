"""Small models, their data, and steps of a user's loop."""

import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.topology import Complete, OnePeerExponential

ALGORITHMS = [SGP(OnePeerExponential(2)), SGP(Complete(2)), AllReduce()]
SMOOTH = {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# --------------------------------------------------------------------- training with fixed batches


def build_model(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batches(rank, num_steps, size=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(num_steps):
        yield tuple(torch.randn(size, width, generator=generator).to(dtype) for width in (6, 3))


def train(model, optimizer, data, forward=None):
    """Return the parameters after training on the data."""
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss((forward or model)(inputs), targets).backward()
        optimizer.step()
    return flat(model)


def start(
    algorithm, make_optimizer=torch.optim.SGD, lr=0.05, cap=25.0, dtype=torch.float32, **options
):
    """Return a model, its optimizer and the trainer."""
    model = build_model(dtype)
    optimizer = make_optimizer(model.parameters(), lr=lr, **options)
    return model, optimizer, GossipDataParallel(model, optimizer, algorithm, bucket_cap_mb=cap)


def train_wrapped(algorithm, data, make_optimizer=torch.optim.SGD, **options):
    model, optimizer, wrapped = start(algorithm, make_optimizer, **options)
    return train(model, optimizer, data, forward=wrapped)


def train_alone(data, make_optimizer=torch.optim.SGD, **options):
    model = build_model()
    return train(model, make_optimizer(model.parameters(), lr=0.05, **options), data)


def error_of(call, *arguments):
    """Return the type and the text of the error that a call raises, or None."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# ------------------------------------------------------------------------ single steps of any model


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
