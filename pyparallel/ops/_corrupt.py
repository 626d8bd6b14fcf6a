"""Handling of corrupt message entries, which no peer's encoder produces: messages are not trusted.

On the CPU an op raises before it writes anything. On other devices, to avoid a host
synchronization, it skips corrupt entries and adds their number to a counter on the device: the
caller's, or that of all calls without one on a GPU, which a later call reads and raises.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._checks import check_tensor, has_memory


class CorruptCounter:
    """Count corrupt entries on a GPU, where the host can read the count without synchronizing.

    The count lies in pinned memory of the host, which kernels address like their own: only a
    corrupt entry costs an access over the bus. On the CPU it is a plain tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host, self.tensor = _host_visible_zero(device)
        self._num_reported = 0

    def num_counted(self) -> int:
        """Return how many corrupt entries the kernels that have run by now have found."""
        return int(self._on_host)

    def num_unreported(self) -> int:
        """Return how many have been found since the last call."""
        count = self.num_counted()
        found, self._num_reported = count - self._num_reported, count
        return found


class _HostVisible:
    """Pinned memory as a CUDA array; see https://numba.readthedocs.io, "CUDA Array Interface"."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned  # kept alive by the tensor that is made of this
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i8",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }


@torch.inference_mode(False)  # decodes outside of it write to the counter, too
def _host_visible_zero(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a 0-d int64 zero as a tensor on the host and as one on the device: the same memory."""
    if device.type != "cuda":
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return zero, zero
    with torch.cuda.device(device):
        pinned = torch.zeros((), dtype=torch.int64, pin_memory=True, device="cpu")
        return pinned, torch.as_tensor(_HostVisible(pinned), device=device)


_counters: dict[torch.device, CorruptCounter] = {}  # of calls without a counter, by GPU


class _Thread(threading.local):
    only_counts = False

    @contextmanager
    def only_counting(self) -> Iterator[None]:
        """Have calls without a counter not raise what earlier ones have counted, in this thread."""
        before, self.only_counts = self.only_counts, True
        try:
            yield
        finally:
            self.only_counts = before


_thread = _Thread()
only_counting = _thread.only_counting


def raise_if_counted(device: torch.device, *, wait: bool = False) -> None:
    """Raise a RuntimeError if calls without a counter have found corrupt entries on a GPU.

    Once for the entries found since the last error. ``wait`` for the current stream's kernels; else
    only those that have run are asked.
    """
    counter = _counters.get(device)
    if counter is None:
        return
    if wait:
        torch.cuda.current_stream(device).synchronize()
    if count := counter.num_unreported():
        raise RuntimeError(
            f"messages must be made by their encoder, got {count} corrupt entries on {device} in "
            "messages decoded earlier, which were left out"
        )


def corrupt_counter(corrupt: Tensor | None, like: Tensor) -> Tensor:
    """Return the caller's counter, or the one of all calls without on the device of `like`.

    The latter is an error if it has counted on this GPU since the last one.
    """
    if corrupt is None:
        if not _is_counted(like):
            return torch.scalar_tensor(0, dtype=torch.int64, device=like.device)
        if not _thread.only_counts:
            raise_if_counted(like.device)
        if like.device not in _counters:
            _counters[like.device] = CorruptCounter(like.device)
        return _counters[like.device].tensor
    check_tensor("corrupt", corrupt, torch.int64, (), like.device)
    return corrupt


def _is_counted(like: Tensor) -> bool:
    """Return whether the host can read a counter later: not in a compiled function."""
    return like.is_cuda and has_memory(like)


def stop_if_corrupt(corrupt: Tensor | None, counter: Tensor, error_text: str) -> None:
    """Assert on the device that no entry was corrupt where no later call reads the counter."""
    if corrupt is None and not (counter.is_cpu or _is_counted(counter)):
        torch._assert_async(counter == 0, error_text)


def refuse_or_count(is_corrupt: Tensor, counter: Tensor, error_text: str) -> None:
    """Raise a RuntimeError on the CPU, before writing, if any entry is corrupt; a GPU counts."""
    if counter.is_cpu:
        torch._assert_async(~is_corrupt.any(), error_text)
    else:
        counter.add_(is_corrupt.sum())
