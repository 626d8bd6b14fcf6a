"""Asynchronous Leader SGD: ranks step at their own pace, and count their steps together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ....comm import Run, store_of
from ....training import FlatBuckets, SavedProgress, Traits
from ....training.arguments import require
from .leader_sgd import AUTHORS, LeaderAverager, LeaderSGD


@dataclass(frozen=True, repr=False)
class AsynchronousLeaderSGD(LeaderSGD):
    """LSGD whose ranks step at their own pace, the paper's asynchronous form.

    As ``LeaderSGD`` with the paper's rule, but leaders are chosen each time that all n ranks
    together have taken ``n * interval`` more steps, and global leaders each ``n *
    global_interval``: a slow rank takes fewer of them. A rank that learns so at the end of its step
    waits until the others have ended theirs, at most one step of the slowest in each choice. Steps
    are counted in the process group's store, one call for each step.

    A rank without a step since the last choice does not lead. A rank that has no batches left
    calls ``flush()``, which takes part in the choices of those that still train and returns once
    all have called it; ``consensus()``, ``consensus_distance()`` and states, which all ranks ask
    for together, wait likewise. ``join()`` is a ValueError.

    Args are those of ``LeaderSGD``, without those of its authors' code.
    """

    refuses_shards = (
        "take the same rounds for all shards of",
        ", whose ranks step at their own pace: use LeaderSGD",
    )

    def __post_init__(self) -> None:
        given = [name for name in AUTHORS if getattr(self, name) is not None]
        rule = "local_strength and global_strength (the paper's rule) must be the only pulls"
        require(not given, rule, ", ".join(given), "LeaderSGD has the authors' code")
        super().__post_init__()

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> "AsynchronousLeaderAverager":
        return AsynchronousLeaderAverager(self, buckets, optimizer, run)


class AsynchronousLeaderAverager(LeaderAverager):
    """AsynchronousLeaderSGD on one rank.

    All ranks take part in every choice, in the same order. ``_due`` is equal on all of them: the
    steps of all ranks at which the next choice is made.
    """

    traits = Traits(has_equal_steps=False, can_join=False)

    def __init__(
        self,
        options: AsynchronousLeaderSGD,
        buckets: FlatBuckets,
        optimizer: Optimizer,
        run: Run,
    ) -> None:
        super().__init__(options, buckets, optimizer, run)
        self._store = store_of(run.group) if run.size > 1 else None
        self._every = run.size * options.interval
        self._due, self._num_choices, self._counted_early = self._every, 0, 0
        self._counted = 0  # of the steps in the store, those of this rank
        self._missing = self._every  # until the next choice, when all ranks last waited

    @override
    def _run_of_comparisons(self, run: Run) -> Run:
        # A group of its own: a rank may be in a choice while others wait in consensus().
        return run.within(range(run.size)) if run.size > 1 else run

    @override
    def after_step(self) -> None:
        self._steps += 1
        if self._store is not None:
            self._counted += 1
            total = self._count(1)
            while total >= self._due:
                self._take_part(waits=False)

    @override
    def _has_batches(self) -> bool:
        return self._updates > self._counted_early

    def _count(self, steps: int) -> int:
        """Return the steps of all ranks, with so many more of this one."""
        assert self._store is not None
        return self._store.add("leader_sgd/steps", steps)

    def _take_part(self, *, waits: bool) -> bool:
        """Take part in a choice; return whether instead all ranks wait for each other."""
        with self.run.counts.not_compared():  # steps, which differ
            rows = self._gather(self._num_choices, float(waits), float(self._counted))
        if all(row[2] for row in rows):
            # Not of the store: a rank may go on before another one reads it.
            self._missing = self._due - int(sum(row[3] for row in rows))
            return True
        self._num_choices += 1
        self._due += self._every
        self._choose(rows, self._num_choices * self._options.interval)
        self._counted_early = int(waits)  # the loss of the next step may have counted already
        return False

    @override
    def flush(self) -> None:
        """Take part in the choices of the others until all ranks wait."""
        while self._store is not None and not self._take_part(waits=True):
            pass

    @override
    def as_merged(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return x and w = 1 once all ranks have called this; x stays as it is."""
        self.flush()
        return super().as_merged()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state once all ranks have called this, and the steps until the next choice."""
        self.flush()
        return super().state_dict()

    @override
    def _state(self) -> dict[str, Any]:
        return super()._state() | {"choices": self._num_choices, "missing": self._missing}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_choices, self._missing = state["choices"], state["missing"]
        if self._store is not None:
            self._due = self._count(0) + state["missing"]
            self._collectives.run.barrier()  # no rank steps before all have read the count

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        super().check_state(state)
        return SavedProgress({"choice": state["choices"]})
