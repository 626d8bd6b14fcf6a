"""``python -m benchmarks.gossip.scale [--methods ...] [--ranks 4 8 16 32] [--seeds 0 1 2]``.

SGP on many ranks, in one process: the replicas' parameters are rows of one tensor, their gradients
are computed by ``torch.func.vmap``, and a round multiplies them by a topology's mixing matrix. A
network that predicts a byte of Python's standard library from the eight before it; all runs see
2^19 windows, 32 at a time on each rank, so that more ranks take fewer steps, at the rate of one
rank times their number, or times its root, with a warm-up. Beside one peer a round: two, and three
hybrids with all ranks: in the first third, in the last tenth, or every eighth round (Gossip-PGA,
Chen et al., arXiv 2105.09080).

Rows go to ``benchmarks/results/scale.csv``: held-out loss of the average, in bits a byte, the
greatest of a rank's own, and the ranks' distance from the average before the last tenth.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from benchmarks.gossip.table import scale
from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.pipeline.tasks import load_text
from pyparallel.gossip.algorithms.sgp import sgp
from pyparallel.gossip.topology import Complete, OnePeerExponential, Phases, Topology

FIELDS = [
    "method", "scaling", "ranks", "seed", "rate", "steps", "windows", "parameters", "held_out_bits",
    "worst_bits", "distance", "machine", "torch", "commit",
]  # fmt: skip
CONTEXT, BATCH, WINDOWS, HELD_OUT = 8, 32, 1 << 19, 1 << 14
RATE, MOMENTUM, WARM_UP = 0.02, 0.9, 0.1  # of one rank; part of the steps with a rising rate
BITS = 1 / math.log(2)

METHODS: dict[str, Callable[[int, int], Topology]] = {
    "all-reduce": lambda n, steps: Complete(n),
    "one peer": lambda n, steps: OnePeerExponential(n),
    "two peers": lambda n, steps: OnePeerExponential(n, peers=2),
    "all-reduce for a third, then one peer": lambda n, steps: Phases(
        [(Complete(n), steps // 3), (OnePeerExponential(n), None)]
    ),
    "one peer, then all-reduce for a tenth": lambda n, steps: Phases(
        [(OnePeerExponential(n), steps - steps // 10), (Complete(n), None)]
    ),
    "Gossip-PGA, every eighth": lambda n, steps: Phases(
        [(OnePeerExponential(n), 7), (Complete(n), 1)]
    ),
}
SCALINGS: dict[str, Callable[[int], float]] = {"linear": float, "root": math.sqrt}


class Run(NamedTuple):
    """One training."""

    method: str
    scaling: str
    ranks: str
    seed: int
    windows: int = WINDOWS

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self[:-1]))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    chosen = options.ranks, options.scalings, options.seeds, options.methods
    for ranks, scaling, seed, method in product(*chosen):
        yield Run(method, scaling, ranks, seed)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(),
        nn.Linear(128, 256),
    )  # fmt: skip


class Replicas:
    """The replicas of a model, equal at first; what SGP takes is their parameters, (n, d)."""

    def __init__(self, num_ranks: int) -> None:
        self.model = build()
        stacked, _ = stack_module_state([self.model] * num_ranks)
        self.sizes = {name: each[0].numel() for name, each in stacked.items()}
        self.shapes = {name: each.shape[1:] for name, each in stacked.items()}
        self.x = torch.cat([each.detach().flatten(1) for each in stacked.values()], 1)
        self.weight = torch.ones(num_ranks, 1)
        self.momentum = torch.zeros_like(self.x)
        self._gradients = vmap(grad(self.loss))

    def loss(self, flat: Tensor, windows: Tensor) -> Tensor:
        """Return the loss of parameters, (d,), for windows, (k, CONTEXT + 1)."""
        parts = zip(self.sizes, flat.split(list(self.sizes.values())), strict=True)
        parameters = {name: part.view(self.shapes[name]) for name, part in parts}
        return cross_entropy(
            functional_call(self.model, parameters, windows[:, :-1]), windows[:, -1]
        )

    def step(self, windows: Tensor, rate: float, mixing: Tensor) -> None:
        """Take a step of every replica on its windows, (n, k, CONTEXT + 1), and a round."""

        def update(z: Tensor) -> Tensor:
            self.momentum.mul_(MOMENTUM).add_(self._gradients(z, windows))
            return rate * self.momentum

        self.x, self.weight = sgp(self.x, self.weight, update, mixing)

    def bits(self, windows: Tensor) -> tuple[float, float]:
        """Return the loss of the average, and the greatest of a replica, in bits."""
        with torch.no_grad():
            own = [float(self.loss(each, windows)) for each in self.x / self.weight]
            return BITS * float(self.loss(self.x.mean(0), windows)), BITS * max(own)

    def distance(self) -> float:
        """Return the replicas' root mean square distance from the average, relative to its norm."""
        z, mean = self.x / self.weight, self.x.mean(0)
        return float((z - mean).square().sum(1).mean().sqrt() / mean.norm())


def draw(text: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    begins = torch.randint(len(text) - CONTEXT, shape, generator=generator)
    return text[begins[..., None] + torch.arange(CONTEXT + 1)].long()


def perform(run: Run) -> Row:
    torch.manual_seed(run.seed)
    num_ranks, generator = int(run.ranks), torch.Generator().manual_seed(run.seed)
    (text, held_out), replicas = load_text(), Replicas(num_ranks)
    steps = run.windows // (BATCH * num_ranks)
    topology = METHODS[run.method](num_ranks, steps)
    most, distance = RATE * SCALINGS[run.scaling](num_ranks), 0.0
    for index in range(steps):
        if index == steps - steps // 10:
            distance = replicas.distance()
        windows = draw(text, (num_ranks, BATCH), generator)
        mixing = torch.from_numpy(topology.mixing_matrix(index)).float()
        replicas.step(windows, most * rate_at(index, steps, WARM_UP), mixing)
    bits, worst = replicas.bits(draw(held_out, (HELD_OUT,), torch.Generator().manual_seed(0)))
    return {
        "rate": f"{most:g}",
        "steps": steps,
        "windows": run.windows,
        "parameters": replicas.x.shape[1],
        "held_out_bits": f"{bits:.5f}",
        "worst_bits": f"{worst:.5f}",
        "distance": f"{distance:.5f}",
        "machine": machine(),
    }


if __name__ == "__main__":
    rows = RunRows(RESULTS / "scale.csv", FIELDS, num_keys=4)
    choices = {"methods": list(METHODS), "ranks": ["4", "8", "16", "32"], "scalings": [*SCALINGS]}
    compare("gossip.scale", __doc__, rows, find_runs, perform, scale, range(3), **choices)
