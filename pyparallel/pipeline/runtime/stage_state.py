"""What a stage saves of its optimizers and schedulers."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...training import check_optimizer_state, optimizer_kind, summarize


def check_training_state(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    state: dict[str, Any],
    path: str,
) -> None:
    """Raise an error, of any type, if optimizers and schedulers cannot load a state at ``path``."""
    if optimizers:
        _check_optimizer_states(optimizers, state, f"{path}.optimizer")
    if schedulers:
        saved = all_of(state["scheduler"])
        if len(saved) != len(schedulers) or not all(isinstance(s, dict) for s in saved):
            what = "a dict" if len(schedulers) == 1 else f"{len(schedulers)} dicts"
            raise ValueError(
                f"{path}.scheduler must be {what}, got {summarize(state['scheduler'])}"
            )


def _check_optimizer_states(
    optimizers: Sequence[Optimizer], state: dict[str, Any], path: str
) -> None:
    saved, kinds = all_of(state["optimizer"]), all_of(state.get("optimizer_kind"))
    if len(saved) != len(optimizers) or len(kinds) != len(saved):
        mine = ", ".join(map(optimizer_kind, optimizers))
        raise ValueError(
            f"{path} must be of the same optimizers, {mine}, got {', '.join(map(str, kinds))}"
        )
    for number, optimizer in enumerate(optimizers):
        own_path = path if len(saved) == 1 else f"{path}.{number}"
        check_optimizer_state(optimizer, saved[number], kinds[number], own_path)


def one_or_all(values: list[Any]) -> Any:
    """Return the only value itself, as states of one optimizer have always been."""
    return values[0] if len(values) == 1 else values


def all_of(saved: Any) -> list[Any]:
    """Return a list of what ``one_or_all`` has returned."""
    return saved if isinstance(saved, list) else [saved]
