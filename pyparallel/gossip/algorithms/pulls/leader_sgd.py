"""Leader SGD: every rank is pulled towards the rank with the lowest loss."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ....comm import Collectives, Run
from ....comm.profiling import profiled
from ....training import (
    Algorithm,
    FlatBuckets,
    ModelAverager,
    Place,
    SavedProgress,
    check_like,
)
from ....training.arguments import check_in, check_integer, require
from ....training.shards import gather
from ...messages import MessageHeaders
from ..node_averager import find_ranks_per_node_error, node_of
from .leader import Leader, MeanLoss, PullAtGradient, check_losses, find_leader

Leaders = Sequence[tuple[Tensor, float]]
"""Parameters of the leaders that a rank has, x_G and x_L, each with the factor of its pull."""


def leader_sgd(x: Tensor, update: Tensor, lr: float | Tensor, leaders: Leaders) -> Tensor:
    """Return x of a rank after a step of LSGD, as the paper has it.

    Args:
        x: (d,) parameters, at which the gradient is.
        update: (d,) of the optimizer: with SGD, lr * gradient.
        lr: 0-d, or (d,) of each parameter's group.
        leaders: with lambda_G and lambda.
    """
    pull = sum((strength * (x - leader) for leader, strength in leaders), torch.zeros_like(x))
    return x - update - lr * pull  # x <- x - lr g - lr lambda (x - x_L) - lr lambda_G (x - x_G)


def pulled(x: Tensor, leaders: Leaders) -> Tensor:
    """Return x of a rank after pulls as the authors' code has them, one after the other.

    Args:
        x: (d,) parameters after the optimizer's update.
        leaders: with c2 and c1 when they are chosen, p2 / G and p1 / l after every other step.
    """
    for leader, fraction in leaders:
        x = (1 - fraction) * x + fraction * leader
    return x


_DEFAULT = 0.1  # of all strengths, pulls and drifts: that of the authors' scripts
AUTHORS = ("local_pull", "global_pull", "local_drift", "global_drift")
_PAPERS = ("local_strength", "global_strength")


@dataclass(frozen=True, repr=False)
class LeaderSGD(Algorithm):
    """LSGD with local and global leaders (Teng et al., NeurIPS 2019, arXiv 1905.10395).

    The leader of a group of ranks is the one with the lowest loss. Every ``interval`` steps the
    ranks of a node receive their leader's parameters x_L, every ``global_interval`` steps all ranks
    those of the leader of all, x_G. Every step of the optimizer is the paper's::

        x <- x - update(gradient at x) - lr * local_strength * (x - x_L)
                                       - lr * global_strength * (x - x_G)

    with the last known leaders and the ``lr`` of each parameter's group in this step. Unlike a pull
    towards an average, this keeps stationary points.

    The paper's update is plain SGD, ``lr * gradient``. Here it is the optimizer's: the pull is no
    part of the gradient, so it enters neither momentum nor Adam's moments, and weight decay is that
    of x. Steps inside ``no_sync()`` and steps whose gradients are skipped as non-finite are pulled
    too. LBFGS is pulled once a step, from where the step began.

    With ``local_pull``, ``global_pull``, ``local_drift`` or ``global_drift`` it is the rule of the
    authors' code instead, whose pull comes after the update and is not scaled by the learning rate.
    Ranks that receive x_L move at once, x <- (1 - c) x + c x_L with c = ``local_pull``, and after
    every local step ``local_drift / interval`` of the way to the last x_L; likewise for x_G.

    Losses are compared by their mean since the last comparison, of a sharded replica also over the
    ranks that hold it: call ``model.record_loss(loss)`` in every step before ``optimizer.step()``.
    The lowest rank of equal losses leads; a rank with a non-finite loss never does. If no loss of a
    node is finite, or a rank has recorded none, all ranks raise the same ValueError at the next
    comparison. A comparison is one small all-gather of all ranks with a host synchronization; a
    local leader's parameters are sent within its node, the global leader's to all ranks. Every rank
    keeps two copies of the parameters, or one without nodes; the paper's rule needs one more within
    a step.

    In ``join()`` a rank without batches does not move (in the authors' form only at comparisons),
    and leads only until its last losses have been compared.

    Args:
        ranks_per_node: consecutive ranks form a node; must divide the number of ranks. 1: only a
            global leader.
        interval: steps between two choices of local leaders.
        global_interval: steps between two choices of the global leader; a multiple of ``interval``.
        local_strength: lambda of the paper, at least 0. None: 0.1, the number in the authors'
            scripts; there it is not scaled by the learning rate, so a larger one may be better.
        global_strength: lambda_G of the paper, likewise.
        local_pull, global_pull, local_drift, global_drift: c1, c2, p1 and p2 of the authors' code,
            in [0, 1]. None: 0.1 in the authors' form.
    """

    needs_losses = True
    can_be_inner = False
    ranks_per_node: int
    interval: int = 4
    global_interval: int = 16
    _: KW_ONLY
    local_strength: float | None = None
    global_strength: float | None = None
    local_pull: float | None = None
    global_pull: float | None = None
    local_drift: float | None = None
    global_drift: float | None = None

    def __post_init__(self) -> None:
        check_integer("ranks_per_node", self.ranks_per_node, rule="a positive number of ranks")
        for each in ("interval", "global_interval"):
            check_integer(each, getattr(self, each), rule="a positive number of steps")
        require(
            self.global_interval % self.interval == 0,
            "global_interval must be a multiple of interval",
            f"{self.global_interval} and {self.interval}",
        )
        given = [name for name in (*_PAPERS, *AUTHORS) if getattr(self, name) is not None]
        if {*given} & {*_PAPERS} and {*given} & {*AUTHORS}:
            raise ValueError(
                "strengths (the paper's rule) must not be given together with pulls or drifts (the "
                f"authors' code), got {', '.join(given)}"
            )
        names = AUTHORS if {*given} & {*AUTHORS} else _PAPERS
        for name in set(names) - set(given):
            object.__setattr__(self, name, _DEFAULT)
        for name in names:
            value = getattr(self, name)
            if names is AUTHORS:
                check_in(name, value, "[0, 1]")
            else:
                require(0 <= value < math.inf, f"{name} must be finite and at least 0", value)

    def __repr__(self) -> str:
        """Show only the arguments of the form in use; saved runs compare it."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={value!r}" for name, value in values if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    @override
    def error_at(self, place: Place) -> str | None:
        error_text = find_ranks_per_node_error(self.ranks_per_node, place.num_ranks)
        return super().error_at(place) or error_text

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "LeaderAverager":
        return LeaderAverager(self, buckets, optimizer, run)


class LeaderAverager(ModelAverager):
    """LeaderSGD on one rank: losses are compared at an interval, leaders pull in each step."""

    def __init__(
        self, options: LeaderSGD, buckets: FlatBuckets, optimizer: Optimizer, run: Run
    ) -> None:
        super().__init__(buckets.buffers, run)
        self._options = options
        self._collectives = Collectives(self._run_of_comparisons(run), run.stats)
        self._num_ranks = self._collectives.size
        self._headers = MessageHeaders(run)
        self._node = node_of(self._collectives.rank, options.ranks_per_node)
        self._local: Leader | None = None  # None: one rank per node
        if len(self._node) > 1:
            node = Collectives(run.within(self._node), self._collectives.stats)
            self._local = Leader(
                self.buffers,
                node,
                strength=options.local_strength or 0.0,
                choice_pull=options.local_pull or 0.0,
                drift=(options.local_drift or 0.0) / options.interval,
            )
        self._global: Leader | None = None
        if len(self._node) < self._num_ranks:
            self._global = Leader(
                self.buffers,
                self._collectives,
                strength=options.global_strength or 0.0,
                choice_pull=options.global_pull or 0.0,
                drift=(options.global_drift or 0.0) / options.global_interval,
            )
        self._leaders = [leader for leader in (self._global, self._local) if leader]
        self._pull = PullAtGradient(buckets, optimizer)
        self._losses = MeanLoss(self.buffers[0].device)
        run.read_loss.append(self._losses.record)
        self._steps = 0
        self._updates = 0

    def _run_of_comparisons(self, run: Run) -> Run:
        """Return the run in whose group losses are compared and the global leader is sent."""
        return run

    @override
    def before_step(self) -> None:
        self._pull.clear()

    @override
    def before_update(self) -> None:
        """Compute the paper's pull at the parameters of the gradient."""
        self._pull.compute(self._leaders)

    @override
    def after_update(self) -> None:
        """Move towards the last known leaders; in the authors' form the global one first."""
        self._updates += 1
        self._pull.apply()
        for leader in self._leaders:
            leader.pull()

    @override
    def after_step(self) -> None:
        self._steps += 1
        if self._num_ranks > 1 and self._steps % self._options.interval == 0:
            self._choose(self._gather(self._steps), self._steps)

    def _choose(self, rows: Sequence[Sequence[float]], step: int) -> None:
        """Follow the leaders after so many steps, by each rank's mean loss, its status and more."""
        losses, statuses = [row[0] for row in rows], [row[1] for row in rows]
        self._losses.clear()
        self._updates = 0
        size = len(self._node) if self._local else self._num_ranks
        nodes = [node_of(first, size) for first in range(0, self._num_ranks, size)]
        check_losses(losses, statuses, nodes, step)
        self._follow(self._local, losses, self._node)
        if step % self._options.global_interval == 0:
            self._follow(self._global, losses, range(self._num_ranks))
        self._headers.raise_nonfinite()

    def _follow(self, leader: Leader | None, losses: Sequence[float], ranks: range) -> None:
        best = find_leader(losses, ranks)
        if leader and best is not None:
            leader.follow(best - ranks[0])

    def _has_batches(self) -> bool:
        return self._updates > 0  # since the last comparison

    def _gather(self, step: int, *more: float) -> list[list[float]]:
        """Return each rank's mean loss, its status and ``more``, once their headers agree."""
        mean, status = self._losses.mean(), self._losses.status(has_batches=self._has_batches())
        if self.run.replica is not None:  # its loss is the mean of its ranks'
            rows = gather(self.run.replica, [float(mean), status])
            mean.fill_(sum(row[0] for row in rows) / len(rows))
            status = max(row[1] for row in rows)
        row = self.run.row(mean.device, step)
        numbers = [mean, *(torch.full_like(mean, each) for each in (status, *more))]
        with profiled("pyparallel::compare_losses"):
            rows = self._collectives.all_gather(torch.cat([torch.stack(numbers), row])).tolist()
        self._headers.check_gathered([row[len(numbers) :] for row in rows])
        return rows

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the leaders' parameters, the counters, and the losses since the comparison."""
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "updates": self._updates,
            "total_loss": float(self._losses.total),
            "num_losses": self._losses.count,
            "leaders": [each and each.state_dict() for each in (self._local, self._global)],
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._updates = state["steps"], state["updates"]
        self._losses.total.fill_(state["total_loss"])
        self._losses.count = state["num_losses"]
        leaders = (self._local, self._global)
        for leader, saved in zip(leaders, state["leaders"], strict=True):
            if leader:
                leader.load_state_dict(saved)

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        own = self._state()
        leaders = own.pop("leaders")
        check_like({key: each for key, each in state.items() if key != "leaders"}, own, "algorithm")
        for index, (saved, leader) in enumerate(zip(state["leaders"], leaders, strict=True)):
            if leader and saved["parameters"] is not None:  # None until the first choice
                path = f"algorithm.leaders.{index}.parameters"
                check_like(saved["parameters"], self.buffers, path)
        return SavedProgress({"step": state["steps"]})

    @override
    def reset(self) -> None:
        for leader in self._leaders:
            leader.reset()
