"""An exact average at an interval, shared by LocalSGD, SlowMo and DiLoCo."""

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from ...comm import Collectives, Run
from ...training import ModelAverager, SavedProgress, check_like
from ...training.arguments import check_integer
from ..messages import MessageHeaders


class PeriodicAverager(ModelAverager):
    """An inner algorithm, with an exact average and an outer step every ``interval`` steps.

    ``ModelAverager(buffers, run)`` as the inner one communicates only in averages.
    """

    inner: ModelAverager

    def __init__(self, inner: ModelAverager, interval: int, run: Run) -> None:
        super().__init__(inner.buffers, run, inner)
        self._interval = interval
        self._collectives = Collectives(run, run.stats)
        self._headers = MessageHeaders(run)
        self._steps = 0

    def outer_step(self) -> None:
        """Update the average in the buffers in place, equally on all ranks; default: keep it."""

    def outer_state_dict(self) -> dict[str, Any]:
        """Return the state of the outer step, which is equal on all ranks."""
        return {}

    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``outer_state_dict`` returned."""

    def check_outer_state(self, state: dict[str, Any]) -> None:
        """Check that ``load_outer_state_dict`` can load a state; changes nothing."""
        check_like(state, self.outer_state_dict(), "algorithm.outer")

    @override
    def after_step(self) -> None:
        self.inner.after_step()
        self._steps += 1
        if self._steps % self._interval == 0:
            self.inner.flush()
            self._average()
            self.outer_step()
            self._headers.raise_nonfinite()

    @override
    def state_dict(self) -> dict[str, Any]:
        inner, outer = self.inner.state_dict(), self.outer_state_dict()
        return {"steps": self._steps, "inner": inner, "outer": outer}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self.inner.load_state_dict(state["inner"])
        self.load_outer_state_dict(state["outer"])

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        check_like(state["steps"], self._steps, "algorithm.steps")
        inner = self.inner.check_state(state["inner"])
        self.check_outer_state(state["outer"])
        return replace(inner, counters={"step": state["steps"], **inner.counters})

    @torch.no_grad()
    def _average(self) -> None:
        """Average the buffers with weights that sum to the number of ranks n.

        On a PeerError every buffer holds the average or is unchanged.
        """
        if self._collectives.size == 1:
            return
        self._headers.gather(self._collectives, self._steps, self.buffers[0].device)
        for buffer in self.buffers:
            total = buffer.float() * (self.status.weight / self._collectives.size)
            self._collectives.all_reduce_(total)
            buffer.copy_(total)


def check_interval(interval: int) -> None:
    """Raise a ValueError unless ``interval`` is a positive number of steps."""
    check_integer("interval", interval, rule="a positive number of steps")
