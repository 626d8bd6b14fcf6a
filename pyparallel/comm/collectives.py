"""Collectives of one process group, with their bytes counted and errors that name rank and step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .consistency import all_gather_single as _gather
from .run import Run
from .stats import CommStats

_ALIGNMENT = 32  # bytes, of the widest loads of kernels
_MIN_GATHERED = 1  # elements: gloo has hung on empty collectives, so at least one is sent


class Collectives:
    """Collectives of one process group.

    Every call is synchronous: on gloo the host waits, on NCCL only the current stream. If a call
    fails, it raises a ``PeerError`` that names this rank and the step. ``run`` None: of the default
    group, or of a single rank if none was initialized. ``stats`` counts bytes and seconds.
    """

    def __init__(self, run: Run | None = None, stats: CommStats | None = None) -> None:
        self.run = run or Run()
        self.rank, self.size = self.run.group_rank, self.run.size
        self.stats = stats or CommStats()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group; None: the default group."""
        return self.run.group

    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks in place. Pass float32 for narrower dtypes."""
        self.stats.count(tensor, 2 * (self.size - 1) / self.size)
        if self.size > 1 and tensor.numel():
            self._run("all-reduce", dist.all_reduce, tensor)

    def start_all_reduce_(self, tensor: Tensor) -> Future[Any]:
        """Start ``all_reduce_``; pass its future to ``finish_all_reduce``."""
        self.stats.count(tensor, 2 * (self.size - 1) / self.size)
        started: list[Future[Any]] = []

        def start(group: dist.ProcessGroup | None) -> None:
            started.append(dist.all_reduce(tensor, group=group, async_op=True).get_future())

        if self.size > 1 and tensor.numel():
            self._run("all-reduce", start)
        else:
            started.append(Future())
            started[0].set_result(None)
        return started[0]

    def finish_all_reduce(self, future: Future[Any]) -> None:
        """Wait for an all-reduce, and raise its error as other calls do."""
        self._run("all-reduce", lambda group: future.wait())

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor of any dtype in place by that of one rank; the same shape on all."""
        self.stats.count(tensor, (self.size - 1) / self.size)
        if self.size > 1 and tensor.numel():
            dense = tensor.contiguous()
            as_bytes = dense.view(-1).view(torch.uint8)  # gloo supports only some dtypes
            self._run("broadcast", dist.broadcast, as_bytes, group_src=source)
            if dense is not tensor:
                tensor.copy_(dense)

    def all_to_all(
        self, tensor: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]
    ) -> Tensor:
        """Send part i of a flat tensor to rank i; return the received parts in rank order.

        Of any dtype. Parts that are not those of the tensor are a ValueError; nothing was sent.
        """
        if sum(sizes_out) != tensor.numel() or len(sizes_out) != self.size:
            raise ValueError(
                f"sizes_out must be of {self.size} parts of the tensor's {tensor.numel()} entries, "
                f"got {list(sizes_out)}"
            )
        self.stats.count(tensor, 1 - sizes_out[self.rank] / max(1, sum(sizes_out)))
        if self.size == 1:
            return tensor
        received = tensor.new_empty(sum(sizes_in))
        self._run(
            "all-to-all",
            dist.all_to_all_single,
            received.view(torch.uint8),  # as bytes: gloo supports only some dtypes
            tensor.view(torch.uint8),
            [length * tensor.element_size() for length in sizes_in],
            [length * tensor.element_size() for length in sizes_out],
        )
        return received

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather tensors (n,) of the same length from all ranks into (size, n), not of float8."""
        self.stats.count(tensor, self.size - 1)
        if self.size == 1:
            return tensor.clone().view(1, -1)
        gathered = tensor.new_empty(self.size * tensor.numel())
        if tensor.numel():
            self._run("all-gather", _gather, gathered, tensor)
        return gathered.view(self.size, tensor.numel())

    def all_gather_each(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Gather as ``all_gather_rows``; return one tuple per rank."""
        return list(zip(*self.all_gather_rows(tensors), strict=True))

    def all_gather_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors (n,), of one length on all ranks each, as one; return (size, n) each."""
        if len(tensors) == 1:
            return [self.all_gather(tensors[0])]
        kinds = tuple((tensor.numel(), tensor.dtype) for tensor in tensors)
        if not (width := packed_bytes(kinds)):
            return [each.expand(self.size, -1) for each in tensors]
        packed = tensors[0].new_zeros(width, dtype=torch.uint8)
        for part, each in zip(unpack(packed, kinds), tensors, strict=True):
            part.copy_(each)
            self.stats.count(each, self.size - 1)
        with self.uncounted():
            return unpack(self.all_gather(packed), kinds)

    def all_gather_uneven(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Gather flat tensors of different lengths, of one dtype each; return one tuple per rank.

        Lengths are sent first and may be 0. On NCCL the host waits for them.
        """
        lengths = int64_on(tensors[0].device, [each.numel() for each in tensors])
        all_lengths = self.all_gather(lengths).tolist()
        gathered = [
            self._gather_padded(tensor, [length[index] for length in all_lengths])
            for index, tensor in enumerate(tensors)
        ]
        return list(zip(*gathered, strict=True))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what is sent inside the context out of ``stats``, but not the time waited."""
        counted, self.stats = self.stats, CommStats()
        try:
            yield
        finally:
            counted.waiting_seconds += self.stats.waiting_seconds
            self.stats = counted

    def _gather_padded(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        longest = max(*lengths, _MIN_GATHERED)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor
        rows = self.all_gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _run(
        self, name: str, collective: Callable[..., Any], *arguments: Any, **options: Any
    ) -> None:
        try:
            with self.run.waiting(self.stats):
                collective(*arguments, group=self.run.group, **options)
        except RuntimeError as error:
            raise self.run.error(f"the {name} failed", error) from error


def int64_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Return numbers as (n,) int64; unlike with ``torch.tensor``, no host waits for a GPU."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    on_device = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for place, number in zip(on_device.unbind(), numbers, strict=True):
        place.fill_(number)
    return on_device


@lru_cache(1024)
def packed_bytes(kinds: tuple[tuple[int, torch.dtype], ...]) -> int:
    """Return how many bytes hold flat tensors of these lengths and dtypes, each aligned."""
    return sum([-(-length * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for length, dtype in kinds])


def unpack(packed: Tensor, kinds: tuple[tuple[int, torch.dtype], ...]) -> list[Tensor]:
    """Return views (..., length) of the tensors in bytes (..., packed_bytes), uint8."""
    return [
        packed.narrow(-1, packed_bytes(kinds[:index]), length * dtype.itemsize).view(dtype)
        for index, (length, dtype) in enumerate(kinds)
    ]
