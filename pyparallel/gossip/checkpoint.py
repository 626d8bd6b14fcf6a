"""Checkpoints of a run, from which every rank resumes with bitwise equal results."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import training
from ..comm import first_difference
from ..comm.errors import concise
from ..training.averager import as_optimizers
from ..training.shards import describe_shard, like, locals_of
from .trainer import GossipDataParallel
from .validation import BUCKETS, check_states_together


class RankState:
    """One rank's part of a checkpoint, saved and loaded as one object: the state dicts by name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


torch.serialization.add_safe_globals([RankState])  # for torch.load(weights_only=True)


class GossipState:
    """All of a run's state, as a ``Stateful`` for torch's distributed checkpoint.

    Gossiping ranks differ from each other, so each saves its own state: module, optimizers, and of
    the algorithm the push-sum weight, the topology's round, the state of outer steps, and messages
    not merged yet. Schedulers, a ``GradScaler``, random generators and the position in the data
    are up to the user. Both methods must be called by all ranks together, between two steps::

        state = GossipState(model, optimizer)
        torch.distributed.checkpoint.save({"gossip": state}, checkpoint_id="step-1000")
        torch.distributed.checkpoint.load({"gossip": state}, checkpoint_id="step-1000")

    or, with a file for each rank, ``torch.save(state.state_dict(), path)`` and
    ``state.load_state_dict(torch.load(path))``. ``state.load(checkpoint_id)`` is the second line
    with one sentence as its error for a checkpoint of another number of ranks.

    Of a module that ``fully_shard`` has sharded, a rank saves its shards, as plain tensors.

    A run must resume with the same number of ranks, algorithm and ``bucket_cap_mb``. With another
    number of ranks, or other shards, restart from the consensus: save ``averaged.state_dict()``
    inside ``with model.consensus() as averaged``, and load it into the bare module.

    Args:
        optimizer: the optimizer it was created with, or the list of several.
    """

    def __init__(
        self, model: GossipDataParallel, optimizer: Optimizer | Sequence[Optimizer]
    ) -> None:
        self._model = model
        self._optimizers = as_optimizers(optimizer)
        own = [reference() for reference in model._optimizers]
        is_one = len(own) == len(self._optimizers) == 1
        if not (is_one or list(map(id, own)) == list(map(id, self._optimizers))):
            names, got = (_join_kinds(each) for each in (own, self._optimizers))
            raise ValueError(
                f"optimizer must be what the trainer was created with, {names}, got {got}"
            )
        if not model._averager.traits.has_fixed_ranks:
            raise ValueError(
                "model must have ranks that stay, as each loads its own state, got one with "
                "membership; save averaged.state_dict() inside `with model.consensus() as averaged`"
            )
        group = model.process_group
        self._key = f"rank-{dist.get_rank(group)}-of-{dist.get_world_size(group)}"
        for _, shard in describe_shard(model.module):
            self._key += f"-shard-{shard.replace(' ', '-')}"

    @concise
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state under this rank's key, in the memory of the CPU."""
        values: dict[str, Any] = {
            "config": self._model.config_fields,
            "algorithm": self._model._collect_state(),
            "module": self._local(self._model.state_dict()),
            "optimizer_kinds": [training.optimizer_kind(each) for each in self._optimizers],
            "optimizers": [self._local(optimizer.state_dict()) for optimizer in self._optimizers],
        }
        return {self._key: RankState(training.seal(values))}

    @concise
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what ``state_dict`` returned; all ranks call it together.

        A state that is damaged, or of another number of ranks, algorithm, module or optimizer, and
        states that are not of one step, are a DisagreementError on all ranks, which have changed
        nothing.
        """
        model, averager = self._model, self._model._averager
        check_states_together(averager, lambda: self._read(state_dict), averager.run)
        values = state_dict[self._key].values
        module = values["module"]
        if model._sharded:
            own = model.state_dict()
            module = {key: like(own[key], value) for key, value in module.items()}
        model.load_state_dict(module)
        for optimizer, saved in zip(self._optimizers, values["optimizers"], strict=True):
            training.load_copy(optimizer, _like_parameters(optimizer, saved))
        averager.load_state_dict(values["algorithm"])
        averager.run.mend()

    def load(self, checkpoint_id: str | os.PathLike[str], name: str = "gossip") -> None:
        """Load a folder of ``torch.distributed.checkpoint``; all ranks call it together.

        ``name`` is the key of this object when it was saved, as in ``save({"gossip": state})``.
        Errors are as of ``load_state_dict``.
        """
        state: dict[str, Any] = {name: {self._key: None}}

        def check() -> list[tuple[str, str]]:
            keys = training.read_metadata(checkpoint_id)
            found = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
            self._check_key(found, "checkpoint_id")
            training.read_checkpoint(state, checkpoint_id)
            return []

        training.check_on_all_ranks(check, self._model._run.agree)
        self.load_state_dict(state[name])

    def _local(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state without DTensors, whose mesh another process does not have."""
        return locals_of(state) if self._model._sharded else state

    def _check_key(self, keys: list[str], argument: str) -> None:
        if self._key not in keys:
            raise ValueError(
                f"{argument} must hold {self._key!r} (a run must resume with as many ranks as it "
                "was saved with; otherwise load a consensus into the bare module), got "
                f"{sorted(keys)}"
            )

    def _read(self, state_dict: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return the algorithm's state, and what must be equal on all ranks, or raise any error."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict must be a dict, got {training.summarize(state_dict)}")
        self._check_key(list(map(str, state_dict)), "state_dict")
        values = state_dict[self._key].values
        training.check_format(values)
        algorithm: dict[str, Any] = values["algorithm"]
        self._check_fields(values["config"])
        own, module = self._local(self._model.state_dict()), values["module"]
        training.check_like(module, own, "module")
        training.check_optimizer_kinds(self._optimizers, values["optimizer_kinds"])
        for index, each in enumerate(self._optimizers):
            saved = values["optimizers"][index]
            training.check_optimizer_state(each, saved, f"optimizers.{index}")
        if not self._model._averager.traits.has_equal_parameters:
            return algorithm, []
        names = [name for name, _ in self._model.named_parameters() if name in own]
        total = sum(training.checksum(module[name]) for name in names)
        return algorithm, [("checksum of the parameters in state_dict", str(total))]

    def _check_fields(self, saved: list[tuple[str, str]]) -> None:
        fields = self._model.config_fields
        if self._model.loads_other_buckets:
            fields, saved = ([f for f in each if f[0] != BUCKETS] for each in (fields, saved))
        if difference := first_difference(fields, saved):
            name, here, there = difference
            raise ValueError(f"state_dict must be of the same {name}, {here}, got {there}")


def _like_parameters(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with DTensors where its parameters are."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owner = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {
            name: like(owner[number], value) if isinstance(value, Tensor) else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in saved["state"].items()
    }
    return {**saved, "state": state}


def _join_kinds(optimizers: Sequence[Any]) -> str:
    return ", ".join(map(training.optimizer_kind, optimizers))
