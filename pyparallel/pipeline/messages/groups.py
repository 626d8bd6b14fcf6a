"""The process groups of point-to-point messages."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...comm.profiling import post
from ...comm.run import Run


@dataclass(frozen=True)
class P2PGroups:
    """The process groups of point-to-point messages between neighboring ranks.

    ``headers`` are gloo's, as the host reads them; None: the payloads' groups are gloo and carry
    the headers too. With gloo two groups of payloads, upward and downward, as a thread that reads
    and writes at once is slow at both. NCCL may run all operations of a group in one order: so none
    has two sends or receives of one rank, of any peers.
    """

    headers: Run | None
    payloads: Sequence[Run]
    device: torch.device

    @classmethod
    def connect(cls, run: Run, device: torch.device, *, is_ring: bool) -> "P2PGroups":
        """Create the groups and connect neighbors, in a ring also the ends; all ranks call it."""
        num_ranks, ranks = run.size, range(run.size)
        backends = dist.get_backend_config(run.group).split(",")  # such as "cpu:gloo"
        if all(backend.split(":")[-1] == "gloo" for backend in backends):
            upward, downward = (run.within(ranks) for _ in range(2))
            return cls(None, (upward, downward), device)
        neighbors = [(rank, rank + 1) for rank in range(num_ranks - 1)]
        if is_ring and num_ranks > 2:
            neighbors.append((0, num_ranks - 1))
        num_groups = 2 + max(_place(lower, upper, num_ranks) for lower, upper in neighbors)
        groups = cls(
            run.within(ranks, backend="gloo"),
            [run.within(ranks, for_p2p=True) for _ in range(num_groups)],
            device,
        )
        groups._warm_up(neighbors)
        return groups

    @property
    def rank(self) -> int:
        """Return this rank, as numbered in the groups."""
        return self.payloads[0].group_rank

    def of_payloads(self, sender: int, receiver: int) -> Run:
        """Return the group of the payloads from a rank to a neighbor."""
        lower, upper = min(sender, receiver), max(sender, receiver)
        index = _place(lower, upper, self.payloads[0].size) + (sender > receiver)
        return self.payloads[index % len(self.payloads)]

    @property
    def supports_tags(self) -> bool:
        """Return whether messages are matched by tag; NCCL ignores tags."""
        return self.device.type == "cpu"

    @property
    def supports_inline(self) -> bool:
        """Return whether a payload of unknown length may be sent behind its header.

        Only gloo's TCP receives a message that is shorter than the tensor posted for it.
        """
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP")
        is_tcp = sys.platform == "linux" and transport.upper() == "TCP"
        return is_tcp and self.headers is None and self.supports_tags

    def _warm_up(self, neighbors: Sequence[tuple[int, int]]) -> None:
        """Send one byte each way between neighbors, in the same order on all ranks.

        NCCL connects two ranks in their first operation: the host waits for the peer's.
        """
        rank, posted = self.rank, list[tuple[Any, Any]]()
        for lower, upper in neighbors:
            for sender, receiver in ((lower, upper), (upper, lower)):
                group: Any = self.of_payloads(sender, receiver).group
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                if rank == sender:
                    posted.append((byte, post(group.send, [byte], receiver, 0)))
                elif rank == receiver:
                    posted.append((byte, post(group.recv, [byte], sender, 0)))
        for _, work in posted:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _place(lower: int, upper: int, num_ranks: int) -> int:
    """Return which pair of NCCL's groups carries payloads: 0 or 2 in turn; 4 closes an odd ring."""
    if upper == lower + 1:
        return 2 * (lower % 2)
    return 2 * (upper % 2) if num_ranks % 2 == 0 else 4
