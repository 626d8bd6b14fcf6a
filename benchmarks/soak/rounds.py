"""PushSum rounds over gloo: what they hold, and whether the total mass stays what it was."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.soak.watch import Sample, watch
from pyparallel import GossipDataParallel
from pyparallel.compression import Int8
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import DirectedLinear, OnePeerExponential, Star

NUMELS = (1000, 333)  # of the parameters, each in a bucket of its own
# Relative, of each round: it rounds weights to float64, and elements to float32.
BOUNDS = {
    "weight_error": torch.finfo(torch.float64).eps,
    "sum_error": torch.finfo(torch.float32).eps,
}


@dataclass(frozen=True)
class Case:
    """An algorithm for a number of ranks, and those numbers."""

    make_algorithm: Callable[[int], SGP]
    ranks: tuple[int, ...] = (4,)


CASES = {
    "Star": Case(lambda n: SGP(Star(n)), (3, 4)),
    "Star, Int8": Case(lambda n: SGP(Star(n), compressor=Int8()), (3,)),
    "Star, overlap=2": Case(lambda n: SGP(Star(n), overlap=2)),
    "DirectedLinear": Case(lambda n: SGP(DirectedLinear(n)), (3,)),
    "DirectedLinear, Int8": Case(lambda n: SGP(DirectedLinear(n), compressor=Int8())),
    "OnePeerExponential": Case(lambda n: SGP(OnePeerExponential(n))),
    "OnePeerExponential, Int8": Case(lambda n: SGP(OnePeerExponential(n), compressor=Int8())),
}


def find_problems(errors: Mapping[str, float], rounds: int) -> list[str]:
    """Return what is not conserved; errors may grow as rounding does."""
    return [
        f"{key} is {error:.1e}, its bound {rounds * BOUNDS[key]:.1e}"
        for key, error in errors.items()
        if not error <= rounds * BOUNDS[key]
    ]


def run(rank: int, case: str, rounds: int) -> tuple[list[Sample], dict[str, float]]:
    averaged = Rounds(CASES[case].make_algorithm(dist.get_world_size()))
    samples = watch(averaged.step, rounds)
    return samples, averaged.errors()


class Rounds:
    """SGP on elements whose gradients are given: their sum is known in float64."""

    def __init__(self, algorithm: SGP) -> None:
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        values = [torch.randn(numel, generator=self._generator) for numel in NUMELS]
        module = nn.ParameterList(values)
        optimizer = torch.optim.SGD(module.parameters(), lr=2.0**-10)
        self._model = GossipDataParallel(module, optimizer, algorithm, bucket_cap_mb=1e-3)
        self._optimizer, self._parameters = optimizer, list(module)
        with torch.no_grad():  # rank 0 has broadcast its own
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        self._sums = [value.double() for value in values]

    def step(self, index: int) -> None:
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=self._generator)
            total.sub_(parameter.grad.double(), alpha=2.0**-10)
        self._optimizer.step()

    def errors(self) -> dict[str, float]:
        """Return how far the total mass is off; the same on all ranks, which call it together.

        Returns:
            ``weight_error`` of the sum over ranks of w, relative to the number of ranks, and
            ``sum_error`` of the sum over ranks of w * z: the largest of an element, relative to the
            largest element.
        """
        self._model.flush()
        weight = self._model.push_sum_weight.clone()
        held = torch.cat([p.detach().double() for p in self._parameters]) * weight
        wanted = torch.cat(self._sums)
        for tensor in (weight, held, wanted):
            dist.all_reduce(tensor)
        return {
            "weight_error": abs(float(weight) / dist.get_world_size() - 1),
            "sum_error": float((held - wanted).abs().max() / wanted.abs().max()),
        }
