"""The collectives that averages of messages are made of, on one process group, with their bytes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .comm_stats import CommStats

# The second is its name in torch before 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_EMPTY_IS_UNSAFE = 1  # elements: gloo has hung on collectives of none, so one always travels


class Collectives:
    """A process group, as averages of messages need it.

    Every call is waited for: on gloo by the caller, on NCCL by the current stream alone. float8 is
    to be sent as uint8; all other dtypes of messages travel as they are.

    Args:
        group: the process group; None: the default one.
        meter: what counts bytes and seconds; None: a new one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, stats: CommStats | None = None
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.stats = stats or CommStats()

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum over ranks, in place; float32 on the way for what is narrower."""
        self.stats.count(tensor, 2 * (self.size - 1) / self.size)
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor by that of one rank, in place; of one length on all."""
        self.stats.count(tensor, (self.size - 1) / self.size)
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=source)

    def all_to_all(
        self, tensor: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]
    ) -> Tensor:
        """Hand part i of a flat tensor to rank i; what all ranks hand to this one, in their order.

        Args:
            tensor: (sum(sizes_out),).
            sizes_out: the lengths of the parts.
            sizes_in: the lengths of what comes.
        """
        kept = sizes_out[self.rank] / max(1, sum(sizes_out))
        self.stats.count(tensor, 1 - kept)
        received = tensor.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, tensor, list(sizes_in), list(sizes_out), group=self.group)
        return received

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(size, n): the tensors (n,) of all ranks, of one length on all."""
        self.stats.count(tensor, self.size - 1)
        gathered = tensor.new_empty(self.size * tensor.numel())
        if tensor.numel():
            _gather(gathered, tensor, group=self.group)
        return gathered.view(self.size, tensor.numel())

    def all_gather_uneven(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """By rank: the flat tensors of all ranks, as many and of the same dtypes on all.

        Lengths may differ, and be 0: they travel first.
        """
        lengths = torch.tensor([each.numel() for each in tensors], device=tensors[0].device)
        all_lengths = self.all_gather(lengths).tolist()
        gathered = [
            self._gather_padded(tensor, [each[index] for each in all_lengths])
            for index, tensor in enumerate(tensors)
        ]
        return list(zip(*gathered, strict=True))

    def _gather_padded(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        longest = max(*lengths, _EMPTY_IS_UNSAFE)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor
        rows = self.all_gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
