"""Checkpoints of a run, from which every rank resumes with bitwise equal results."""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .._deprecated import modernize_saved
from ..comm import check_consistent_across_ranks, find_format_error, first_difference
from .trainer import GossipDataParallel
from .validation import BUCKETS, IN_MODULE_ORDER


class RankState:
    """One rank's part of a checkpoint, saved and loaded as one object.

    Attributes:
        values: the state dicts by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


torch.serialization.add_safe_globals([RankState])  # for torch.load(weights_only=True)


class GossipState:
    """All of a run's state, as a ``Stateful`` for torch's distributed checkpoint.

    Gossiping ranks differ from each other, so each saves its own state: module, optimizer, and of
    the algorithm the push-sum weight, the topology's round, the state of outer steps, and messages
    not merged yet. Schedulers, a ``GradScaler``, random generators and the position in the data
    are up to the user. Both methods must be called by all ranks together, between two steps::

        state = GossipState(model, optimizer)
        torch.distributed.checkpoint.save({"gossip": state}, checkpoint_id="step-1000")
        torch.distributed.checkpoint.load({"gossip": state}, checkpoint_id="step-1000")

    or, with a file for each rank, ``torch.save(state.state_dict(), path)`` and
    ``state.load_state_dict(torch.load(path))``.

    A run must resume with the same number of ranks, algorithm and ``bucket_cap_mb``. With another
    number of ranks, restart from the consensus: save ``averaged.state_dict()`` inside ``with
    model.consensus() as averaged``, and load it into the bare module.

    Args:
        model: the trainer.
        optimizer: the optimizer it was created with.
    """

    def __init__(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        group = model.process_group
        self._key = f"rank-{dist.get_rank(group)}-of-{dist.get_world_size(group)}"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state under this rank's key; its tensors are the live ones."""
        values = {
            "facts": self._model.config_fields,
            "algorithm": self._model.algorithm_state_dict(),
            "module": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        return {self._key: RankState(values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned.

        Raises:
            DisagreementError: (a ValueError) on all ranks alike: the state of a rank is of another
                number of ranks, algorithm or module. With another number of ranks
                ``torch.distributed.checkpoint`` itself raises first, for missing keys.
        """
        check_consistent_across_ranks(
            [], self._find_state_error(state_dict), self._model.process_group
        )
        values = state_dict[self._key].values
        self._model.load_state_dict(values["module"])
        self._optimizer.load_state_dict(values["optimizer"])
        self._model.load_algorithm_state_dict(values["algorithm"])

    def _find_state_error(self, state_dict: dict[str, Any]) -> str | None:
        if self._key not in state_dict:
            return (
                f"state_dict must hold {self._key!r} (a run must resume with as many ranks as it "
                "was saved with; otherwise load a consensus into the bare module), got "
                f"{sorted(state_dict)}"
            )
        values = state_dict[self._key].values
        if error := find_format_error(values["algorithm"]):
            return error
        fields, saved = self._model.config_fields, modernize_saved(values["facts"])
        fields, buckets = _take_buckets(fields)
        saved, saved_buckets = _take_buckets(saved)
        if not self._model.loads_other_buckets:
            fields, saved = [*fields, buckets], [*saved, saved_buckets]
        difference = first_difference(fields, saved)
        if difference:
            name, here, there = difference
            return f"state_dict must be of the same {name}, {here}, got {there}"
        return None


def _take_buckets(
    fields: list[tuple[str, str]],
) -> tuple[list[tuple[str, str]], tuple[str, str]]:
    """Return the other fields, and that of the buckets, which older versions did not save."""
    others = [field for field in fields if field[0] != BUCKETS]
    return others, (BUCKETS, dict(fields).get(BUCKETS, IN_MODULE_ORDER))
