"""The saved states of a rank's stages."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..comm import Collectives, Run
from ..training import check_format, check_like, check_on_all_ranks, seal, summarize
from .errors import agree
from .runtime.clipping import device_for
from .runtime.stage import Stage


def save_stages(
    stages: Sequence[Stage], step: int, seed: int, split: Sequence[int] | None
) -> dict[str, Any]:
    """Return the states of stages, by index; ``seed`` is that of ``StageGenerators``."""
    marks = {"step": step, "seed": seed, "split": split}
    return {str(stage.index): seal({**marks, **stage.state_dict()}) for stage in stages}


def rescue_stages(
    stages: Sequence[Stage], step: int, seed: int, split: Sequence[int] | None
) -> dict[str, Any]:
    """Return the states of a failed pipeline's stages; a RuntimeWarning if one is half updated."""
    state = {}
    for stage in stages:
        stage.weights.restore_live()
        marks = {"step": step, "seed": seed, "split": split}
        marks |= {"rescued": True, "half_updated": stage.is_updating}
        state[str(stage.index)] = seal({**stage.state_dict(is_rescued=True), **marks})
    _warn_if_half_updated(state)
    return state


def split_of(state: object) -> Any:
    """Return the split that a state was saved with, or None if it has none."""
    stages = state.values() if isinstance(state, Mapping) else ()
    return next((stage["split"] for stage in stages if "split" in stage), None)


def load_stages(stages: Sequence[Stage], state: Mapping[str, Any], run: Run) -> tuple[int, int]:
    """Load the states of stages, if all ranks can; return the step and the seed of the states."""
    check_on_all_ranks(lambda: _check_stages(stages, state), partial(agree, run))
    step, is_rescued = _agree_on_step(state, run)
    for stage in stages:
        stage.load_state_dict(state[str(stage.index)], is_rescued=is_rescued)
    _warn_if_half_updated(state)
    return step, next(saved["seed"] for saved in state.values())


def _check_stages(stages: Sequence[Stage], state: Mapping[str, Any]) -> list[tuple[str, str]]:
    own = [str(stage.index) for stage in stages]
    if not isinstance(state, Mapping) or sorted(state) != sorted(own):
        names = ", ".join(map(str, state)) if isinstance(state, Mapping) else summarize(state)
        raise ValueError(
            f"state must be of stages {', '.join(own)}, got {names}: "
            "load it on the rank that saved it, with the same split"
        )
    for stage in stages:
        saved = state[str(stage.index)]
        check_format(saved)
        for key in ("step", "seed"):
            check_like(saved[key], 0, f"{stage.index}.{key}")
        stage.check_state(saved, str(stage.index))
    steps = [str(state[number]["step"]) for number in own]
    if len(set(steps)) > 1 and not _is_rescued(state):
        raise ValueError(f"state must be of one step, got stages of {', '.join(steps)}")
    return []


def _agree_on_step(state: Mapping[str, Any], run: Run) -> tuple[int, bool]:
    """Return the step of all ranks' states; the least one, if any is of ``rescue_stages``."""
    steps = [saved["step"] for saved in state.values()]
    own = torch.tensor([_is_rescued(state), min(steps)], device=device_for([], run))
    gathered = Collectives(run).all_gather(own).tolist()
    any_rescued = any(is_rescued for is_rescued, _ in gathered)
    if not any_rescued:
        agree(run, [("step of state", str(steps[0]))], None)
    return min(step for _, step in gathered), any_rescued


def _is_rescued(state: Mapping[str, Any]) -> bool:
    return any(saved.get("rescued", False) for saved in state.values())


def _warn_if_half_updated(state: Mapping[str, Any]) -> None:
    found = [number for number, saved in state.items() if saved.get("half_updated", False)]
    if found:
        warnings.warn(
            f"the failure was inside of an update of stage {', '.join(found)}, which may have "
            "changed a part of its weights and of its optimizer's state: load an earlier "
            "checkpoint if that matters",
            RuntimeWarning,
            stacklevel=5,
        )
