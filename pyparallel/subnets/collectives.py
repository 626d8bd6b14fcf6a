"""The ranks that train subnets together: the collectives they need, with errors that say who."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import DisagreementError, PeerError, check_consistent_across_ranks


class SubnetCollectives:
    """The ranks of a process group; one rank alone where there is none.

    Args:
        process_group: None means the default group, or no group if none was made.
        device: where tensors that travel are.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = process_group
        self.device = device
        is_alone = process_group is None and not dist.is_initialized()
        self.rank = 0 if is_alone else dist.get_rank(process_group)
        self.size = 1 if is_alone else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "process_group must have this rank in it, got another; only its ranks train with it"
            )
        self.bytes_sent = 0
        self._is_counting = True

    def check_consistent_across_ranks(
        self, config_fields: Sequence[tuple[str, str]], problem: str | None
    ) -> None:
        """As ``comm.check_consistent_across_ranks``."""
        if self.size > 1:
            with self._naming():
                check_consistent_across_ranks(config_fields, problem, self._group)
        elif problem:
            raise DisagreementError(f"rank 0: {problem}")

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, as many of each."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(dist.all_gather, everyone, mine)
        return [theirs.tolist() for theirs in everyone]

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Let all ranks have the tensor of one."""
        if self.size == 1:
            return
        dense = tensor.contiguous()
        as_bytes = dense.view(-1).view(torch.uint8)  # gloo knows only some dtypes
        self._call(dist.broadcast, as_bytes, group_src=source)
        if dense is not tensor:
            tensor.copy_(dense)

    def sum_(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks."""
        if self.size == 1:
            return
        self._call(dist.all_reduce, tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        self._count(2 * num_bytes * (self.size - 1) // self.size)  # as around a ring

    def exchange(self, sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send a piece to every rank and receive one from each, this one among them.

        Args:
            sent: 1-d: the pieces in the order of the ranks.
            send: their lengths.
            receive: lengths of what comes.

        Returns:
            what came, in the order of the ranks.
        """
        if self.size == 1:
            return sent
        received = sent.new_empty(sum(receive))
        width = sent.element_size()  # as bytes: gloo knows only some dtypes
        self._call(
            dist.all_to_all_single,
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [length * width for length in receive],
            [length * width for length in send],
        )
        self._count(width * (sum(send) - send[self.rank]))
        return received

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent inside is not of the training."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def _count(self, num_bytes: int) -> None:
        if self._is_counting:
            self.bytes_sent += num_bytes

    def _call(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with self._naming():
            collective(*arguments, group=self._group, **options)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Say what the errors of collectives mean."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {dist.get_rank()}: subnets could not be exchanged: a rank died or was "
                f"silent for the process group's timeout ({str(error).splitlines()[0]})"
            ) from error
