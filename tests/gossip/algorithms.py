"""Every algorithm, for the tests that must hold for all of them: each row makes one for n ranks."""

import torch

from pyparallel.gossip import DPSGD, SGP, AllReduce, DiLoCo, LocalSGD, SlowMo
from pyparallel.gossip.topology import BaseGraph, OnePeerExponential, Ring, Star


def outer_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


EVERY_ALGORITHM = {
    "sgp": lambda n: SGP(OnePeerExponential(n)),
    "sgp-star": lambda n: SGP(Star(n)),
    "osgp": lambda n: SGP(OnePeerExponential(n), overlap=1),
    "osgp-3": lambda n: SGP(BaseGraph(n), overlap=3),
    "dpsgd": lambda n: DPSGD(Ring(n)),
    "localsgd": lambda n: LocalSGD(interval=3),
    "slowmo": lambda n: SlowMo(SGP(OnePeerExponential(n), overlap=1), interval=4, momentum=0.4),
    "diloco": lambda n: DiLoCo(interval=3),
    "diloco-adam": lambda n: DiLoCo(interval=2, outer_optimizer=outer_adam),
    "allreduce": lambda n: AllReduce(),
}
