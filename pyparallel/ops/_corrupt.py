"""Handling of corrupt message entries, which no peer's encoder produces: messages are not trusted.

On the CPU an op raises before it writes anything. On other devices, to avoid a host
synchronization, it skips corrupt entries and adds their number to a counter on the device.
"""

import torch
from torch import Tensor

from ._checks import describe


def corrupt_counter(corrupt: Tensor | None, like: Tensor) -> Tensor:
    """Return the caller's counter, or a new one on the device of `like`.

    Raises:
        ValueError: a counter that is not a 0-d int64 tensor on the device of `like`.
    """
    if corrupt is None:
        return torch.scalar_tensor(0, dtype=torch.int64, device=like.device)
    if corrupt.dtype != torch.int64 or corrupt.dim() != 0 or corrupt.device != like.device:
        raise ValueError(
            f"corrupt must be a 0-d int64 tensor on {like.device}, got {describe(corrupt)}"
        )
    return corrupt


def stop_if_corrupt(corrupt: Tensor | None, counter: Tensor, error_text: str) -> None:
    """Assert on the device that no entry was corrupt, if the caller does not count them.

    The error is raised at the device's next synchronization.
    """
    if corrupt is None and not counter.is_cpu:
        torch._assert_async(counter == 0, error_text)


def refuse_or_count(is_corrupt: Tensor, counter: Tensor, error_text: str) -> None:
    """Raise on the CPU if any entry is corrupt; on other devices count them. Called before writing.

    Raises:
        RuntimeError: on the CPU, if any entry is corrupt.
    """
    if counter.device.type == "cpu":
        torch._assert_async(~is_corrupt.any(), error_text)
    else:
        counter.add_(is_corrupt.sum())
