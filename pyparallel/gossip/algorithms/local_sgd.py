"""Local SGD: train alone, and take everyone's average now and then."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...comm import FlatBuckets
from .periodic import LocalRounds, check_interval, start_periodically
from .rounds import GossipSession


@dataclass(frozen=True)
class LocalSGD:
    """Every rank trains alone, and every ``interval`` steps all take the average of their models.

    Stich (ICLR 2019, arXiv 1805.09767). Momentum stays local.

    Args:
        interval: steps between two averages; 1 averages models after every step.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval(self.interval)

    def config_fields(self) -> list[tuple[str, str]]:
        """The algorithm with its interval."""
        return [("algorithm", repr(self))]

    def validation_error(self, num_ranks: int) -> str | None:
        """None: it runs on any number of ranks."""
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin without communication."""
        rounds = LocalRounds(buckets)
        return start_periodically(
            module, rounds, _TakeAverage(), self.interval, buckets, process_group
        )


class _TakeAverage:
    def apply(self, buffers: Sequence[Tensor]) -> None:
        """The average is what training goes on with."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def restart(self, buffers: Sequence[Tensor]) -> None:
        """Nothing."""
