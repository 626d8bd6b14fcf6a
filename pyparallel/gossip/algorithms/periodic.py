"""Local steps, and an outer step at an interval: what LocalSGD, SlowMo, DiLoCo and NoLoCo share."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Collectives, Run
from ...compression.state_store import StateStore
from ...training import FlatBuckets, ModelAverager, SavedProgress, Status, check_like
from ...training.consensus import copy_all
from ..messages.averages import AllRanks, Pairs
from .base import Periodic, widened
from .fragments import Fragment, find_fragments


class PeriodicAverager(ModelAverager):
    """An algorithm of outer steps on one rank.

    Args:
        optimizer: of the steps between outer steps.
        inner: what averages between outer steps; None: nothing.
    """

    inner: ModelAverager

    def __init__(
        self,
        options: Periodic,
        interval: int,
        optimizer: Optimizer,
        module: nn.Module,
        buckets: FlatBuckets,
        run: Run,
        inner: ModelAverager | None = None,
    ) -> None:
        super().__init__(buckets.buffers, run, inner or ModelAverager(buckets.buffers, run))
        self._interval, self._options, self._steps = interval, options, 0
        parts = find_fragments(module, buckets, options.fragments)
        self._fragments, collectives = list[Fragment](), Collectives(run, run.stats)
        for number, spans in enumerate(parts):
            weights = [widened(span.of(self.buffers)).clone() for span in spans]
            rule = options.make_rule(weights, optimizer, collectives)
            first = (number + 1) * interval // len(parts)
            self._fragments.append(Fragment(spans, buckets, rule, first))
        device, in_background = self.buffers[0].device, options.delay > 0
        pairs = options.start_averages(run)
        self._average = pairs or AllRanks(run, device, options.compressor, in_background)

    @property
    @override
    def status(self) -> Status:
        return self.inner.status._replace(hidden_seconds=self._average.hidden_seconds)

    @property
    def num_steps(self) -> int:
        """Local steps that were counted."""
        return self._steps

    @property
    def store(self) -> StateStore | None:
        """The compressor's states; None without one, or of averages over pairs without one."""
        return self._average.store

    @override
    def after_step(self) -> None:
        self.inner.after_step()
        self.count_step()
        self.take_outer_steps()

    def count_step(self) -> None:
        """Count a local step."""
        self._steps += 1

    def take_outer_steps(self) -> None:
        """Send the fragments whose turn it is, and take the outer steps that are due.

        Without fragments and delay a PeerError changes nothing but the compressor's states.
        """
        for number, each in enumerate(self._fragments):
            count = each.count(self._steps, self._interval)
            if count is not None:
                self.inner.flush()
                self._send(each, count * len(self._fragments) + number)
            if each.is_due(self._steps, self._options.delay):
                self._take_outer_step(each)

    @torch.no_grad()
    def _send(self, fragment: Fragment, index: int) -> None:
        changes = fragment.find_changes()
        message, average = fragment.message(changes), self._average.start
        average = partial(average, index=index, weight=self.status.weight)
        average = partial(average, [span.of_parameters for span in fragment.spans])
        if self._options.compressor is None:  # zeros in the gaps stay zeros
            wait = average(message, fragment.rule.slow, changes)
        else:
            arrived = average(*map(fragment.without_gaps, (message, fragment.rule.slow)), changes)

            def wait() -> list[Tensor]:
                return fragment.with_gaps(arrived())

        fragment.hold(self._steps, wait, changes)

    def _take_outer_step(self, fragment: Fragment) -> None:
        fragment.take_outer_step(self._options.share_kept)
        self._average.headers.raise_nonfinite()

    @override
    def flush(self) -> None:
        self.inner.flush()
        for fragment in self._fragments:
            if fragment.is_due(self._steps, 0):
                self._take_outer_step(fragment)

    @override
    def as_evaluated(self) -> tuple[list[Tensor], Tensor]:
        if not self._fragments[0].rule.evaluates_slow:
            return self.as_merged()
        buffers = [widened(buffer).clone() for buffer in self.buffers]
        for fragment in self._fragments:
            copy_all([span.of(buffers) for span in fragment.spans], fragment.rule.slow)
        return buffers, self.status.weight

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self._steps, "inner": self.inner.state_dict()}
        state["outer"] = [fragment.rule.state_dict() for fragment in self._fragments]
        if self._options.delay:
            # First, as it waits: what is in flight writes the compressor's state.
            state["in_flight"] = [each.in_flight() for each in self._fragments]
        if self._average.store is not None:
            state["compressor"] = self._average.store.content()
        return state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self.inner.load_state_dict(state["inner"])
        for each, outer, in_flight in self._of_fragments(state):
            each.load_in_flight(in_flight)
            each.rule.load_state_dict(outer)
        if self._average.store is not None:
            self._average.store.load_content(state["compressor"])

    @override
    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        check_like(state["steps"], self._steps, "algorithm.steps")
        inner = self.inner.check_state(state["inner"])
        for number, (each, outer, in_flight) in enumerate(self._of_fragments(state)):
            each.rule.check_state(outer, f"algorithm.outer.{number}")
            if in_flight is not None:
                own = {"sent_at": 0, "averages": each.weights}
                check_like(in_flight, own, f"algorithm.in_flight.{number}")
        if self._average.store is not None:
            self._average.store.check_content(state["compressor"])
        return replace(inner, counters={"step": state["steps"], **inner.counters})

    def _of_fragments(self, state: dict[str, Any]) -> list[tuple[Fragment, Any, Any]]:
        """Return each fragment with its parts of a state: of its rule, and what is in flight."""
        in_flight = state.get("in_flight", [None] * len(self._fragments))
        return list(zip(self._fragments, state["outer"], in_flight, strict=True))

    def state_to_fill(self) -> dict[str, Any]:
        """Return the state of whole models that another rank goes on from, between outer steps."""
        common = {} if self.store is None else self.store.common_state()
        (whole,) = self._fragments
        return {"steps": self._steps, "outer": whole.rule.state_dict(), "common": common}

    def regroup(
        self,
        store: StateStore | None,
        filled: dict[str, Any] | None,
        average: Pairs | None = None,
    ) -> None:
        """Go on in the run's group of now, all its ranks together.

        Args:
            store: of the compressor's states, which are copied.
            filled: ``state_to_fill`` of another rank, to go on from; None: from this rank's.
            average: over pairs, with states of its own; None: over all ranks.
        """
        run, device = self.run, self.buffers[0].device
        if filled is not None:
            self._steps = filled["steps"]
            (whole,) = self._fragments
            whole.rule.load_state_dict(filled["outer"])
        if average is None and store is not None:
            common = None if filled is None else filled["common"]
            store = store.copy(run.group_rank, run.size, common)
        compressor = self._options.compressor
        self._average = average or AllRanks(run, device, compressor, False, store)

    def skip_outer_steps(self, number: int) -> None:
        """Count outer steps that other ranks have taken, and this one has not."""
        self._steps += number * self._interval

    @override
    def reset(self) -> None:
        """Start again from the weights of now, of which ranks may have loaded different ones."""
        super().reset()
        self._average.reset()
        for fragment in self._fragments:
            fragment.load_in_flight(None)
            fragment.rule.reset(self._average.agree(fragment.weights))


def local_sgd(x: Tensor, t: int, interval: int) -> Tensor:
    """Return the models of all n ranks after step t of local SGD, counted from 1.

    Args:
        x: (n, d) x_i - lr * grad F_i(x_i), a row for each rank: its model after its own update.
    """
    if t % interval:
        return x  # x_i <- x_i - lr * grad F_i(x_i)
    return x.mean(0).expand_as(x)  # x_i <- (1/n) sum_j (x_j - lr * grad F_j(x_j))


@dataclass(frozen=True, repr=False)
class LocalSGD(Periodic):
    """Local steps on every rank, and an average of all models every ``interval`` steps.

    Stich (ICLR 2019, arXiv 1805.09767). Optimizer state such as momentum stays local. With a
    compressor each rank also holds the weights after the last average.
    """

    averages_over_all = True
    interval: int

    def __post_init__(self) -> None:
        self.check_options(self.interval)

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PeriodicAverager:
        return PeriodicAverager(self, self.interval, optimizer, module, buckets, run)
