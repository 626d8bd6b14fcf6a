"""Small trainers of every kind, each with the function that takes a step of it."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.compression import Int8, compress_ddp
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import Complete
from pyparallel.pipeline import PipeOptim
from pyparallel.subnets import Partition


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def backward(module):
    module(torch.ones(2, 4)).sum().backward()


def gossip(algorithm=None):
    """Return the trainer, SGP with overlap by default, and its step."""
    module = nn.Linear(4, 4)
    optimizer = sgd(module.parameters())
    algorithm = algorithm or SGP(Complete(2), overlap=1)
    trainer = GossipDataParallel(module, optimizer, algorithm)
    return trainer, lambda: (backward(trainer), optimizer.step())


def pipeline(schedule=None, num_layers=2, **options):
    """Return the trainer, PipeOptim by default, and its step."""
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    loss, schedule = nn.functional.mse_loss, schedule or PipeOptim()
    trainer = PipelineTrainer(layers, loss, sgd, schedule, num_microbatches=2, **options)
    batch = torch.ones(4, 4)
    return trainer, lambda: trainer.step(batch, batch)


def subnets():
    """Return the trainer and its step."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    trainer = SubnetTrainer(layers, sgd, Partition(), interval=1)
    return trainer, lambda: (backward(trainer), trainer.optimizer.step())


def hook(compressor=None, **options):
    """Return the state of DDP's hook, of Int8 by default, and the step."""
    replica = DistributedDataParallel(nn.Linear(4, 4), **options)
    state = compress_ddp(replica, compressor or Int8())
    return state, lambda: backward(replica)
