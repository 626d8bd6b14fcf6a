"""The interface between a trainer and the algorithm that keeps the replicas of a model together."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ..comm import Run
from .consensus import copy_all
from .state_checks import check_like


@dataclass(frozen=True)
class Traits:
    """What a trainer must know of an algorithm.

    Args:
        has_equal_steps: all ranks must take the same steps; False if they average asynchronously.
        has_equal_batches: all ranks must have as many batches, also in ``join()``.
        can_join: ``join()`` works; False: a rank without batches calls ``flush()`` instead.
        has_fixed_ranks: all ranks stay; False if they come and go, without ``join()`` and states.
        has_equal_parameters: all ranks have equal parameters after every step.
        loads_other_buckets: a saved state loads into buffers of another order of the parameters.
    """

    has_equal_steps: bool = True
    has_equal_batches: bool = False
    can_join: bool = True
    has_fixed_ranks: bool = True
    has_equal_parameters: bool = False
    loads_other_buckets: bool = False


class Status(NamedTuple):
    """Where an algorithm is on this rank.

    Args:
        weight: push-sum weight, 0-d float64; 1 for algorithms without PushSum.
        staleness: steps between sending and merging of the messages merged last; 0: none late.
        in_flight: messages are in flight that the next step may receive.
        hidden_seconds: for which a thread has waited for other ranks, beside the training.
        steps_numerator: the optimizer is stepping on PushSum's numerator.
    """

    weight: Tensor
    staleness: int = 0
    in_flight: bool = False
    hidden_seconds: float = 0.0
    steps_numerator: bool = False


@dataclass(frozen=True)
class SavedProgress:
    """What must fit together in the states that ranks load.

    Args:
        counters: rounds and steps, by name, equal on all ranks.
        mass: push-sum mass, messages in flight included; 1 without PushSum.
    """

    counters: dict[str, int] = field(default_factory=dict)
    mass: float = 1.0


class ModelAverager:
    """What an algorithm does on a rank to keep the replicas of a model together.

    A trainer calls the methods around each step of the optimizer::

        averager.before_step()  # receive and merge
        averager.before_update()
        optimizer.step()
        averager.after_update()
        averager.after_step()  # send, or average

    ``step_buckets`` is all of that for an optimizer that steps one bucket at a time. A step inside
    ``no_sync()`` omits ``after_step``; a rank without batches in ``join()`` calls
    only ``before_step`` and ``after_step``. Every method does what the inner algorithm does, or
    nothing: this class itself never communicates, and an algorithm overrides what it needs.

    Args:
        buffers: flat buffers that hold the parameters; written in place.
        run: of the ranks that train together; None: that of ``inner``, or of the default group.
        inner: the algorithm that this one wraps; None: none.

    Attributes:
        run: its ``run.stats`` counts what is sent and waited for.
        joinable: torch's object that takes part in ``join()`` instead of the trainer's; None: none.
        state: numbers, tensors, lists and dicts of them, by name, that a checkpoint keeps; ranks
            compare "steps" when they load. Lists of tensors are loaded in place. {} at first. An
            algorithm with ``inner`` overrides ``state_dict`` and its like instead.
    """

    traits = Traits()

    def __init__(
        self,
        buffers: Sequence[Tensor],
        run: Run | None = None,
        inner: "ModelAverager | None" = None,
    ) -> None:
        self.buffers = list(buffers)
        self.run: Run = run or (inner.run if inner else Run())
        self.inner = inner
        self.joinable: Joinable | None = None
        self.state: dict[str, Any] = {}
        self._weight = torch.ones((), dtype=torch.float64, device=self.buffers[0].device)

    @property
    def status(self) -> Status:
        """Return weight, staleness, and whether messages are in flight."""
        return Status(self._weight) if self.inner is None else self.inner.status

    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        """Return what a forward pass calls: the module, or one that communicates in backward."""
        return module

    def restore_debiased(self) -> None:
        """Restore de-biased parameters after an interrupted update; called before they are read."""
        if self.inner is not None:
            self.inner.restore_debiased()

    def before_step(self) -> None:
        """Receive and merge the messages that are due before the next update."""
        if self.inner is not None:
            self.inner.before_step()

    def before_update(self) -> None:
        """Prepare the parameters for a step, such as one on PushSum's numerator."""
        if self.inner is not None:
            self.inner.before_update()

    def after_update(self) -> None:
        """Turn them back into what the module computes with."""
        if self.inner is not None:
            self.inner.after_update()

    def after_step(self) -> None:
        """Send, or average, after an update."""
        if self.inner is not None:
            self.inner.after_step()

    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        """Take a whole step with a fused optimizer, whose ``step_bucket`` can mix and send too."""
        self.before_step()
        self.before_update()
        for index in range(num_buckets):
            step_bucket(index)
        self.after_update()
        if self.run.counts.synchronizes:
            self.after_step()

    def flush(self) -> None:
        """Complete all communication in flight; called by all ranks together."""
        if self.inner is not None:
            self.inner.flush()

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return the flat buffers, perhaps the live ones, and the weight, with messages merged.

        Called by all ranks together; changes nothing.
        """
        return (self.buffers, self._weight) if self.inner is None else self.inner.as_merged()

    def as_evaluated(self) -> tuple[list[Tensor], Tensor]:
        """Return what is evaluated and saved: as merged, or the better model of outer steps."""
        return self.as_merged()

    def state_dict(self) -> dict[str, Any]:
        """Return all state beyond parameters and optimizer that a bitwise equal resume needs.

        Called by all ranks together; changes nothing. Consists of numbers, tensors (which may be
        the live ones), and dicts and lists of them.
        """
        return self.state if self.inner is None else self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned; called by all ranks together."""
        for name, mine in self.state.items():
            if isinstance(mine, list) and all(isinstance(each, Tensor) for each in mine):
                copy_all(mine, state[name])
            else:
                self.state[name] = state[name]
        if self.inner is not None:
            self.inner.load_state_dict(state)

    def check_state(self, state: dict[str, Any]) -> SavedProgress:
        """Check that ``load_state_dict`` can load a state, and return how far it is.

        The default wants the structure and shapes of ``state_dict()``; ranks compare its "steps".
        """
        if self.inner is not None:
            return self.inner.check_state(state)
        check_like(state, self.state_dict(), "algorithm")
        return SavedProgress({"step": state["steps"]} if "steps" in state else {})

    def reset(self) -> None:
        """Reset all state, after ``flush`` and the overwriting of all ranks' parameters."""
        if self.inner is not None:
            self.inner.reset()

    def close(self) -> None:
        """Release the process group; nothing else is called afterwards."""
        if self.inner is not None:
            self.inner.close()


def as_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of an argument that is one or several."""
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


class JoinedOptimizers:
    """What algorithms read of several optimizers: all groups, in order, and all state.

    ``optimizers`` are weak proxies, as their hooks reference the trainer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: list[Any] = [weakref.proxy(optimizer) for optimizer in optimizers]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of each optimizer, which are the live ones."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """The state of each parameter, which is the live one."""
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
