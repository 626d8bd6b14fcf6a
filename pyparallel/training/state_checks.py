"""How a saved state is read, and compared with what it is to be loaded into."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..comm import Call
from .arguments import require, summarize
from .shards import local_of

# What the optimizers of torch, and then a pipeline, keep in the shape of the parameter.
_OF_PARAMETERS_SHAPE = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"),
    *("last_gradient", "last_update", "last_uncorrected_update", "average_change"),
}


def check_on_all_ranks(
    check: Callable[[], list[tuple[str, str]]],
    agree: Callable[..., None],
) -> None:
    """Check this rank's state, and raise on all ranks alike if that of any cannot be loaded.

    ``check`` raises any error, or returns what must be equal on all ranks; ``agree`` compares it.
    """
    fields: list[tuple[str, str]] = []
    problem = None
    try:
        fields = check()
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # the state may be anything; `agree` raises it on all ranks
        reason = f"without {error}" if isinstance(error, KeyError) else f"{error}"
        problem = f"state_dict must be a whole result of state_dict(), got one {reason}"
    agree(fields, problem, call=Call.LOAD)


def read_metadata(checkpoint_id: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata, by key, of a folder that ``torch.distributed.checkpoint`` has saved."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes long to import

    try:
        found: dict[str, Any] = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(
            "checkpoint_id must be a folder that torch.distributed.checkpoint has saved, got "
            f"{os.fspath(checkpoint_id)}: {error.strerror}"
        ) from error
    return found


def read_checkpoint(state: dict[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Read the values of a state, of empty tensors and None, from a folder of DCP's.

    Each rank reads for itself: together, torch's ``load`` has ranks unpickle what others send.
    A file that is damaged or missing is a ValueError.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # takes long to import
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            load(state, checkpoint_id=checkpoint_id, no_dist=True)
        except CheckpointException as error:
            reasons = [f"{type(each).__name__}: {each}" for each, _ in error.failures.values()]
            raise ValueError(
                f"checkpoint_id must be a whole checkpoint, got {os.fspath(checkpoint_id)} with "
                f"{', '.join(reasons)}"
            ) from error


def check_like(saved: Any, own: Any, path: str) -> None:
    """Raise a ValueError unless a saved value has the structure, shapes and dtypes of one's own.

    One's own may be None or empty: then anything fits. Numbers that count must be at least 0.
    """
    if own is None or (isinstance(own, Mapping | list | tuple) and not own):
        return
    if isinstance(own, Tensor):
        if not (isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (own.shape, own.dtype)):
            raise ValueError(f"{path} must be {summarize(own)}, got {summarize(saved)}")
    elif isinstance(own, Mapping):
        if not isinstance(saved, Mapping) or saved.keys() != own.keys():
            raise ValueError(f"{path} must be {summarize(own)}, got {summarize(saved)}")
        # A module's extra state may be anything.
        for key in (each for each in own if not str(each).endswith("_extra_state")):
            check_like(saved[key], own[key], f"{path}.{key}")
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(own):
            raise ValueError(f"{path} must be a list of {len(own)}, got {summarize(saved)}")
        for index, value in enumerate(own):
            check_like(saved[index], value, f"{path}.{index}")
    elif type(own) is int:
        if type(saved) is not int or saved < 0 <= own:
            raise ValueError(f"{path} must be an integer, at least 0, got {summarize(saved)}")
    elif not isinstance(saved, (int, float) if isinstance(own, float) else type(own)):
        raise ValueError(f"{path} must be of type {type(own).__name__}, got {summarize(saved)}")


def optimizer_kind(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, by which its state is known."""
    return type(optimizer).__name__


def check_optimizer_kinds(optimizers: Sequence[Optimizer], saved: Any) -> None:
    """Raise a ValueError unless the saved names of optimizers' classes are those of these."""
    mine = list(map(optimizer_kind, optimizers))
    got = ", ".join(map(str, saved)) if isinstance(saved, list) else summarize(saved)
    require(saved == mine, f"state_dict must be of the same optimizers, {', '.join(mine)}", got)


def check_optimizer_state(optimizer: Optimizer, saved: Any, path: str) -> None:
    """Raise a ValueError if an optimizer cannot load a state of one of its class."""
    groups = saved["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    rule = f"{path} must have parameter groups of {sizes} parameters"
    got = str([len(group["params"]) for group in groups])
    require([len(group["params"]) for group in groups] == sizes, rule, got)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            where = f"{path}.state.{number}.{key}"
            own = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
            if isinstance(own, Tensor) or key in _OF_PARAMETERS_SHAPE:
                shape = local_of(own if isinstance(own, Tensor) else parameter).shape
                if not (value is None or (isinstance(value, Tensor) and value.shape == shape)):
                    raise ValueError(
                        f"{where} must be a tensor of shape {list(shape)}, got {summarize(value)}"
                    )
            is_number = isinstance(value, int | float) or (
                isinstance(value, Tensor) and value.numel() == 1
            )
            if key == "step" and is_number and not 0 <= float(value) < math.inf:
                raise ValueError(f"{where} must be at least 0, got {float(value)}")


def load_copy(target: Any, saved: Any) -> None:
    """Load a copy of a state into an optimizer or scheduler, which may later write what it got."""
    target.load_state_dict(copy.deepcopy(saved))
