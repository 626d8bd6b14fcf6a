"""Local SGD: local steps, with an average over all ranks at an interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets
from .base import Algorithm
from .periodic import LocalRounds, OuterStep, check_interval, start_periodically
from .rounds import GossipSession


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Local steps on every rank, and an average of all models every ``interval`` steps.

    Stich (ICLR 2019, arXiv 1805.09767). Optimizer state such as momentum stays local.

    Args:
        interval: number of steps between two averages.
    """

    interval: int

    def __post_init__(self) -> None:
        check_interval(self.interval)

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self))]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return None

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        rounds = LocalRounds(buckets)
        return start_periodically(
            module, rounds, _TakeAverage(), self.interval, buckets, process_group
        )


class _TakeAverage(OuterStep):
    @override
    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Keep the average."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""

    @override
    def restart(self, buffers: Sequence[Tensor]) -> None:
        """Do nothing: there is no state."""
