"""A random permutation of a buffer, the same on all ranks and cut into shares."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import BufferLayout
from ..state import CompressorState


@dataclass(frozen=True)
class Permutation:
    """How a permutation is drawn and cut into shares; arguments are those of `PermK`."""

    seed: int
    run_length: int

    def shares(self, numel: int, num_ranks: int) -> "Shares":
        """Return the lengths of the shares, which do not depend on the draw."""
        return Shares(numel, num_ranks, self.run_length)

    def draw(
        self, layout: BufferLayout, step: int, num_ranks: int, device: torch.device
    ) -> "Order":
        """Return the permutation of a buffer at a step, the same on all ranks.

        Drawn on the host, also for GPUs, which copy it from pinned memory: no host waits.
        """
        seed = CompressorState(layout).seed(self.seed, shared=True)
        # manual_seed uses 32 bits of its argument.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{step}".encode()))
        shares = self.shares(layout.numel, num_ranks)
        rotation = int(torch.randint(num_ranks, (), generator=generator, device="cpu"))
        runs = torch.randperm(shares.num_runs, generator=generator, device="cpu")
        if device.type == "cuda":
            runs = runs.pin_memory()
        on_device = runs.to(device, non_blocking=True)
        return Order(layout.numel, num_ranks, self.run_length, on_device, rotation)


@dataclass(frozen=True)
class Shares:
    """The lengths of the shares: whole runs, and in the last share the remainder."""

    numel: int
    num_ranks: int
    longest_run: int

    @property
    def run_length(self) -> int:
        """Number of entries in a run."""
        return max(1, min(self.longest_run, self.numel // self.num_ranks))

    @property
    def num_runs(self) -> int:
        """Number of runs in the buffer."""
        return self.numel // self.run_length

    def bounds(self, share: int) -> tuple[int, int]:
        """Return the range of a share's runs in the permutation."""
        first, last = (s * self.num_runs // self.num_ranks for s in (share, share + 1))
        return first, last

    def has_rest(self, share: int) -> bool:
        """Return whether a share has the remainder that does not fill a run."""
        return share == self.num_ranks - 1

    @property
    def longest(self) -> int:
        """Length of the longest share."""
        return max(self.length(share) for share in range(self.num_ranks))

    def length(self, share: int) -> int:
        """Return the number of entries in a share."""
        first, last = self.bounds(share)
        rest = self.numel - self.num_runs * self.run_length if self.has_rest(share) else 0
        return (last - first) * self.run_length + rest


@dataclass(frozen=True)
class Order(Shares):
    """A drawn permutation of the runs, and the rotation of ranks against shares.

    Shares differ in length by about a run: the rotation gives all ranks the same probabilities.
    """

    runs: Tensor
    rotation: int

    def share_of(self, rank: int) -> int:
        """Return the share of a rank."""
        return (rank + self.rotation) % self.num_ranks

    def take(self, flat: Tensor, share: int) -> Tensor:
        """Return a copy of a share of a buffer."""
        first, last = self.bounds(share)
        chosen = self._in_runs(flat).index_select(0, self.runs[first:last]).view(-1)
        return torch.cat([chosen, self._rest(flat)]) if self.has_rest(share) else chosen

    def put_(self, flat: Tensor, values: Tensor, share: int) -> None:
        """Write a share into a buffer."""
        first, last = self.bounds(share)
        split = (last - first) * self.run_length
        rows = values[:split].view(-1, self.run_length).to(flat.dtype)
        self._in_runs(flat).index_copy_(0, self.runs[first:last], rows)
        if self.has_rest(share):
            self._rest(flat).copy_(values[split:])

    def _in_runs(self, flat: Tensor) -> Tensor:
        return flat[: self.num_runs * self.run_length].view(self.num_runs, self.run_length)

    def _rest(self, flat: Tensor) -> Tensor:
        return flat[self.num_runs * self.run_length :]
