"""The rounds that a trainer takes around the steps of its optimizers."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from ..comm import NonFiniteError, Run
from ..optim import FusedOptimizer
from ..optim.finite_steps import FiniteSteps
from ..training import ModelAverager, is_creating_state
from .join import JoinedRounds, joining
from .messages.replica_rounds import ReplicaRounds


@dataclass(eq=False)
class SteppedRounds:
    """A trainer's rounds on this rank: before, within and after each step of its optimizers.

    The hooks of the optimizers reference it, so it references neither them nor the trainer.

    With ``in_pass`` the one optimizer is fused and takes the round in its pass. ``num_steps`` were
    completed; ``waiting_seconds`` the host has waited for other ranks in the last one.
    """

    averager: ModelAverager
    run: Run
    finite_steps: FiniteSteps
    module: nn.Module
    in_pass: bool

    def __post_init__(self) -> None:
        self.joined = JoinedRounds(self.averager, self.run)
        self._replica = ReplicaRounds(self.run, self.run.replica) if self.run.replica else None
        self.num_steps = 0
        self.waiting_seconds = self._waited_before = 0.0  # of the last step; until its end
        self._saw_forward = False  # in training since the last step
        self._warns_of_closures = True
        self._received_error: NonFiniteError | None = None

    def see_forward(self, *, counts: bool) -> None:
        """Note a training forward; count it for comparison between ranks if ``counts``."""
        self._saw_forward = True
        if counts:
            self.run.counts.count_forward()

    def before_step(self, optimizer: Optimizer, has_gradients: bool) -> None:
        """Receive and merge, unless a fused optimizer does so in its pass."""
        if self.in_pass:
            return
        averager = self.averager
        if not has_gradients and self._warns_of_closures and averager.status.in_flight:
            self._warns_of_closures = False
            warnings.warn(
                f"{type(optimizer).__name__} may evaluate its closure several times in a step, or "
                "at other parameters, so messages are received before the first evaluation: "
                "overlap hides nothing; call backward() and then step() without a closure",
                stacklevel=7,  # the user's optimizer.step(closure)
            )
        self._take(averager.before_step)
        if not has_gradients:  # the optimizer may copy the parameters first
            averager.before_update()

    def check_replica(self) -> None:
        """Raise a PeerError if the last round has failed on another rank of the replica."""
        if self._replica is not None:
            self._replica.check()

    def before_update(self, index: int = 0, is_first: bool = True) -> None:
        """Turn the parameters into what the optimizer of an index steps on."""
        if not self.in_pass:
            self.check_replica()  # a rank that has failed agrees on no gradients
            self.averager.before_update()  # again if a forward has been between two optimizers
            self.finite_steps.begin(index, is_first)

    def end_update(self) -> None:
        """Turn them back, before other post-hooks, or a closure, read them or gradients."""
        self.finite_steps.end()
        self.averager.restore_debiased()

    def step_buckets(self, optimizer: FusedOptimizer) -> None:
        """Take a step of a fused optimizer, with the round in its pass."""
        if is_creating_state():
            for index in range(optimizer.num_buckets):
                optimizer.step_bucket(index)
            return
        self.check_replica()
        self.finite_steps.begin()
        self._count_step()
        if joining and self.run.counts.synchronizes:
            self.joined.before_round()
        step_buckets = self.averager.step_buckets
        self._take(partial(step_buckets, optimizer.step_bucket, optimizer.num_buckets))

    def after_step(self) -> None:
        """Send, or average, and end the step; a NonFiniteError by the policy comes last."""
        if not self.in_pass:
            self._count_step()
            self.averager.after_update()
            if self.run.counts.synchronizes:
                if joining:
                    self.joined.before_round()
                self._take(self.averager.after_step)
        self.num_steps += 1
        waited = self.run.stats.waiting_seconds
        self.waiting_seconds, self._waited_before = waited - self._waited_before, waited
        self._raise_nonfinite()

    def close(self) -> None:
        """Release the process group."""
        if self._replica is not None:
            self._replica.close()
        self.joined.close()
        self.averager.close()

    def _take(self, part: Callable[[], None]) -> None:
        """Take a part of a round; keep until the step's end what it says of others' gradients."""
        replica = self._replica
        try:
            with self.run.interruptible(), replica.round() if replica else nullcontext():
                part()
        except NonFiniteError as error:
            self._received_error = error

    def _count_step(self) -> None:
        self.run.counts.count_step(saw_forward=self._saw_forward)
        self._saw_forward = False

    def _raise_nonfinite(self) -> None:
        received, self._received_error = self._received_error, None
        steps, found = self.finite_steps, self.finite_steps.found
        late = steps.num_found_late()
        counts = self.run.counts
        if not late and (found is None or counts.policy != "raise"):
            if received is not None:
                raise received
            return
        if late:
            text = f"nan or inf in {late} step(s) up to this one"
            fix = "nonfinite='skip' waits for each step"
        else:
            names = (name for name, p in self.module.named_parameters() if p is found)
            text = f"{int(float(counts.nonfinite))} elements that are nan or inf, the first in "
            text += next(names, "a parameter")
            fix = "nonfinite='skip' goes on without such steps"
        raise NonFiniteError(
            f"{self.run.here}: gradients must be finite, got {text}: this rank's parameters have "
            f"not been updated with them, and its round has been taken; {fix}"
        ) from received
