"""Checkpoints from which a run goes on bit for bit, on every rank where that rank was."""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..comm import check_consistent_across_ranks, first_difference
from .trainer import GossipDataParallel


class RankState:
    """One rank's part of a checkpoint: what it holds is saved and loaded as one piece.

    Attributes:
        values: the state dicts by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


torch.serialization.add_safe_globals([RankState])  # torch.load(weights_only=True) may make one


class GossipState:
    """All of a run's state, as a ``Stateful`` for torch's distributed checkpoint.

    Ranks that gossip differ from each other, so each saves its own: module, optimizer, and of the
    algorithm the mass, the topology's round, what the outer steps remember, and the messages that
    had not been merged. Schedulers, a ``GradScaler``, random generators and the place in the data
    stay the user's. Both methods are called by all ranks together, between two steps::

        state = GossipState(model, optimizer)
        torch.distributed.checkpoint.save({"gossip": state}, checkpoint_id="step-1000")
        torch.distributed.checkpoint.load({"gossip": state}, checkpoint_id="step-1000")

    or, with a file for each rank, ``torch.save(state.state_dict(), path)`` and
    ``state.load_state_dict(torch.load(path))``.

    A run goes on with the number of ranks, algorithm and ``bucket_cap_mb`` it was saved with. On
    another number of ranks begin anew from the consensus: save ``averaged.state_dict()`` inside
    ``with model.consensus() as averaged``, and load it into the bare module.

    Args:
        model: the trainer.
        optimizer: the one it was made with.
    """

    def __init__(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        group = model.process_group
        self._key = f"rank-{dist.get_rank(group)}-of-{dist.get_world_size(group)}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under this rank's key; its tensors are the live ones."""
        values = {
            "facts": self._model.config_fields,
            "algorithm": self._model.algorithm_state_dict(),
            "module": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        return {self._key: RankState(values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            DisagreementError: (a ValueError) on every rank alike: a rank finds a state of another
                number of ranks, algorithm or module. With another number of ranks
                ``torch.distributed.checkpoint`` finds its keys missing first, and says so itself.
        """
        check_consistent_across_ranks([], self._problem(state_dict), self._model.process_group)
        values = state_dict[self._key].values
        self._model.load_state_dict(values["module"])
        self._optimizer.load_state_dict(values["optimizer"])
        self._model.load_algorithm_state_dict(values["algorithm"])

    def _problem(self, state_dict: dict[str, Any]) -> str | None:
        if self._key not in state_dict:
            return (
                f"state_dict must hold {self._key!r} (a run goes on with as many ranks as it was "
                "saved with; with others, load a consensus into the bare module), got "
                f"{sorted(state_dict)}"
            )
        difference = first_difference(
            self._model.config_fields, state_dict[self._key].values["facts"]
        )
        if difference:
            name, mine, saved = difference
            return f"state_dict must be of the same {name}, {mine}, got {saved}"
        return None
