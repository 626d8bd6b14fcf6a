"""What happens to an optimizer's state when units move to another subnet."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..training import summarize


class OptimizerState(Protocol):
    """Policy for the optimizer's state between rounds: immutable, with a complete ``repr``."""

    def carried_state(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors that move with their parameter, by its name and their key.

        One that is neither elementwise nor a scalar is a ValueError.
        """

    def on_new_round(self, optimizer: Optimizer, initial_state: Mapping[Any, Any]) -> None:
        """Prepare for the next round's units; ``initial_state`` is of before the first step."""
        return


@dataclass(frozen=True)
class CarryState(OptimizerState):
    """Policy that moves state with its weights: a unit keeps its momentum.

    Floating-point tensors of their parameter's shape move with it, and are averaged for parameters
    that all subnets share. Scalars such as Adam's ``step`` stay: they count the rank's steps. An
    entry that no subnet has had yet starts at its value before the first step, or at zero if a step
    creates the state.
    """

    @override
    def carried_state(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        carried: dict[str, dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            found = sorted(optimizer.state.get(parameter, {}).items())
            carried[name] = {k: v for k, v in found if _is_carried(name, k, v, parameter)}
        return carried


@dataclass(frozen=True)
class ResetState(OptimizerState):
    """Policy that resets the state in every round, as the paper's plain SGD has none."""

    @override
    def carried_state(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        return {name: {} for name in parameters}

    @override
    def on_new_round(self, optimizer: Optimizer, initial_state: Mapping[Any, Any]) -> None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(initial_state)})


def _is_carried(name: str, key: str, value: object, parameter: nn.Parameter) -> bool:
    if isinstance(value, Tensor):
        if key == "step":  # has the shape of a 0-d parameter, but is a counter
            return False
        if value.shape == parameter.shape and value.is_floating_point():
            return True
        if value.numel() == 1:
            return False
    elif not isinstance(value, list | tuple | dict):
        return False
    raise ValueError(
        "optimizer state must be floating-point and of its parameter's shape to move with it, "
        f"got {key} of {name}: {summarize(value)} for {list(parameter.shape)}; use ResetState() or "
        "another optimizer"
    )
