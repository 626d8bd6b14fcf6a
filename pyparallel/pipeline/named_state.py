"""States of a pipeline under the names of the whole model, whatever its split."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import training
from ..comm import Run, gather_json
from ..training.arguments import require
from .errors import agree
from .partition.names import names_of_modules, plain_names
from .partition.torch_pipe import UnpackInputs
from .runtime.stage import Stage
from .schedules.schedule import Schedule, find_option_error

State = dict[str, Any]

_STATE, _GROUPS, _KIND = "optimizer.state", "optimizer.param_groups", "optimizer.kind"
_NORM = "squared_norm"  # of the gradient in the last update, where updates are clipped by it


class NamedStage(NamedTuple):
    """A stage, and the names that its parameters and its module's state have in the whole model."""

    stage: Stage
    names: Mapping[str, str]

    def module_state(self) -> State:
        """Return the state of the module by name in the whole model."""
        state = self.stage.module.state_dict()
        return {self.names[key]: value for key, value in state.items()}

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters in each group; a RuntimeError for one of no layer."""
        own = {p: self.names[key] for key, p in self.stage.module.named_parameters()}
        groups = [group["params"] for group in optimizer.param_groups]
        if any(parameter not in own for group in groups for parameter in group):
            raise RuntimeError(
                f"the optimizers of stage {self.stage.index} must hold parameters of its layers "
                "alone to be saved by name, got others; save trainer.state_dict()"
            )
        return [[own[parameter] for parameter in group] for group in groups]

    def norm_keys(self) -> list[str]:
        """Return the key of each parameter's norm, in the order of the stage's; none without."""
        if self.stage.clipper is None:
            return []
        of_groups = (self.parameter_names(optimizer) for optimizer in self.stage.optimizers)
        return [f"{_NORM}.{name}" for groups in of_groups for names in groups for name in names]

    def schedulers(self) -> Iterator[tuple[str, LRScheduler]]:
        """Yield each scheduler with its key: the kind of its optimizer, and which of this kind."""
        kinds = [training.optimizer_kind(optimizer) for optimizer in self.stage.optimizers]
        for index, scheduler in enumerate(self.stage.schedulers):
            yield f"scheduler.{kinds[index]}.{kinds[:index].count(kinds[index])}", scheduler


def name_stages(
    stages: Sequence[Stage], model: Any, layers: Sequence[nn.Module], run: Run
) -> list[NamedStage]:
    """Return stages with the names of the whole model; all ranks call this together."""
    names = names_of_modules(model, layers)
    named = [NamedStage(stage, plain_names(stage.module, names)) for stage in stages]
    if any(isinstance(layer, UnpackInputs) for layer in layers):
        _check_names(named, run)
    return named


def _check_names(stages: Sequence[NamedStage], run: Run) -> None:
    """Raise a ValueError on all ranks if two stages have tensors, not tied, of one name."""
    own = []
    for stage in stages:
        borrowed = getattr(stage.stage.module, "borrowed", {})
        own += [stage.names[key] for key in stage.stage.module.state_dict() if key not in borrowed]
    of_ranks = [own]
    if run.size > 1:
        content = "names of tensors"
        of_ranks = gather_json(own, run.group, content, content, lambda n: list(map(str, n)))
    counts = Counter(name for names in of_ranks for name in names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "stages must have the names of one model for a state of the whole, got "
            f"{', '.join(twice[:3])}{' and more' if len(twice) > 3 else ''} in several: split the "
            "stages from one model, or save state_dict() of each rank"
        )


def check_shardable(schedule: Schedule) -> None:
    """Raise a RuntimeError if stages have heads, which are no part of the model."""
    if why := find_option_error(schedule, "sharded_state_dict"):
        raise RuntimeError(
            f"sharded_state_dict() must be of a schedule without heads, got {schedule!r}, {why}: "
            "save state_dict()"
        )


def sharded_state(
    stages: Sequence[NamedStage], step: int, seed: int, split: Sequence[int] | None
) -> State:
    """Return the state of this rank's stages by keys of the whole model; tensors are not copied.

    The keys are ``model.NAME``, ``optimizer.state.NAME.KEY``, ``optimizer.param_groups.NAME.KEY``,
    ``optimizer.kind.NAME``, ``scheduler.KIND.INDEX``, ``squared_norm.NAME``, ``step``,
    ``seed``, ``split`` and ``updates``.
    """
    state: State = {"step": step, "seed": seed, "split": split}
    for stage in stages:
        state["updates"] = stage.stage.num_updates
        state.update((f"model.{name}", value) for name, value in stage.module_state().items())
        for optimizer in stage.stage.optimizers:
            named = zip(optimizer.param_groups, stage.parameter_names(optimizer), strict=True)
            for group, names in named:
                for parameter, name in zip(group["params"], names, strict=True):
                    state[f"{_KIND}.{name}"] = training.optimizer_kind(optimizer)
                    of_parameter = optimizer.state.get(parameter, {})
                    state.update((f"{_STATE}.{name}.{k}", v) for k, v in of_parameter.items())
                    options = {k: v for k, v in group.items() if not k.startswith("param")}
                    state.update((f"{_GROUPS}.{name}.{k}", v) for k, v in options.items())
        if stage.stage.clipper is not None and stage.stage.clipper.last is not None:
            state.update(zip(stage.norm_keys(), stage.stage.clipper.last.unbind(), strict=True))
        # In a tuple: DCP saves it as one object.
        state.update((key, (own.state_dict(),)) for key, own in stage.schedulers())
    return state


def read_split(checkpoint_id: str | os.PathLike[str]) -> Any:
    """Return the split that a folder of ``sharded_state`` was saved with, or None."""
    state: State = {"split": None}
    if "split" in training.read_metadata(checkpoint_id):
        training.read_checkpoint(state, checkpoint_id)
    return state["split"]


def load_checkpoint(
    stages: Sequence[NamedStage], checkpoint_id: str | os.PathLike[str], run: Run
) -> tuple[int, int]:
    """Load a folder that holds ``sharded_state`` into all ranks or none; return step and seed."""
    # It takes long to import.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    state: State = {}

    def read() -> list[tuple[str, str]]:
        saved = training.read_metadata(checkpoint_id)
        keys = _keys_of(stages, list(saved))
        missing = [key for key in keys if key not in saved]
        if missing:
            shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
            raise ValueError(
                "checkpoint_id must hold the sharded_state_dict() of a trainer of the same model "
                f"and optimizers, got {os.fspath(checkpoint_id)} without {shown}"
            )
        for key in keys:
            kept = saved[key]
            state[key] = None
            if isinstance(kept, TensorStorageMetadata):
                state[key] = torch.empty(kept.size, dtype=kept.properties.dtype, device="cpu")
        training.read_checkpoint(state, checkpoint_id)
        for stage in stages:
            own = {f"model.{name}": value for name, value in stage.module_state().items()}
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            own.update((key, zero) for key in stage.norm_keys() if key in state)
            training.check_like({key: state[key] for key in own}, own, "checkpoint_id")
            for optimizer in stage.stage.optimizers:
                loaded = _optimizer_state(stage, optimizer, state)
                training.check_optimizer_state(optimizer, loaded, "checkpoint_id")
        return []

    training.check_on_all_ranks(read, partial(agree, run))
    for stage in stages:
        module = stage.stage.module
        own = {key: state[f"model.{stage.names[key]}"] for key in module.state_dict()}
        module.load_state_dict(own)
        for optimizer in stage.stage.optimizers:
            optimizer.load_state_dict(_optimizer_state(stage, optimizer, state))
        for key, scheduler in stage.schedulers():
            scheduler.load_state_dict(_scheduler_state(scheduler, state[key][0]))
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        norms = [state.get(key, zero) for key in stage.norm_keys()]
        stage.stage.load_updates(state["updates"], torch.stack(norms) if norms else None)
    return state["step"], state["seed"]


def _keys_of(stages: Sequence[NamedStage], saved: Sequence[str]) -> list[str]:
    of_parameter: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith((_STATE, _GROUPS)):
            of_parameter.setdefault(key.rpartition(".")[0], []).append(key)
    keys = ["step", "updates", "seed"]
    for stage in stages:
        keys += [f"model.{name}" for name in stage.module_state()]
        for optimizer in stage.stage.optimizers:
            for name in (name for names in stage.parameter_names(optimizer) for name in names):
                keys.append(f"{_KIND}.{name}")
                keys += of_parameter.get(f"{_STATE}.{name}", [])
                keys += of_parameter.get(f"{_GROUPS}.{name}", [])
        keys += [key for key, _ in stage.schedulers()]
        keys += [key for key in stage.norm_keys() if key in saved]  # else it counts as 0
    return keys


def _optimizer_state(each: NamedStage, optimizer: Optimizer, state: State) -> State:
    loaded = optimizer.state_dict()
    loaded["state"] = {}
    by_name: dict[str, dict[str, State]] = {}
    for key, value in state.items():
        if key.startswith((_STATE, _GROUPS)):
            head, _, last = key.rpartition(".")
            what = _STATE if key.startswith(_STATE) else _GROUPS
            name = head.removeprefix(f"{what}.")
            by_name.setdefault(name, {_STATE: {}, _GROUPS: {}})[what][last] = value
    kind = training.optimizer_kind(optimizer)
    for group, names in zip(loaded["param_groups"], each.parameter_names(optimizer), strict=True):
        options: list[State] = []
        for number, name in zip(group["params"], names, strict=True):
            rule = f"checkpoint_id must be of the same optimizer, {kind} for {name}"
            require(state[f"{_KIND}.{name}"] == kind, rule, str(state[f"{_KIND}.{name}"]))
            saved = by_name.get(name, {_STATE: {}, _GROUPS: {}})
            if saved[_STATE]:
                loaded["state"][number] = saved[_STATE]
            options.append(saved[_GROUPS])
        # The options of an empty group, which has no name to be saved by, stay as they are.
        for key, value in (options or [{}])[0].items():
            if any(repr(value) != repr(other.get(key)) for other in options):
                raise ValueError(
                    f"checkpoint_id must have one {key} for the parameters of a group, got several "
                    f"for {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: group "
                    "them as they were saved"
                )
            group[key] = value
    return loaded


def _scheduler_state(scheduler: Any, saved: State) -> State:
    """Return a scheduler's saved state with rates for the groups that its optimizer has here."""
    groups = scheduler.optimizer.param_groups
    own = scheduler.state_dict()
    state: State = {}
    for key, value in saved.items():
        if key == "_schedulers":  # of SequentialLR and ChainedScheduler
            parts = zip(scheduler._schedulers, value, strict=True)
            state[key] = [_scheduler_state(each, part) for each, part in parts]
        elif key == "base_lrs":
            state[key] = [group["initial_lr"] for group in groups]
        elif key == "_last_lr":
            state[key] = [group["lr"] for group in groups]
        else:
            is_of_groups = isinstance(value, list) and len(value) != len(own.get(key, value))
            state[key] = own[key] if is_of_groups else value
    return state
