"""Random numbers of a rank's stages, apart from those of the caller."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..schedules.action import Action, Kind
from .preserve_state import default_generators, restoring


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
        self._generators = default_generators(tensors)
        self._call = self._num_evaluations = 0  # a checksum of the call; calls since the last step

    def resume(self, seed: int) -> None:
        """Go on with the seed of a saved run."""
        self.seed = seed

    @contextmanager
    def of_call(self, step: int, *, trains: bool) -> Iterator[None]:
        """Restore the generators after a call; those of updates and backwards begin with it."""
        self._num_evaluations = 0 if trains else self._num_evaluations + 1
        call = f"{self.seed}/{self._replica}/{step}/{self._num_evaluations}"
        self._call = zlib.crc32(call.encode())
        with restoring(self._generators):
            for generator in self._generators:
                generator.manual_seed(self._call)
            yield

    def seed_for(self, action: Action, num_microbatches: int) -> None:
        """Begin the random numbers of a forward or of a head; other actions go on with theirs."""
        if action.kind in (Kind.FORWARD, Kind.HEAD):
            stage = 2 * action.stage + (action.kind is Kind.HEAD)
            place = 1 + stage * num_microbatches + action.microbatch % num_microbatches
            # An odd factor: of two places none has the other's 32 bits, which the CPU uses.
            number = (self._call + 0x9E3779B1 * place) % 2**32
            for generator in self._generators:
                generator.manual_seed(number)
