"""A flat buffer between the two ends of a round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops import mix_
from .weighted_buffer import WeightedBuffer


class RoundBuffer(WeightedBuffer, ABC):
    """z and w, and the messages of one round that are to be averaged with them.

    A subclass says what a message is, how it leaves and how it arrives.

    Args:
        values: z: flat, float32, bfloat16 or float16; written in place.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.in_flight = False
        self._received_masses = self.weight.new_zeros(0)

    @abstractmethod
    def arrive(self) -> None:
        """Wait for the messages of the round under way, if there is one, and leave them be.

        Raises:
            PeerError: a neighbor is gone. z and w are then as before the round, but other
                neighbors may have merged what this rank sent.
        """

    @property
    @abstractmethod
    def _messages(self) -> Sequence[Tensor]:
        """What has arrived, one for each of the received masses."""

    @torch.no_grad()
    def merge(self) -> None:
        """Wait for the messages of the round under way, if there is one, and average with them.

        Raises:
            PeerError, CorruptMessageError: as ``arrive`` does.
        """
        self.arrive()
        if self.in_flight:
            with torch.profiler.record_function("pyparallel::gossip_merge"):
                mix_(self.values, self.weight, list(self._messages), self._received_masses)
            self.in_flight = False

    @torch.no_grad()
    def as_merged(self) -> tuple[Tensor, Tensor]:
        """What z and w would be if the round under way were merged now; these do not change.

        Raises:
            PeerError, CorruptMessageError: as ``arrive`` does.
        """
        self.arrive()
        if not self.in_flight:
            return self.values, self.weight
        values, weight = self.values.clone(), self.weight.clone()
        mix_(values, weight, list(self._messages), self._received_masses)
        return values, weight
