"""Averages over replicas of unequal numbers of shards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...compression import BufferLayout
from ...compression.state_store import StateStore
from ..topology import Matching
from .exchange import NeighborExchange


class Replicas:
    """Averages of flat tensors of replicas of unequal numbers of shards, in float64.

    Ranks send the rows that others have too: to all other replicas, or to one partner of each turn.

    Args:
        exchanges: of each tensor.
        matching: of the partners; None: all replicas average together.
    """

    hidden_seconds = 0.0
    store: StateStore | None = None

    def __init__(
        self, exchanges: Sequence[NeighborExchange], matching: Matching | None = None
    ) -> None:
        self._exchanges, self._matching = exchanges, matching

    def reset(self) -> None:
        """Forget nothing: errors are those of exchanges."""

    @torch.no_grad()
    def start(
        self,
        layouts: Sequence[BufferLayout],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        *,
        index: int,
        weight: Tensor,
    ) -> Callable[[], list[Tensor]]:
        """Do as ``AllRanks.start``, for replicas instead of ranks."""
        own, number = self._exchanges[0].rank, self._exchanges[0].num_ranks
        peers = [each for each in range(number) if each != own]
        if self._matching is not None:
            partner = self._matching.partner(own, index)
            peers = [] if partner is None else [partner]
        if not peers:
            return lambda: list(tensors)
        rounds, sent = [], [each.clone() for each in tensors]
        for exchange, tensor in zip(self._exchanges, sent, strict=True):
            into = [[torch.zeros_like(tensor)] for _ in peers]  # for its gaps
            masses = weight.double().expand(len(peers))
            rounds.append(
                exchange.swap([tensor], peers, peers, into=into, round_index=index, masses=masses)
            )

        @torch.no_grad()
        def wait() -> list[Tensor]:
            found = zip(self._exchanges, rounds, sent, strict=True)
            return [
                exchange.mean(tensor, weight, peers, swapped.wait()).to(tensor.dtype)
                for exchange, swapped, tensor in found
            ]

        return wait

    def raise_nonfinite(self) -> None:
        """Raise for gradients that were not finite on another rank."""
        for each in self._exchanges:
            each.headers.raise_nonfinite()
