"""The collectives of subnet training, with errors that name the rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import DisagreementError, PeerError, check_consistent_across_ranks


class SubnetCollectives:
    """The collectives of a process group; without a process group, those of a single rank.

    Args:
        process_group: None means the default group, or a single rank if none was initialized.
        device: device of the tensors that are sent.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = process_group
        self.device = device
        is_alone = process_group is None and not dist.is_initialized()
        self.rank = 0 if is_alone else dist.get_rank(process_group)
        self.size = 1 if is_alone else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "process_group must contain this rank, got one without it; create the trainer on "
                "its ranks only"
            )
        self.bytes_sent = 0
        self._is_counting = True

    def check_consistent_across_ranks(
        self, config_fields: Sequence[tuple[str, str]], error_text: str | None
    ) -> None:
        """Raise the same error on all ranks if any rank has one or config fields differ."""
        if self.size > 1:
            with self._explain_errors():
                check_consistent_across_ranks(config_fields, error_text, self._group)
        elif error_text:
            raise DisagreementError(f"rank 0: {error_text}")

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of all ranks, by rank; all ranks give equally many."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(dist.all_gather, gathered, mine)
        return [theirs.tolist() for theirs in gathered]

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor on all ranks with that of rank ``source``."""
        if self.size == 1:
            return
        dense = tensor.contiguous()
        as_bytes = dense.view(-1).view(torch.uint8)  # gloo supports only some dtypes
        self._call(dist.broadcast, as_bytes, group_src=source)
        if dense is not tensor:
            tensor.copy_(dense)

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks, in place."""
        if self.size == 1:
            return
        self._call(dist.all_reduce, tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        self._count(2 * num_bytes * (self.size - 1) // self.size)  # ring all-reduce

    def all_to_all(self, sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send a piece to every rank and receive one from each, this rank included.

        Args:
            sent: (sum(send),) the pieces, in rank order.
            send: lengths of the pieces to send.
            receive: lengths of the pieces to receive.

        Returns:
            (sum(receive),) the received pieces, in rank order.
        """
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(receive))
        item_size = sent.element_size()  # as bytes: gloo supports only some dtypes
        self._call(
            dist.all_to_all_single,
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [length * item_size for length in receive],
            [length * item_size for length in send],
        )
        self._count(item_size * (sum(send) - send[self.rank]))
        return received

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the bytes sent inside the context out of ``bytes_sent``."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def _count(self, num_bytes: int) -> None:
        if self._is_counting:
            self.bytes_sent += num_bytes

    def _call(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with self._explain_errors():
            collective(*arguments, group=self._group, **options)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn a failed collective's error into a ``PeerError``."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()}: the exchange of subnets failed: a rank died or the "
                f"process group's timeout expired ({str(error).splitlines()[0]})"
            ) from error
