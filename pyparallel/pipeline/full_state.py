"""The state of the whole model, from those of all stages."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Collectives, Run, device_of, gather_json
from ..training.arguments import check_type, find_error, require
from ..training.full_state import on_cpu
from ..training.trainer import raising_on_all_ranks
from .errors import agree
from .named_state import NamedStage, State


def full_state(stages: Sequence[NamedStage], run: Run, *, keeps: bool) -> State:
    """Return the state dict of the whole model in the CPU's memory, or {} unless a rank keeps it.

    All ranks call it together.
    """
    own = {name: value for stage in stages for name, value in stage.module_state().items()}
    if run.size == 1:
        return {name: on_cpu(value) for name, value in own.items() if keeps}
    with raising_on_all_ranks(run.agree):
        for name, value in own.items():
            rule = f"{name} must be a tensor or of JSON's types for full_state_dict()"
            require(_can_be_sent(value), rule, value, "save sharded_state_dict()")
    described = [
        [name, [*value.shape], str(value.dtype)] if isinstance(value, Tensor) else [name, value]
        for name, value in own.items()
    ]
    content = "names, shapes and dtypes of tensors"
    of_ranks = gather_json(described, run.group, content, "states", _parse)
    ranks, device = Collectives(run), device_of(run.group)
    state: State = {}
    for rank, theirs in enumerate(of_ranks):
        for name, kept in theirs:
            value = kept
            if isinstance(kept, Tensor):
                value = torch.empty_like(kept, device=device)
                if rank == ranks.rank:
                    value = own[name].detach().to(device).contiguous()
                ranks.broadcast_(value, rank)
            if keeps:
                state[name] = on_cpu(value)
    return state


def load_into(model: nn.Module | None, stages: Sequence[NamedStage], run: Run) -> None:
    """Load the state of all stages into a model where it is not None; all ranks call it."""
    state = full_state(stages, run, keeps=model is not None)
    agree(run, [], None if model is None else find_error(lambda: _check_model(model, state)))
    if model is not None:
        model.load_state_dict(state)


def _check_model(model: nn.Module, state: State) -> None:
    check_type("model", model, nn.Module, "a module, or None on a rank that needs none")
    own = model.state_dict()
    rule = "model must have the names of what was trained"
    if different := sorted(own.keys() ^ state.keys()):
        name = different[0]
        got = f"one without {name}" if name in state else f"one with {name}, which was not"
        raise ValueError(f"{rule}, got {got}")
    for name, value in state.items():
        if isinstance(value, Tensor):
            rule = f"{name} of model must be of shape {list(value.shape)}, as it was trained"
            require(own[name].shape == value.shape, rule, str(list(own[name].shape)))


def _can_be_sent(value: Any) -> bool:
    """Return whether a value is a tensor, or is the same after it was sent as JSON."""
    try:
        return isinstance(value, Tensor) or repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def _parse(described: Any) -> list[tuple[str, Any]]:
    try:
        return [
            (str(name), *value)
            if len(value) == 1
            else (
                str(name),
                torch.empty(value[0], dtype=getattr(torch, value[1][6:]), device="meta"),
            )
            for name, *value in described
        ]
    except (AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(str(error)) from error
