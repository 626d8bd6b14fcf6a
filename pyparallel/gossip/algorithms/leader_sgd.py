"""Leader SGD: every rank is pulled towards the one that does best."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...comm import FlatBuckets, new_group, node_of
from .leader import Leader, MeanLoss, find_leader
from .periodic import LocalRounds, check_interval
from .rounds import GossipSession


@dataclass(frozen=True)
class LeaderSGD:
    """LSGD with local and global leaders (Teng et al., NeurIPS 2019, arXiv 1905.10395).

    The leader of some ranks is the one with the least loss. Every ``interval`` steps the ranks of
    a node take over their leader's parameters x_L and go ``local_pull`` of the way there, x <- (1 -
    c) x + c x_L; every ``global_interval`` steps likewise with the leader of all ranks. After every
    local step they are drawn to where their leaders were then, by ``drift / interval`` of the way.
    Unlike a pull towards an average it leaves every stationary point where it is.

    Ranks are judged by the mean of the losses that they have told since the last comparison: call
    ``model.record_loss(loss)`` in every step before ``optimizer.step()``. At equal losses the
    lowest rank leads; one whose loss is not finite never does. Where all of a node's are not, or a
    rank has told none, all ranks raise the same ValueError at the next comparison. Comparing is one
    small all-gather of all ranks, for which the host waits; the parameters of a leader travel
    within its node alone, those of the global one to all. Two copies of the parameters stay on
    every rank, one without nodes.

    In ``join()`` a rank without batches stays where it is between comparisons, is pulled at them,
    and leads only until its last losses have been compared.

    Args:
        ranks_per_node: consecutive ranks form a node; divides the number of ranks. 1: only global
            leaders.
        interval: steps between two choices of local leaders.
        global_interval: likewise of the global one; a multiple of ``interval``.
        local_pull: c1 of the paper, in [0, 1].
        global_pull: c2.
        local_drift: p1.
        global_drift: p2.
    """

    ranks_per_node: int
    interval: int = 4
    global_interval: int = 16
    local_pull: float = 0.1
    global_pull: float = 0.1
    local_drift: float = 0.1
    global_drift: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(
                f"ranks_per_node must be a positive number of ranks, got {self.ranks_per_node!r}"
            )
        check_interval(self.interval)
        check_interval(self.global_interval)
        if self.global_interval % self.interval:
            raise ValueError(
                f"global_interval must be a multiple of interval, got {self.global_interval} and "
                f"{self.interval}"
            )
        for name in ("local_pull", "global_pull", "local_drift", "global_drift"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def config_fields(self) -> list[tuple[str, str]]:
        """The algorithm with its options."""
        return [("algorithm", repr(self))]

    def validation_error(self, num_ranks: int) -> str | None:
        """Nodes that do not divide the ranks."""
        if num_ranks % self.ranks_per_node:
            return (
                f"ranks_per_node must divide the process group's {num_ranks} ranks, got "
                f"{self.ranks_per_node}"
            )
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> "LeaderSession":
        """Begin without leaders, from parameters equal on all ranks."""
        rounds = LeaderRounds(self, buckets, process_group)
        return LeaderSession(module, rounds, process_group)


# What a rank says of its losses where it has no mean to tell.
_TOLD, _STEPPED_WITHOUT, _HAS_NO_BATCHES = 0.0, 1.0, 2.0


class LeaderRounds(LocalRounds):
    """Leaders on one rank: compared at the end of some steps, pulling after each."""

    def __init__(
        self, options: LeaderSGD, buckets: FlatBuckets, process_group: ProcessGroup | None
    ) -> None:
        super().__init__(buckets)
        self._options = options
        self._group = process_group
        self._num_ranks = dist.get_world_size(process_group)
        self._node = node_of(dist.get_rank(process_group), options.ranks_per_node)
        self._local: Leader | None = None  # who is alone follows nobody
        if len(self._node) > 1:
            node_group = new_group(self._node, process_group)
            self._local = Leader(
                self._buffers,
                options.local_pull,
                options.local_drift / options.interval,
                node_group,
            )
        self._global: Leader | None = None
        if len(self._node) < self._num_ranks:
            drift = options.global_drift / options.global_interval
            self._global = Leader(self._buffers, options.global_pull, drift, process_group)
        self.losses = MeanLoss(self.weight.device)
        self._steps = 0
        self._updates = 0

    def leave_update(self) -> None:
        """Be drawn to the last known leaders, the global one first."""
        self._updates += 1
        for leader in (self._global, self._local):
            if leader:
                leader.draw()

    def end(self) -> None:
        """Compare losses and follow the leaders when it is time."""
        self._steps += 1
        if self._num_ranks > 1 and self._steps % self._options.interval == 0:
            self._compare()

    def _compare(self) -> None:
        losses, remarks = self._gather()
        self.losses.clear()
        self._updates = 0
        self._refuse(losses, remarks)
        self._follow(self._local, losses, self._node)
        if self._steps % self._options.global_interval == 0:
            self._follow(self._global, losses, range(self._num_ranks))

    def _follow(self, leader: Leader | None, losses: Sequence[float], ranks: range) -> None:
        best = find_leader(losses, ranks)
        if leader and best is not None:
            self.bytes_sent += leader.follow(best - ranks[0])

    def _gather(self) -> tuple[list[float], list[float]]:
        """Everyone's mean loss, and what goes with it."""
        remark = _TOLD
        if not self.losses.count:
            remark = _STEPPED_WITHOUT if self._updates else _HAS_NO_BATCHES
        mean = self.losses.mean()
        mine = torch.stack([mean, torch.full_like(mean, remark)])
        everyone = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        with torch.profiler.record_function("pyparallel::compare_losses"):
            dist.all_gather(everyone, mine, group=self._group)
        self.bytes_sent += mine.numel() * mine.element_size() * (self._num_ranks - 1)
        losses, remarks = torch.stack(everyone).T.tolist()
        return losses, remarks

    def _refuse(self, losses: Sequence[float], remarks: Sequence[float]) -> None:
        """All ranks see the same losses, so all raise the same."""
        silent = [rank for rank, remark in enumerate(remarks) if remark == _STEPPED_WITHOUT]
        if silent:
            raise ValueError(
                "record_loss(loss) must be called in every step before optimizer.step(), as "
                f"LeaderSGD chooses by losses, got none from {_name(silent)} in the steps up to "
                f"{self._steps}"
            )
        size = len(self._node) if self._local else self._num_ranks
        for first in range(0, self._num_ranks, size):
            node = node_of(first, size)
            telling = [rank for rank in node if remarks[rank] == _TOLD]
            if telling and find_leader(losses, node) is None:
                raise ValueError(
                    "losses must be finite on one rank of each node at least, got "
                    f"{', '.join(str(losses[rank]) for rank in telling)} from {_name(telling)} in "
                    f"the steps up to {self._steps}"
                )

    def state_dict(self) -> dict[str, Any]:
        """The leaders, and what has been counted since they were chosen."""
        return {
            "steps": self._steps,
            "updates": self._updates,
            "total_loss": float(self.losses.total),
            "num_losses": self.losses.count,
            "leaders": [each and each.state_dict() for each in (self._local, self._global)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps, self._updates = state["steps"], state["updates"]
        self.losses.total.fill_(state["total_loss"])
        self.losses.count = state["num_losses"]
        leaders = (self._local, self._global)
        for leader, saved in zip(leaders, state["leaders"], strict=True):
            if leader:
                leader.load_state_dict(saved)

    def restart(self) -> None:
        """Without leaders."""
        for leader in (self._local, self._global):
            if leader:
                leader.forget()


class LeaderSession(GossipSession):
    """A session that is told losses."""

    def __init__(self, module: nn.Module, rounds: LeaderRounds, group: ProcessGroup | None) -> None:
        super().__init__(module, rounds, group)
        self._losses = rounds.losses

    def record_loss(self, loss: Tensor | float) -> None:
        """Count the loss in when leaders are chosen next."""
        self._losses.record(loss)


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
