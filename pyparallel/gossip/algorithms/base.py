"""What an algorithm is: an immutable description, and a session that runs it on one rank."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ...comm import FlatBuckets


class Session(Protocol):
    """A running algorithm: what ``GossipDataParallel`` calls, and when."""

    weight: Tensor
    """0-d float64: the rank's PushSum mass; 1 for algorithms without one."""

    @property
    def joinable(self) -> Joinable:
        """What takes part for this rank in ``join()`` after its batches have run out."""

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far for training."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, on de-biased parameters."""

    def settle(self) -> None:
        """Called before parameters are read: undo what an interrupted step has left behind."""

    def before_step(self, *, has_closure: bool) -> None:
        """Called when ``optimizer.step()`` begins."""

    def after_step(self) -> None:
        """Called when ``optimizer.step()`` has updated the parameters: the place of the round."""

    def flush(self) -> None:
        """Called by all ranks together: end all communication that is under way."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """The rank's flat buffers and weight with all that travels to it counted in.

        Called by all ranks together; changes nothing, though the tensors may be the live ones.
        """

    def state_dict(self) -> dict[str, Any]:
        """What going on bit for bit needs beyond parameters and optimizer; changes nothing.

        Called by all ranks together. Numbers, tensors (which may be the live ones), and dicts and
        lists of them.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; called by all ranks together."""

    def restart(self) -> None:
        """Forget the past: somebody else has written the parameters of all ranks.

        Called by all ranks together, right after ``flush`` and the writing.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which steps do not communicate."""

    def close(self) -> None:
        """Let go of the process group; nothing else is called afterwards."""


@runtime_checkable
class TakesLosses(Protocol):
    """A session of an algorithm that compares ranks by their losses."""

    def record_loss(self, loss: Tensor | float) -> None:
        """Called by the user's loop before ``optimizer.step()``, perhaps several times."""


class Algorithm(Protocol):
    """How ranks stay together: an immutable object that holds all its configuration."""

    def config_fields(self) -> list[tuple[str, str]]:
        """What ranks must have in common, as (name, value)."""

    def validation_error(self, num_ranks: int) -> str | None:
        """Why the algorithm cannot run on this many ranks, as a sentence, or None."""

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> Session:
        """Begin on this rank, with parameters that are equal on all ranks."""
