"""What becomes of entries that no peer can have sent: a message is never trusted.

On the CPU an op raises before it writes anything. Elsewhere nobody may wait for the device, so the
op skips such entries and adds their number to a counter there.
"""

import torch
from torch import Tensor

from ._checks import describe


def corrupt_counter(corrupt: Tensor | None, model: Tensor) -> Tensor:
    """The caller's counter, or one of our own, beside the model.

    Raises:
        ValueError: a counter that is not a 0-d int64 tensor on the model's device.
    """
    if corrupt is None:
        return torch.zeros((), dtype=torch.int64, device=model.device)
    if corrupt.dtype != torch.int64 or corrupt.dim() != 0 or corrupt.device != model.device:
        raise ValueError(
            f"corrupt must be a 0-d int64 tensor on {model.device}, got {describe(corrupt)}"
        )
    return corrupt


def stop_if_corrupt(corrupt: Tensor | None, counter: Tensor, sentence: str) -> None:
    """After an op whose caller does not count: stop the device, at its next synchronization."""
    if corrupt is None and counter.device.type != "cpu":
        torch._assert_async(counter == 0, sentence)


def refuse_or_count(is_corrupt: Tensor, counter: Tensor, sentence: str) -> None:
    """What a reference does before it writes, given which entries are corrupt.

    Raises:
        RuntimeError: on the CPU, if any is.
    """
    if counter.device.type == "cpu":
        torch._assert_async(~is_corrupt.any(), sentence)
    else:
        counter.add_(is_corrupt.sum())
