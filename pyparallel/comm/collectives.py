"""Collectives of one process group that count bytes, as averaging of compressed messages needs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .comm_stats import CommStats

# torch before 2.13 has the second name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MIN_GATHERED = 1  # elements: gloo has hung on empty collectives, so at least one is sent


class Collectives:
    """Collectives of one process group, with their bytes counted.

    Every call is synchronous: on gloo the host waits, on NCCL only the current stream. Send float8
    as uint8; all other message dtypes are sent as they are.

    Args:
        group: the process group; None: the default group.
        stats: counts bytes and seconds; None: a new one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, stats: CommStats | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.stats = stats or CommStats()

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks in place. Pass float32 for narrower dtypes."""
        self.stats.count(tensor, 2 * (self.size - 1) / self.size)
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor in place by that of one rank; the same length on all ranks."""
        self.stats.count(tensor, (self.size - 1) / self.size)
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=source)

    def all_to_all(
        self, tensor: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]
    ) -> Tensor:
        """Send part i of a flat tensor to rank i; return the received parts in rank order.

        Args:
            tensor: (sum(sizes_out),).
            sizes_out: lengths of the parts to send.
            sizes_in: lengths of the parts to receive.
        """
        kept = sizes_out[self.rank] / max(1, sum(sizes_out))
        self.stats.count(tensor, 1 - kept)
        received = tensor.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, tensor, list(sizes_in), list(sizes_out), group=self.group)
        return received

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather tensors (n,) of the same length from all ranks into (size, n)."""
        self.stats.count(tensor, self.size - 1)
        gathered = tensor.new_empty(self.size * tensor.numel())
        if tensor.numel():
            _gather(gathered, tensor, group=self.group)
        return gathered.view(self.size, tensor.numel())

    def all_gather_uneven(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Gather flat tensors of different lengths; return one tuple per rank.

        All ranks pass as many tensors, of the same dtypes. Lengths are sent first and may be 0.
        """
        lengths = torch.tensor([each.numel() for each in tensors], device=tensors[0].device)
        all_lengths = self.all_gather(lengths).tolist()
        gathered = [
            self._gather_padded(tensor, [each[index] for each in all_lengths])
            for index, tensor in enumerate(tensors)
        ]
        return list(zip(*gathered, strict=True))

    def _gather_padded(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        longest = max(*lengths, _MIN_GATHERED)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor
        rows = self.all_gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
