"""Interfaces: an algorithm is an immutable configuration that starts a session on each rank."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ...comm import FlatBuckets


class Session(Protocol):
    """A running algorithm: the methods that ``GossipDataParallel`` calls."""

    @property
    def weight(self) -> Tensor:
        """Push-sum weight of the rank, 0-d float64; 1 for algorithms without one."""

    @property
    def joinable(self) -> Joinable:
        """The object that communicates in ``join()`` once this rank has no batches left."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for training so far."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module with de-biased parameters."""

    def restore_debiased(self) -> None:
        """Restore de-biased parameters after an interrupted step; called before they are read."""

    def before_step(self, *, has_closure: bool) -> None:
        """Prepare for an update; called when ``optimizer.step()`` begins."""

    def after_step(self) -> None:
        """Communicate; called when ``optimizer.step()`` has updated the parameters."""

    def flush(self) -> None:
        """Complete all communication in flight; called by all ranks together."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return the flat buffers and the weight with messages in flight merged.

        Called by all ranks together; changes nothing. The tensors may be the live ones.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all state beyond parameters and optimizer that a bitwise equal resume needs.

        Called by all ranks together; changes nothing. Consists of numbers, tensors (which may be
        the live ones), and dicts and lists of them.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned; called by all ranks together."""

    def restart(self) -> None:
        """Reset all state: the parameters of all ranks have been overwritten.

        Called by all ranks together, right after ``flush`` and the overwriting.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps do not communicate."""

    def close(self) -> None:
        """Release the process group; nothing else is called afterwards."""


@runtime_checkable
class RecordsLosses(Protocol):
    """A session of an algorithm that compares ranks by their losses."""

    def record_loss(self, loss: Tensor | float) -> None:
        """Record the loss of a batch; called before ``optimizer.step()``, once or more."""


class Algorithm(Protocol):
    """The immutable configuration of a gossip algorithm."""

    def config_fields(self) -> list[tuple[str, str]]:
        """Return the (name, value) pairs that must be equal on all ranks."""

    def validation_error(self, num_ranks: int) -> str | None:
        """Return why the algorithm cannot run on ``num_ranks`` ranks, or None."""

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> Session:
        """Start a session on this rank; parameters are equal on all ranks."""
