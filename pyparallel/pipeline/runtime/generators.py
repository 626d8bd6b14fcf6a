"""Random numbers of a rank's stages, apart from those of the caller."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..schedules.action import Action, Kind
from .preserve_state import forked_generators


class StageGenerators:
    """Seeds torch's generators for the stages while a call runs, and restores them after it.

    A microbatch's forward on a stage, and its head, begin with a seed of their own, by the run's
    ``seed``, the replica, the stage, the step and the microbatch. So dropout is the same in every
    schedule and on any number of ranks, and a resumed run needs no saved generators. Calls that do
    not train have seeds apart from those of steps. Generators of Python and NumPy stay the
    caller's.
    """

    def __init__(self, seed: int, replica: int | None, modules: Iterable[nn.Module]) -> None:
        self.seed = seed
        self._replica = replica
        tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
        self._tensors = {tensor.device: tensor for tensor in tensors}  # one on each device
        self._generators: list[torch.Generator] = []  # of a call, seeded by its forwards
        self._step = self._num_evaluations = 0  # of them since the last step

    def resume(self, seed: int) -> None:
        """Go on with the seed of a saved run."""
        self.seed = seed

    @contextmanager
    def of_call(self, step: int, *, trains: bool) -> Iterator[None]:
        """Restore the generators after a call; those of updates and backwards begin with it."""
        self._step = step
        self._num_evaluations = 0 if trains else self._num_evaluations + 1
        with forked_generators(self._tensors.values()) as self._generators:
            self._seed("call")
            yield

    def seed_for(self, action: Action, num_microbatches: int) -> None:
        """Begin the random numbers of a forward or of a head; other actions go on with theirs."""
        if action.kind in (Kind.FORWARD, Kind.HEAD):
            microbatch = action.microbatch % num_microbatches
            self._seed(f"{action.kind.name}/{action.stage}/{microbatch}")

    def _seed(self, what: str) -> None:
        place = f"{self.seed}/{self._replica}/{self._step}/{self._num_evaluations}/{what}"
        number = zlib.crc32(place.encode())  # the CPU's generator uses 32 bits
        for generator in self._generators:
            generator.manual_seed(number)
